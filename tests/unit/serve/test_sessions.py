"""A session keeps exact tokens: what was sampled stays as it was, and is trained once, whatever the client does."""

from __future__ import annotations

import random
from typing import Any

import pytest
from helpers.chat_tokenizer import chat_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.serve.refusals import RequestRefused
from llamarl.serve.session import Answered, Chat, Message
from llamarl.serve.sessions import Branch, TrainingSession, common_prompt, completion_of
from llamarl.types import VersionRun, bytes_to_floats, bytes_to_tokens, sampled_places

TOKENIZER = chat_tokenizer()
EOS = TOKENIZER.eos_ids[0]
WORDS = ["a", "ab", "abc", "ca", "é", "e\u0301", "🎉", "(what the model said)", "", " ", "<|im_end|>"]
TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {}}},)
Chats = list[Message]


def session(**limits: int) -> TrainingSession:
    return TrainingSession(TOKENIZER, **{"max_calls": 1000, **limits})


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


class Client:
    """Talks to a session as agents do, and remembers every sampled token by its log-prob, which no other token has."""

    def __init__(self, session_: TrainingSession, seed: int) -> None:
        self.session, self.chance = session_, random.Random(seed)
        self.histories: list[Chats] = []
        self.sampled: dict[float, tuple[tuple[int, ...], int, int]] = {}  # log-prob -> ids before it, its id, version

    def text(self) -> str:
        return "".join(self.chance.choices(WORDS, k=self.chance.randint(0, 4)))

    def begin(self) -> None:
        self.histories.append([user(self.text())])

    def ask(self, history: Chats, *, record: bool = True, n: int = 1) -> list[Message]:
        chat = Chat(messages=tuple(history), tools=TOOLS if self.chance.random() < 0.2 else ())
        self.session.begin_call()
        prompt = self.session.prompt(chat)
        return [self._answer(chat, prompt, index) for index in range(n)] if record else []

    def _answer(self, chat: Chat, prompt: list[int], index: int) -> Message:
        tokens = [self.chance.randrange(TOKENIZER.vocab_size - 2) for _ in range(self.chance.randint(1, 6))]
        ended = self.chance.random() < 0.8
        tokens += [EOS] * ended
        logprobs, versions = [], []
        for at, token in enumerate(tokens):
            logprob, version = -float(len(self.sampled) + 1), self.chance.randint(0, 3)
            self.sampled[logprob] = ((*prompt, *tokens[:at]), token, version)
            logprobs.append(logprob)
            versions.append(VersionRun(version, 1))
        message = self._message(tokens)
        self.session.record(
            Answered(
                prompt_tokens=prompt,
                index=index,
                tokens=tokens,
                logprobs=logprobs,
                versions=tuple(versions),
                finish="stop" if ended else "length",
                chat=chat,
                message=message,
            )
        )
        return message

    def _message(self, tokens: list[int]) -> Message:
        text = TOKENIZER.decode(tokens)
        if self.chance.random() < 0.3:
            call = {
                "id": f"call_{len(self.sampled)}",
                "type": "function",
                "function": {"name": "add", "arguments": {"a": 1}},
            }
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        return {"role": "assistant", "content": text, "reasoning_content": "thought"}

    def step(self) -> None:
        if not self.histories or self.chance.random() < 0.1:
            self.begin()
        history = self.chance.choice(self.histories)
        match self.chance.choice(["go on", "go on", "go on", "retry", "cancel", "many", "edit", "fork", "parallel"]):
            case "go on":
                self._go_on(history, self.ask(history)[0])
            case "retry":
                self.ask(history)
                self._go_on(history, self.ask(history)[0])
            case "cancel":
                self.ask(history, record=False)
            case "many":
                self._go_on(history, self.chance.choice(self.ask(history, n=3)))
            case "edit":
                at = self.chance.randrange(len(history))
                self.histories.append([*history[:at], {**history[at], "content": self.text()}, *history[at + 1 :]])
            case "fork":
                self.histories.append([*history[: self.chance.randint(1, len(history))], user(self.text())])
            case "parallel":
                other = self.chance.choice(self.histories)
                first, second = self.ask(history)[0], self.ask(other)[0]
                self._go_on(other, second)
                self._go_on(history, first)

    def _go_on(self, history: Chats, message: Message) -> None:
        """Send back what we were told, reasoning left out, with a reply."""
        sent: dict[str, Any] = {key: value for key, value in message.items() if key != "reasoning_content"}
        reply: Message = user(self.text())
        if calls := message.get("tool_calls"):
            reply = {"role": "tool", "tool_call_id": calls[0]["id"], "content": self.text()}
        continued = [*history, sent, reply]
        self.histories.append(continued)


