"""Conversations: parked with their pages and without a slot, replied to token for token, and nothing is learned from what a
tool said."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from random import Random

import numpy as np
import pytest
import torch
from helpers.groups import prompt_group
from helpers.models import EOS, VOCABULARY, copy_weights, lively_model
from helpers.training import assert_same_gradients, cpu_learner
from torch import Tensor

from llamarl.algo.batch import Document, document_of
from llamarl.config import Config, ConversationConfig
from llamarl.generate.conversation import Conversations
from llamarl.generate.decoder import ContinuousDecoder
from llamarl.generate.limits import Limits
from llamarl.generate.sequences import Extension, Fill, Key
from llamarl.generate.sequences import Sequence as Sample
from llamarl.model.checkpoint import load_model
from llamarl.model.tokenizer import Tokenizer
from llamarl.model.transformer import Transformer, causal_attention
from llamarl.tasks.tools.client import Reply
from llamarl.types import (
    Completion,
    CompletionGroup,
    Given,
    PromptGroup,
    Turn,
    bytes_to_floats,
    bytes_to_tokens,
    sampled_places,
)

MAX_PROMPT, MAX_NEW, TURNS = 12, 48, 4
Tool = Callable[[Key, int], list[int] | None]


def make_decoder(
    slots: int,
    *,
    num_pages: int = 0,
    parked: int = 64,
    recompute: bool = False,
    eos_ids: tuple[int, ...] = (EOS, 3, 4, 5),
) -> ContinuousDecoder:
    """Several stop tokens, so that turns are short."""
    limits = Limits(
        slots=slots,
        max_prompt_tokens=MAX_PROMPT,
        max_new_tokens=MAX_NEW,
        page_tokens=4,
        num_pages=num_pages,
        parked=parked,
    )
    decoder = ContinuousDecoder(lively_model(), limits, eos_ids=eos_ids, seed=3, recompute=recompute, max_turns=TURNS)
    decoder.version = 0
    return decoder


def some_groups(count: int = 4, temperature: float = 1.0) -> list[PromptGroup]:
    random = Random(0)
    return [
        prompt_group(
            [random.randrange(1, VOCABULARY) for _ in range(random.randint(1, MAX_PROMPT))],
            ordinal=ordinal,
            samples=random.randint(1, 4),
            max_new_tokens=random.randint(MAX_NEW // 2, MAX_NEW),
            temperature=temperature,
        )
        for ordinal in range(count)
    ]


def scripted(key: Key, turn: int) -> list[int] | None:
    """The same reply to the same turn, of any length up to more than a page; now and then the end."""
    random = Random(f"{key} {turn}")
    return None if random.random() < 0.1 else [random.randrange(VOCABULARY) for _ in range(random.randint(1, 9))]


def converse(
    decoder: ContinuousDecoder, groups: list[PromptGroup], tool: Tool = scripted, *, seed: int = 0
) -> dict[int, CompletionGroup]:
    """Replies come late and out of order, as chance will have it."""
    chance, waiting = Random(seed), list[tuple[Key, int]]()
    for group in groups:
        decoder.add(group)
    found: dict[int, CompletionGroup] = {}
    for _ in range(3000):
        if decoder.idle:
            return found
        found |= {group.ordinal: group for group in (decoder.step() if decoder.decoding else [])}
        waiting += [(sample.key, len(sample.given)) for sample in decoder.take_turns()]
        chance.shuffle(waiting)
        for _ in range(min(len(waiting), chance.randint(0, 2))):
            key, turn = waiting.pop()
            reply = tool(key, turn)
            decoder.end(key) if reply is None else decoder.reply(key, reply)
    raise AssertionError("the decoder does not come to an end")


def completions(found: dict[int, CompletionGroup]) -> list[tuple[PromptGroup, Completion]]:
    return [(group.prompt, one) for ordinal in sorted(found) for group in [found[ordinal]] for one in group.completions]


@torch.no_grad()
def plain_logprobs(model: Transformer, document: Document) -> Tensor:
    """Of every token of the whole conversation, from one reading of it."""
    tokens_1T = torch.from_numpy(document.tokens.astype(np.int64))[None]
    hidden_1TC = model(tokens_1T, torch.arange(tokens_1T.shape[1])[None], causal_attention)
    logprobs_TV = torch.log_softmax(model.logits(hidden_1TC[0, :-1]), dim=-1)
    return logprobs_TV.gather(1, tokens_1T[0, 1:, None])[:, 0]


@pytest.mark.parametrize("slots", [2, 32])
def test_logprobs_of_what_was_sampled_are_those_of_reading_the_whole_conversation(slots: int) -> None:
    found = completions(converse(make_decoder(slots), some_groups()))
    assert sum(len(one.given) for _, one in found) > 10, "hardly any conversation"
    for prompt, one in found:
        document = document_of(prompt, one, version=0)
        expected = plain_logprobs(lively_model(), document)[torch.from_numpy(document.places) - 1]
        assert bytes_to_floats(one.behavior_logprobs) == pytest.approx(expected.numpy(), abs=2e-5)
        assert one.num_tokens == document.num_answer_tokens == sum(run.count for run in one.versions)


def test_the_trainer_sees_the_same_logprobs_and_no_others() -> None:
    found = completions(converse(make_decoder(8), some_groups()))
    documents = [document_of(prompt, one, version=0) for prompt, one in found]
    policy = cpu_learner().policy
    for pack in policy.packs(documents):
        assert pack.num_targets == sum(one.num_tokens for _, one in found)
        assert (policy.logprobs(pack) - pack.behavior_logprobs_N).abs().max() < 2e-5


def test_replies_stand_in_the_completion_token_for_token() -> None:
    for prompt, one in completions(converse(make_decoder(8), some_groups())):
        tokens = bytes_to_tokens(one.tokens).tolist()
        for sample_turn, reply in enumerate(one.given):
            told = tokens[reply.start : reply.start + reply.count]
            keys = [(prompt.ordinal, sample) for sample in range(prompt.sampling.samples)]
            assert told in [scripted(key, sample_turn) for key in keys]
        assert len(tokens) <= prompt.sampling.max_new_tokens
        assert len(one.given) < TURNS


def same(found: dict[int, CompletionGroup], expected: dict[int, CompletionGroup]) -> None:
    assert found.keys() == expected.keys()
    for (_, mine), (_, theirs) in zip(completions(found), completions(expected), strict=True):
        assert (mine.tokens, mine.given, mine.truncated) == (theirs.tokens, theirs.given, theirs.truncated)
        assert bytes_to_floats(mine.behavior_logprobs) == pytest.approx(
            bytes_to_floats(theirs.behavior_logprobs), abs=1e-5
        )


def test_when_replies_come_changes_no_bit() -> None:
    expected = converse(make_decoder(32), some_groups())
    assert converse(make_decoder(32), some_groups(), seed=1) == expected
    same(converse(make_decoder(3), some_groups(), seed=2), expected)


@pytest.mark.parametrize("num_pages", [17, 40])
def test_with_few_pages_parked_conversations_lose_them_and_nothing_else(num_pages: int) -> None:
    same(converse(make_decoder(8, num_pages=num_pages), some_groups()), converse(make_decoder(32), some_groups()))


def test_keys_and_values_are_kept_and_only_the_reply_is_read() -> None:
    decoder, groups = make_decoder(8), some_groups()
    filled, extended = [0], [0]
    fill, extend = decoder._device.fill, decoder._device.extend

    def count_fills(fills: Iterable[Fill]) -> None:
        filled[0] += sum(len(one.tokens) for one in fills)
        fill(fills)

    def count_extensions(extensions: Sequence[Extension]) -> None:
        extended[0] += sum(len(one.tokens) for one in extensions)
        extend(extensions)

    decoder._device.fill, decoder._device.extend = count_fills, count_extensions  # type: ignore[method-assign]
    found = completions(converse(decoder, groups))
    assert filled[0] == sum(len(group.prompt_tokens) // 4 - 1 for group in groups), "a prompt is read once"
    # The stop token before a reply is read with it; the reply's last token is read by the decode step.
    assert extended[0] == sum(reply.count for _, one in found for reply in one.given)
    assert decoder._schedule.pool.num_free == decoder._schedule.pool.num_pages, "pages are left over"


def test_a_parked_conversation_holds_no_slot() -> None:
    """One slot: while the first conversation waits, the second is decoded to its end."""
    decoder = make_decoder(1)
    first, second = (prompt_group([1, 2], ordinal=n, samples=1, max_new_tokens=MAX_NEW) for n in (0, 1))
    decoder.add(first)
    decoder.add(second)
    turns: list[Key] = []
    while (0, 0) not in turns:
        decoder.step()
        turns += [sample.key for sample in decoder.take_turns()]
    finished: list[CompletionGroup] = []
    while not finished:
        finished = decoder.step() if decoder.decoding else []
        for sample in decoder.take_turns():
            decoder.end(sample.key)
        finished += decoder.step()
    assert [group.ordinal for group in finished] == [1]
    assert not decoder.idle and not decoder.decoding, "the first still waits"
    decoder.reply((0, 0), [7, 8])
    assert decoder.decoding


def test_a_reply_that_does_not_fit_ends_the_conversation_as_cut_off() -> None:
    found = converse(make_decoder(8), some_groups(), lambda key, turn: [7] * MAX_NEW)
    assert {one.truncated for _, one in completions(found)} == {True}
    assert not any(one.given for _, one in completions(found))


def test_weights_may_change_while_a_conversation_waits() -> None:
    """With `recompute`, what comes after is that of the new weights having read everything."""
    newer = lively_model(seed=9)
    decoder = make_decoder(4, recompute=True)
    decoder.add(prompt_group([1, 2, 3], ordinal=0, samples=2, max_new_tokens=MAX_NEW))
    waiting: list[Sample] = []
    while len(waiting) < 2:
        decoder.step()
        waiting += decoder.take_turns()
    before = [len(sample.sampled.tokens) for sample in waiting]
    copy_weights(newer, decoder.model)
    decoder.version = 1
    for sample in waiting:
        decoder.reply(sample.key, [6, 7, 8])
    found: list[CompletionGroup] = []
    while not found:
        found = decoder.step()
        for sample in decoder.take_turns():
            decoder.end(sample.key)
    for one, count in zip(found[0].completions, before, strict=True):
        assert [run.version for run in one.versions] == [0, 1] and one.versions[0].count == count
        document = document_of(found[0].prompt, one, version=1)
        expected = plain_logprobs(newer, document)[torch.from_numpy(document.places) - 1][count:]
        assert bytes_to_floats(one.behavior_logprobs)[count:] == pytest.approx(expected.numpy(), abs=2e-5)


def test_a_dropped_group_frees_all_it_held_and_the_others_go_on() -> None:
    decoder, groups = make_decoder(4), some_groups()
    for group in groups:
        decoder.add(group)
    for _ in range(6):
        decoder.step()
    decoder.drop(0)
    assert not decoder.holds(0)
    decoder.reply((0, 0), [1])  # comes too late, and finds nobody
    found = converse(decoder, [])
    assert sorted(found) == list(range(1, len(groups)))
    expected = converse(make_decoder(32), groups)
    del expected[0]
    same(found, expected)
    assert decoder._schedule.pool.num_free == decoder._schedule.pool.num_pages


GIVEN = (Given(2, 3), Given(7, 2))


def conversation_document(seed: int) -> Document:
    """Three tokens of prompt, ten of answer, five of them a tool's."""
    rng = np.random.default_rng(seed)
    return Document(
        tokens=rng.integers(0, VOCABULARY, 13).astype(np.int32),
        num_prompt_tokens=3,
        behavior_logprobs=rng.normal(-2.5, 1.0, 5).astype(np.float32),
        staleness=np.zeros(5, dtype=np.int64),
        advantages=np.full(5, rng.normal(), dtype=np.float32),
        given=GIVEN,
    )


