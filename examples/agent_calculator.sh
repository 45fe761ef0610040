#!/bin/sh
# The calculator agent as a shell script: it knows nothing of LlamaRL but a URL, a key and the problem on its standard input.
#     llamarl train examples/agent_calculator.yaml agent.run="''" 'agent.command=[sh, examples/agent_calculator.sh]'
problem=$(cat)
question=$(printf '%s' "$problem" | sed 's/.*"prompt":"\([^"]*\)".*/\1/')
right=$(printf '%s' "$problem" | sed 's/.*"answer":"\([^"]*\)".*/\1/')

ask() { # messages -> text of the model's answer
    curl -sS --fail-with-body "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
        -H 'Content-Type: application/json' -d "{\"model\": \"$LLAMARL_MODEL\", \"messages\": [$1]}" |
        sed 's/.*"content": *"\([^"]*\)".*/\1/'
}

user="{\"role\": \"user\", \"content\": \"$question\"}"
said=$(ask "$user") || exit 1
if [ -z "$said" ]; then # the model handed over at once: the calculator replies, and the model has another turn
    result=$((${question%=}))
    said=$result$(ask "$user, {\"role\": \"assistant\", \"content\": \"\"}, {\"role\": \"user\", \"content\": \"$result\"}") || exit 1
fi
if [ "$said" = "$right" ]; then echo 1; else echo 0; fi