def check(client: Client, branches: list[Branch]) -> None:
    """Every sampled token is trained exactly once, behind the very ids it was sampled behind, with its log-prob."""
    if not branches:
        assert not client.sampled
        return
    prompt = common_prompt(branches)
    seen: list[float] = []
    for branch in branches:
        completion = completion_of(branch, len(prompt), 0)
        tokens = [*prompt, *bytes_to_tokens(completion.tokens).tolist()]
        places = [len(prompt) + at for at in sampled_places(len(tokens) - len(prompt), completion.given)]
        logprobs = bytes_to_floats(completion.behavior_logprobs).tolist()
        versions = [run.version for run in completion.versions for _ in range(run.count)]
        for place, logprob, version in zip(places, logprobs, versions, strict=True):
            assert (tuple(tokens[:place]), tokens[place], version) == client.sampled[logprob]
        seen += logprobs
    assert sorted(seen) == sorted(client.sampled)


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 25))
def test_every_sampled_token_is_trained_once_as_it_was_sampled(seed: int, steps: int) -> None:
    client = Client(session(), seed)
    for _ in range(steps):
        client.step()
    check(client, client.session.branches())
    counts = client.session.counts
    assert counts.branches == len(client.session.branches()) and counts.unmatched <= counts.calls


def test_training_a_shared_turn_twice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(self: TrainingSession) -> list[Branch]:
        leaves = [turn for turn in self._turns if not turn.num_children]
        return [Branch((*leaf.prompt, *leaf.tokens), tuple(leaf.way), False) for leaf in leaves]

    monkeypatch.setattr(TrainingSession, "branches", twice)
    with pytest.raises(AssertionError):
        for seed in range(100):
            client = Client(session(), seed)
            for _ in range(20):
                client.step()
            check(client, client.session.branches())


def answer(
    one: TrainingSession, messages: Chats, tokens: list[int], *, finish: str = "stop", message: Message | None = None
) -> list[int]:
    chat = Chat(messages=tuple(messages))
    prompt = one.prompt(chat)
    one.record(
        Answered(
            prompt_tokens=prompt,
            index=0,
            tokens=tokens,
            logprobs=[-1.0] * len(tokens),
            versions=(VersionRun(0, len(tokens)),),
            finish="length" if finish == "length" else "stop",
            chat=chat,
            message=message or said(TOKENIZER.decode(tokens)),
        )
    )
    return [*prompt, *tokens]


SPELLED = [*TOKENIZER.encode("a"), *TOKENIZER.encode("b"), EOS]  # the text ab, which is one token when it is encoded