def test_only_the_models_own_tokens_have_a_gradient() -> None:
    """The gradient is that of a plain loss over the sampled tokens, masked by hand."""
    documents = [conversation_document(seed) for seed in range(4)]
    learner = cpu_learner()
    learner.accumulate(documents)
    model, total = lively_model(), torch.zeros(())
    for document in documents:
        tokens_1T = torch.from_numpy(document.tokens.astype(np.int64))[None]
        hidden_1TC = model(tokens_1T, torch.arange(13)[None], causal_attention)
        logprobs_T = torch.log_softmax(model.logits(hidden_1TC[0, :-1]), -1).gather(1, tokens_1T[0, 1:, None])[:, 0]
        mask_T = torch.tensor([0, 0, *[1, 1, 0, 0, 0, 1, 1, 0, 0, 1]])
        behavior_T = torch.zeros(12).masked_scatter(mask_T.bool(), torch.from_numpy(document.behavior_logprobs))
        weight_T = (logprobs_T - behavior_T).exp().clamp(max=4.0).detach()
        total = total - (mask_T * weight_T * float(document.advantages[0]) * logprobs_T).sum() / (5 * len(documents))
    total.backward()  # type: ignore[no-untyped-call]
    expected = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    assert_same_gradients(learner.optimizer.gradients(), expected)


