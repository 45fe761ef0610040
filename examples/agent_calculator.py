"""Agents that learn to use a calculator, each with the client that people have: `openai`'s, `anthropic`'s, or none.

    llamarl train examples/agent_calculator.yaml                                  # run: no package needed
    llamarl train examples/agent_calculator.yaml agent.run=examples/agent_calculator.py:run_openai
    llamarl train examples/agent_calculator.yaml agent.run=examples/agent_calculator.py:run_anthropic

The agent asks for a sum. If the model ends its turn after an open sum, the calculator writes the result as the next message,
and the model has another turn. The answer is what was written after the question, by the model or by the calculator; see
examples/calculator.yaml for the same with a built-in conversation. Nothing here knows of training.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from llamarl.tasks.tools.calculator import compute, last_expression

Messages = list[dict[str, Any]]


async def solve(problem: Any, ask: Callable[[Messages], Awaitable[str]]) -> float:
    """One dialogue with any client: `ask` returns the model's text. Returns the reward."""
    messages: Messages = [{"role": "user", "content": problem.prompt}]
    said = await ask(messages)
    answer = said
    if (expression := last_expression(problem.prompt + said)) is not None:
        result = compute(expression)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": result}]
        answer = said + result + await ask(messages)
    return float(answer.strip() == problem.answer)


async def run(problem: Any, client: Any) -> float:
    async def ask(messages: Messages) -> str:
        return (await client.chat(messages))["content"] or ""

    return await solve(problem, ask)


async def run_openai(problem: Any, client: Any) -> float:
    async with client.openai() as api:

        async def ask(messages: Messages) -> str:
            answer = await api.chat.completions.create(model=client.model, messages=messages)
            return answer.choices[0].message.content or ""

        return await solve(problem, ask)


async def run_anthropic(problem: Any, client: Any) -> float:
    async with client.anthropic() as api:

        async def ask(messages: Messages) -> str:
            answer = await api.messages.create(model=client.model, messages=messages, max_tokens=8)
            return "".join(block.text for block in answer.content if block.type == "text")

        return await solve(problem, ask)
