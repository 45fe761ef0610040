"""An agent that learns to use a calculator: `llamarl train examples/agent_calculator.yaml`.

`agent_openai.py` and `agent_anthropic.py` are the same with the clients of OpenAI and Anthropic, `agent_calculator.sh` is
nearly the same with curl.

The agent asks for a sum. If the model ends its turn after an open sum, the calculator writes the result as the next message,
and the model has another turn. The answer is what was written after the question, by the model or by the calculator; see
examples/calculator.yaml for the same with a built-in conversation. Nothing here knows of training.
"""

from __future__ import annotations

from typing import Any

from llamarl.tasks.tools.calculator import compute, last_expression


def calculator(expression: str) -> str:
    try:
        return compute(expression)
    except ValueError as error:
        return f"error: {error}"


async def run(problem: Any, client: Any) -> float:
    """`client` has the address and key of this sample's session, and a plain way to ask. Returns the reward."""
    messages = [{"role": "user", "content": problem.prompt}]
    answer = (await client.chat(messages))["content"] or ""
    if (expression := last_expression(problem.prompt + answer)) is not None:
        result = calculator(expression)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": result}]
        answer += result + ((await client.chat(messages))["content"] or "")
    return float(answer.strip() == problem.answer)