def test_what_a_tool_said_is_no_target() -> None:
    (pack,) = cpu_learner().policy.packs([conversation_document(0)])
    document = conversation_document(0)
    assert sampled_places(10, GIVEN).tolist() == [0, 1, 5, 6, 9]
    assert pack.at_N.tolist() == [2, 3, 7, 8, 11]
    assert pack.targets_N.tolist() == document.tokens[[3, 4, 8, 9, 12]].tolist()


class Echo:
    """A tool client whose tool replies at once, and remembers what it was shown."""

    def __init__(self) -> None:
        self.seen: list[list[Turn]] = []
        self._done: list[tuple[Hashable, Reply]] = []

    def ask(self, key: Hashable, said: str, turns: Sequence[Turn]) -> None:
        self.seen.append(list(turns))
        self._done.append((key, Reply("ok", f"{len(turns)}+")))

    def collect(self, wait_s: float = 0.0) -> list[tuple[Hashable, Reply]]:
        done, self._done = self._done, []
        return done


def test_a_tool_sees_the_turns_as_they_were_said_and_its_own_words_as_it_gave_them() -> None:
    """With the shipped model: the tool's words are put between blanks for the model, and come back without them."""
    tokenizer, client = Tokenizer.load(Config().model_folder), Echo()
    model = load_model(Config().model_folder)
    limits = Limits(slots=4, max_prompt_tokens=8, max_new_tokens=60)
    decoder = ContinuousDecoder(model, limits, eos_ids=tokenizer.eos_ids, seed=0, max_turns=3)
    decoder.version = 0
    settings = ConversationConfig(tool="calculator", reply=" {reply} ")
    talk = Conversations(decoder, tokenizer, settings, lambda: client)  # type: ignore[arg-type,return-value]
    prompt = prompt_group(tokenizer.encode("1+1="), samples=2, max_new_tokens=60)
    decoder.add(prompt)
    finished: list[CompletionGroup] = []
    while not finished:
        finished = talk.step()
    longest = max(client.seen, key=len)
    assert [turn.role for turn in longest] == ["user", "assistant", "user", "assistant"]
    assert (longest[0].content, longest[2].content) == ("1+1=", "2+")
    for one in finished[0].completions:
        tokens = bytes_to_tokens(one.tokens).tolist()
        told = [tokenizer.decode(tokens[reply.start : reply.start + reply.count]) for reply in one.given]
        assert told == [" 2+ ", " 4+ "][: len(told)] and told
        said = tokenizer.decode(tokens[: one.given[0].start])
        assert said in [turns[1].content for turns in client.seen]
    assert not talk._told