def test_what_the_model_wrote_stays_the_ids_it_sampled() -> None:
    one = session()
    sampled = answer(one, [user("hi")], SPELLED)
    prompt = one.prompt(Chat(messages=(user("hi"), said("ab"), user("and?"))))
    assert prompt[: len(sampled)] == sampled
    assert TOKENIZER.decode(prompt[len(sampled) :], skip_special_tokens=False) == (
        "\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert one.counts.unmatched == 0


def test_an_answer_that_was_cut_off_gets_the_end_that_it_lacks() -> None:
    one = session()
    sampled = answer(one, [user("hi")], SPELLED[:2], finish="length")
    behind = one.prompt(Chat(messages=(user("hi"), said("ab"), user("and?"))))[len(sampled) :]
    assert TOKENIZER.decode(behind, skip_special_tokens=False).startswith("<|im_end|>\n<|im_start|>user")
    answer(one, [user("hi"), said("ab"), user("and?")], SPELLED)
    assert not one.branches()[0].truncated


@pytest.mark.parametrize(
    "history",
    [
        [user("hi"), said("abc"), user("and?")],
        [user("hey"), said("ab"), user("and?")],
        [user("summary of it all"), said("I see"), user("and?")],
    ],
    ids=["edited answer", "edited question", "summary"],
)
def test_a_changed_history_is_another_branch_and_counted(history: Chats) -> None:
    one = session()
    answer(one, [user("hi")], SPELLED)
    answer(one, history, SPELLED)
    assert one.counts.unmatched == 1
    assert [len(branch.trained) for branch in one.branches()] == [1, 1]
    assert one.branches()[1].tokens[: len(one.prompt(Chat(messages=tuple(history))))] == tuple(TOKENIZER.chat(history))


def test_a_fork_trains_the_shared_turn_in_its_first_branch_only() -> None:
    one = session()
    start = [user("hi"), said("ab")]
    answer(one, start[:1], SPELLED)
    answer(one, [*start, user("left")], SPELLED)
    answer(one, [*start, user("right")], SPELLED)
    first, second = one.branches()
    assert [len(first.trained), len(second.trained)] == [2, 1]
    prompt = common_prompt([first, second])
    assert list(prompt) == TOKENIZER.chat(start[:1])
    given_ = completion_of(second, len(prompt), 0).given
    assert len(given_) == 1 and given_[0].start == 0  # the shared turn and the new question, in one


def test_tool_calls_are_matched_by_what_we_returned() -> None:
    one = session()
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    sampled = answer(one, [user("1+2")], SPELLED, message={"role": "assistant", "content": "", "tool_calls": [call]})
    back = {"id": "call_1", "type": "function", "function": {"arguments": {"b": 2, "a": 1}, "name": "add"}}
    sent: Message = {"role": "assistant", "content": None, "tool_calls": [back]}
    result: Message = {"role": "tool", "tool_call_id": "call_1", "content": "3"}
    assert one.prompt(Chat(messages=(user("1+2"), sent, result)))[: len(sampled)] == sampled
    other = {**back, "function": {"name": "add", "arguments": {"a": 1, "b": 3}}}
    changed = one.prompt(Chat(messages=(user("1+2"), {**sent, "tool_calls": [other]}, result)))
    assert changed[: len(sampled)] != sampled and one.counts.unmatched == 1


def test_without_a_chat_template_texts_stand_one_behind_the_other() -> None:
    one = TrainingSession(chat_tokenizer(template=""), max_calls=9)
    sampled = answer(one, [user("1+2=")], SPELLED)
    assert sampled == [*TOKENIZER.encode("1+2="), *SPELLED]
    prompt = one.prompt(Chat(messages=(user("1+2="), said("ab"), user("3"))))
    assert prompt == [*sampled, *TOKENIZER.encode("3")]


def test_token_prompts_that_begin_with_an_answer_share_its_branch() -> None:
    one = session()
    for prompt, tokens in (((1, 2), (3, 4)), ((1, 2, 3, 4, 5), (6,)), ((1, 2, 3), (7,))):
        runs = (VersionRun(0, len(tokens)),)
        one.record(
            Answered(
                prompt_tokens=prompt, index=0, tokens=tokens, logprobs=[0.0] * len(tokens), versions=runs, finish="stop"
            )
        )
    assert [branch.tokens for branch in one.branches()] == [(1, 2, 3, 4, 5, 6), (1, 2, 3, 7)]
    assert [len(branch.trained) for branch in one.branches()] == [2, 1]


def test_calls_beyond_the_limit_are_refused_and_told() -> None:
    one = session(max_calls=2)
    one.begin_call()
    one.begin_call()
    with pytest.raises(RequestRefused, match=r"agent\.max_calls"):
        one.begin_call()
    assert one.problem == "made more than agent.max_calls=2 calls"


def test_an_ended_session_takes_nothing() -> None:
    one = session()
    one.add_reward(0.5)
    one.add_reward(0.25)
    one.close()
    for act in (one.begin_call, lambda: one.add_reward(1.0)):
        with pytest.raises(RequestRefused, match="has ended"):
            act()
    answer(one, [user("hi")], SPELLED)
    assert (one.reward, one.branches()) == (0.75, [])
