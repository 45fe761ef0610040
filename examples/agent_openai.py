"""The calculator agent with the `openai` package, unmodified: only its address and key are ours.

    llamarl train examples/agent_calculator.yaml agent.run=examples/agent_openai.py:run

It is examples/agent_calculator.py with another client.
"""

from __future__ import annotations

from typing import Any

import openai  # at the top, so that it is imported once for each process, not for each group

from llamarl.tasks.tools.calculator import compute, last_expression


def calculator(expression: str) -> str:
    try:
        return compute(expression)
    except ValueError as error:
        return f"error: {error}"


async def run(problem: Any, client: Any) -> float:
    async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as api:

        async def ask(messages: Any) -> str:
            answer = await api.chat.completions.create(model=client.model, messages=messages)
            return answer.choices[0].message.content or ""

        messages = [{"role": "user", "content": problem.prompt}]
        answer = await ask(messages)
        if (expression := last_expression(problem.prompt + answer)) is not None:
            result = calculator(expression)
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": result}]
            answer += result + await ask(messages)
        return float(answer.strip() == problem.answer)
