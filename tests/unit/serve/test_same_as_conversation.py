"""The same dialogue gives the same training sequence, whether an agent holds it through a session or the built-in
conversation does: the same tokens, masks, log-probs and versions."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.chat_tokenizer import chat_tokenizer

from llamarl.config import ConversationConfig
from llamarl.config.file import load_config
from llamarl.engine.prompts import Prompts
from llamarl.generate.conversation import make_conversations
from llamarl.generate.decoder import ContinuousDecoder
from llamarl.generate.limits import Limits
from llamarl.generate.prompting import prompt_tokens, reply_tokens
from llamarl.model.checkpoint import load_model
from llamarl.model.tokenizer import Tokenizer
from llamarl.serve.session import Answered, Chat, Message
from llamarl.serve.sessions import TrainingSession, common_prompt, completion_of
from llamarl.serve.text import whole_text
from llamarl.tasks.registry import make_task
from llamarl.types import (
    Completion,
    CompletionGroup,
    Problem,
    Turn,
    VersionRun,
    bytes_to_floats,
    bytes_to_tokens,
)

EXAMPLE = Path(__file__).parents[3] / "examples" / "calculator.yaml"


def conversations(count: int) -> tuple[Tokenizer, list[CompletionGroup]]:
    """Groups of the example, answered by the model that ships with LlamaRL and its calculator."""
    config = load_config(
        EXAMPLE,
        ["generator.slots=64", "conversation.max_turns=3", "generator.max_new_tokens=16", "generator.temperature=3"],
    )
    tokenizer = Tokenizer.load(config.model_folder)
    prompts = Prompts(make_task(config.task, 0), tokenizer, config)
    decoder = ContinuousDecoder(
        load_model(config.model_folder), Limits.of(config), eos_ids=tokenizer.eos_ids, seed=0, max_turns=3
    )
    decoder.version = 7
    talks = make_conversations(config, decoder, tokenizer)
    for ordinal in range(count):
        decoder.add(prompts.group(ordinal))
    found: list[CompletionGroup] = []
    while not decoder.idle:
        found += talks.step()
    return tokenizer, found


def replayed(tokenizer: Tokenizer, group: CompletionGroup, completion: Completion) -> Completion:
    """The dialogue as an agent holds it: it sends back what it was told, and the tool's reply as the next message."""
    session = TrainingSession(tokenizer, max_calls=9)
    tokens, logprobs = bytes_to_tokens(completion.tokens).tolist(), bytes_to_floats(completion.behavior_logprobs)
    messages: list[Message] = [{"role": "user", "content": group.prompt.problem.prompt}]
    start = used = 0
    ends = [(reply.start, reply.start + reply.count) for reply in completion.given] + [(len(tokens), len(tokens))]
    for end, behind in ends:
        chat, turn = Chat(messages=tuple(messages)), tokens[start:end]
        text, _ = whole_text(tokenizer, turn, ())
        said: Message = {"role": "assistant", "content": text}
        session.record(
            Answered(
                prompt_tokens=session.prompt(chat),
                index=0,
                tokens=turn,
                logprobs=logprobs[used : used + len(turn)].tolist(),
                versions=(VersionRun(7, len(turn)),),
                finish="length" if completion.truncated and end == len(tokens) else "stop",
                chat=chat,
                message=said,
            )
        )
        used += len(turn)
        messages += [said, {"role": "user", "content": tokenizer.decode(tokens[end:behind])}]
        start = behind
    (branch,) = session.branches()
    assert list(common_prompt([branch])) == bytes_to_tokens(group.prompt.prompt_tokens).tolist()
    assert session.counts.unmatched == 0
    return completion_of(branch, len(branch.head), 0)


def test_the_calculator_example_gives_the_same_sequences_through_a_session() -> None:
    tokenizer, groups = conversations(40)
    several = 0
    for group in groups:
        for completion in group.completions:
            if (
                completion.given
                and completion.given[-1].start + completion.given[-1].count == len(completion.tokens) // 4
            ):
                continue  # ended by the room for tokens, behind a reply: an agent cannot be answered there
            several += bool(completion.given)
            seen = replayed(tokenizer, group, completion)
            for field in ("tokens", "behavior_logprobs", "versions", "given", "truncated"):
                assert getattr(seen, field) == getattr(completion, field), field
    assert several > 20, "hardly any conversation"


@pytest.mark.parametrize("role", ["user", "tool"])
def test_replies_in_a_chat_template_are_the_same_tokens(role: str) -> None:
    tokenizer = chat_tokenizer()
    turns = (Turn("system", "be brief"), Turn("user", "1+2"))
    problem, settings = Problem("1+2", "3", turns), ConversationConfig(role=role)  # type: ignore[arg-type]
    session = TrainingSession(tokenizer, max_calls=9)
    messages: list[Message] = [{"role": turn.role, "content": turn.content} for turn in turns]
    expected = prompt_tokens(tokenizer, problem)
    for said, reply in (("ab", "é"), ("c", "(what the model said)"), ("ca", "")):
        tokens = [token for char in said for token in tokenizer.encode(char)] + [tokenizer.eos_ids[0]]
        chat, message = Chat(messages=tuple(messages)), {"role": "assistant", "content": said}
        assert session.prompt(chat) == expected
        session.record(
            Answered(
                prompt_tokens=expected,
                index=0,
                tokens=tokens,
                logprobs=[0.0] * len(tokens),
                versions=(VersionRun(0, len(tokens)),),
                finish="stop",
                chat=chat,
                message=message,
            )
        )
        expected = [*expected, *tokens, *reply_tokens(tokenizer, problem, settings, reply)]
        messages += [message, {"role": role, "content": reply}]
    assert session.prompt(Chat(messages=tuple(messages))) == expected
