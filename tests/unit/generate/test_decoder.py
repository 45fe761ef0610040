"""The decoder gives what a plain loop over one sequence gives, whatever else it decodes and whenever weights change."""

from __future__ import annotations

from random import Random

import pytest
import torch
from helpers.decoding import decode_all
from helpers.groups import prompt_group
from helpers.models import EOS, SHAPE, VOCABULARY, copy_weights, lively_model
from torch import Tensor

from llamarl.config import Config
from llamarl.generate.decoder import ContinuousDecoder
from llamarl.generate.limits import Limits
from llamarl.generate.sampling import uniform_draws
from llamarl.model.checkpoint import load_model
from llamarl.model.transformer import Attend, Transformer, causal_attention
from llamarl.types import (
    Completion,
    CompletionGroup,
    PromptGroup,
    bytes_to_floats,
    bytes_to_tokens,
)

SEED, MAX_PROMPT, MAX_NEW = 11, 20, 9
MAX_STEPS = 500


def make_decoder(
    model: Transformer, slots: int, *, eos_ids: tuple[int, ...] = (EOS,), seed: int = SEED
) -> ContinuousDecoder:
    limits = Limits(slots=slots, max_prompt_tokens=MAX_PROMPT, max_new_tokens=MAX_NEW, page_tokens=4)
    decoder = ContinuousDecoder(model, limits, eos_ids=eos_ids, seed=seed)
    decoder.version = 0
    return decoder


def some_groups(seed: int = 0, count: int = 12, temperature: float = 1.0) -> list[PromptGroup]:
    """Prompts of all lengths (one token, a full bucket, the longest), groups of all sizes, limits of all lengths."""
    random = Random(seed)
    lengths = [1, 2, 16, 17, 18, MAX_PROMPT, *(random.randint(1, MAX_PROMPT) for _ in range(count))][:count]
    return [
        prompt_group(
            [random.randrange(1, VOCABULARY) for _ in range(length)],
            ordinal=ordinal,
            samples=random.randint(1, 4),
            max_new_tokens=random.randint(1, MAX_NEW),
            temperature=temperature,
        )
        for ordinal, length in enumerate(lengths)
    ]


def pick(logits_V: Tensor, ordinal: int, sample: int, position: int, temperature: float) -> tuple[int, float]:
    """One token by walking through the probabilities until they exceed the draw."""
    counters = (torch.tensor([value]) for value in (ordinal, sample, position))
    draw = float(uniform_draws(SEED, *counters))
    if temperature == 0:
        return int(logits_V.argmax()), float(torch.log_softmax(logits_V, -1).max())
    probabilities = (logits_V.double() / temperature).softmax(-1)
    below = 0.0
    for token, probability in enumerate(probabilities.tolist()):
        below += probability
        if draw < below:
            return token, float(probabilities[token].log())
    return VOCABULARY - 1, float(probabilities[-1].log())


@torch.no_grad()
def plain_loop(model: Transformer, group: PromptGroup, sample: int) -> tuple[list[int], list[float]]:
    """No cache, no batch, no slots: read the whole sequence again for every token."""
    sequence = bytes_to_tokens(group.prompt_tokens).tolist()
    answer: list[int] = []
    logprobs: list[float] = []
    while len(answer) < group.sampling.max_new_tokens and EOS not in answer:
        tokens = torch.tensor([sequence + answer])
        hidden = model(tokens, torch.arange(tokens.shape[1])[None], causal_attention)
        token, logprob = pick(
            model.logits(hidden[0, -1]), group.ordinal, sample, len(answer), group.sampling.temperature
        )
        answer.append(token)
        logprobs.append(logprob)
    return answer, logprobs


def tokens_of(completion: Completion) -> list[int]:
    return [int(token) for token in bytes_to_tokens(completion.tokens)]


def logprobs_of(completion: Completion) -> list[float]:
    return [float(logprob) for logprob in bytes_to_floats(completion.behavior_logprobs)]


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("slots", [4, 16, 33])
def test_it_equals_a_plain_loop_over_one_sequence(slots: int, temperature: float) -> None:
    model, groups = lively_model(), some_groups(temperature=temperature)
    found = decode_all(make_decoder(model, slots), groups)
    ended_early = 0
    for group in groups:
        assert len(found[group.ordinal].completions) == group.sampling.samples
        for sample, completion in enumerate(found[group.ordinal].completions):
            answer, logprobs = plain_loop(model, group, sample)
            assert tokens_of(completion) == answer
            assert logprobs_of(completion) == pytest.approx(logprobs, abs=1e-5)
            assert completion.truncated == (answer[-1] != EOS)
            ended_early += answer[-1] == EOS
    assert temperature == 0 or ended_early, "no completion ended by itself: the test would not see a missed stop"


@pytest.mark.parametrize("slots", [16, 40])
def test_a_completion_is_the_same_bit_for_bit_whatever_else_is_in_the_batch(slots: int) -> None:
    model, groups = lively_model(), some_groups(count=16)
    alone = {group.ordinal: decode_all(make_decoder(model, slots), [group])[group.ordinal] for group in groups}
    for seed in range(3):
        order = list(groups)
        Random(seed).shuffle(order)
        assert decode_all(make_decoder(model, slots), order) == alone


def test_groups_that_arrive_while_others_are_decoded_get_the_same_completions() -> None:
    model, groups = lively_model(), some_groups()
    together = decode_all(make_decoder(model, 16), groups)
    decoder, found = make_decoder(model, 16), {}
    for group in groups:
        decoder.add(group)
        found.update({done.ordinal: done for done in decoder.step()})
    found.update(decode_all(decoder, []))
    assert found == together


def test_the_seed_the_ordinal_and_the_sample_each_give_other_completions() -> None:
    model, prompt = lively_model(), [3, 5, 7]
    group = prompt_group(prompt, ordinal=1, samples=4)
    first = decode_all(make_decoder(model, 16), [group])[1].completions
    assert len({tokens for tokens in map(bytes.hex, (completion.tokens for completion in first))}) > 1
    other_seed = decode_all(make_decoder(model, 16, seed=SEED + 1), [group])[1].completions
    other_ordinal = decode_all(make_decoder(model, 16), [prompt_group(prompt, ordinal=2, samples=4)])[2].completions
    assert first != other_seed
    assert first != other_ordinal
    assert first == decode_all(make_decoder(model, 16), [group])[1].completions


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("which", ["random", "shipped"])
def test_generator_and_trainer_agree_on_logprobs_for_equal_weights(which: str, temperature: float) -> None:
    model = lively_model() if which == "random" else load_model(Config().model_folder)
    limit = model.shape.vocab_size
    groups = [
        prompt_group(
            [t % limit for t in bytes_to_tokens(g.prompt_tokens)], ordinal=i, samples=3, temperature=temperature
        )
        for i, g in enumerate(some_groups())
    ]
    found = decode_all(make_decoder(model, 16), groups)
    lowest = 0.0
    for done in found.values():
        for completion in done.completions:
            policy = recomputed_logprobs(model, done.prompt, completion)
            assert logprobs_of(completion) == pytest.approx(policy, abs=1e-5)
            lowest = min(lowest, *policy)
    assert which == "shipped" or lowest < -0.7, "only near-certain tokens were sampled: the test would see little"


@torch.no_grad()
def recomputed_logprobs(model: Transformer, prompt: PromptGroup, completion: Completion) -> list[float]:
    read, answer = bytes_to_tokens(prompt.prompt_tokens).tolist(), tokens_of(completion)
    tokens_1T = torch.tensor([read + answer])
    hidden_1TC = model(tokens_1T, torch.arange(tokens_1T.shape[1])[None], causal_attention)
    scores_TV = model.logits(hidden_1TC[0, len(read) - 1 : -1]) / prompt.sampling.temperature
    found: list[float] = torch.log_softmax(scores_TV, -1).gather(1, torch.tensor(answer)[:, None])[:, 0].tolist()
    return found


class GrowingCache:
    """Keys and values of one sequence as they were computed, whatever the weights are by now."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor) -> Tensor:
        if layer in self._held:
            k_BTKD = torch.cat([self._held[layer][0], k_BTKD], dim=1)
            v_BTKD = torch.cat([self._held[layer][1], v_BTKD], dim=1)
        self._held[layer] = (k_BTKD, v_BTKD)
        q, k, v = (x.transpose(1, 2) for x in (q_BTHD, k_BTKD, v_BTKD))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return out.transpose(1, 2)


@torch.no_grad()
def loop_with_changes(models: list[Transformer], group: PromptGroup, sample: int, versions: list[int]) -> list[float]:
    """The log-probs of a sequence whose i-th new token is computed by `versions[i]`, on keys that older ones left."""
    *read, last = bytes_to_tokens(group.prompt_tokens).tolist()
    cache: Attend = GrowingCache()
    for at, token in enumerate(read):
        models[versions[0]](torch.tensor([[token]]), torch.tensor([[at]]), cache)
    logprobs = []
    for i, version in enumerate(versions):
        model = models[version]
        hidden = model(torch.tensor([[last]]), torch.tensor([[len(read) + i]]), cache)
        last, logprob = pick(model.logits(hidden[0, -1]), group.ordinal, sample, i, group.sampling.temperature)
        logprobs.append(logprob)
    return logprobs


def test_weights_changed_in_flight_are_recorded_token_by_token() -> None:
    """Weights change after every third step; groups wait for slots, so they begin under different versions."""
    versions = [lively_model(seed) for seed in range(6)]
    serving = lively_model(0)
    decoder = make_decoder(serving, 16, eos_ids=())
    groups = [
        prompt_group([4, 9, 2], ordinal=ordinal, samples=4, max_new_tokens=4 + ordinal % 6) for ordinal in range(9)
    ]
    for group in groups:
        decoder.add(group)
    found: dict[int, tuple[int, CompletionGroup]] = {}
    version_at_step: list[int] = []
    while not decoder.idle and len(version_at_step) < MAX_STEPS:
        version = min(len(version_at_step) // 3, 5)
        copy_weights(versions[version], serving)
        decoder.version = version
        version_at_step.append(version)
        found.update({done.ordinal: (len(version_at_step), done) for done in decoder.step()})
    assert max(version_at_step) == 5
    mixed = 0
    for group in groups:
        end, done = found[group.ordinal]
        expected = version_at_step[end - group.sampling.max_new_tokens : end]
        mixed += len(set(expected)) > 1
        for sample, completion in enumerate(done.completions):
            recorded = [run.version for run in completion.versions for _ in range(run.count)]
            assert recorded == expected
            assert len(completion.versions) == len(set(recorded)), "runs are as long as they can be"
            assert logprobs_of(completion) == pytest.approx(
                loop_with_changes(versions, group, sample, expected), abs=1e-5
            ), "the weights that are recorded are not the weights that sampled"
    assert mixed >= 5


def test_a_freed_slot_is_refilled_at_the_next_step() -> None:
    model = lively_model()
    decoder = make_decoder(model, 4, eos_ids=())
    short = prompt_group([1, 2], ordinal=0, samples=2, max_new_tokens=2)
    long = prompt_group([1, 2], ordinal=1, samples=2, max_new_tokens=6)
    waiting = prompt_group([1, 2], ordinal=2, samples=2, max_new_tokens=4)
    for group in (short, long, waiting):
        decoder.add(group)
    finished_at = {done.ordinal: step for step in range(1, 20) for done in decoder.step()}
    assert finished_at == {0: 2, 1: 6, 2: 2 + 4}


def test_old_content_of_a_slot_does_not_leak_into_the_next_completion() -> None:
    model = lively_model()
    decoder = make_decoder(model, 16)
    long = prompt_group(list(range(1, MAX_PROMPT + 1)), ordinal=7, samples=16, max_new_tokens=MAX_NEW)
    decode_all(decoder, [long])
    groups = some_groups()
    assert decode_all(decoder, groups) == decode_all(make_decoder(model, 16), groups)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (prompt_group([]), "the prompt is empty"),
        (prompt_group([1] * (MAX_PROMPT + 1)), "the prompt has 21 tokens; generator.max_prompt_tokens=20"),
        (prompt_group([1], max_new_tokens=MAX_NEW + 1), "does not fit"),
        (prompt_group([1], max_new_tokens=0), "does not fit"),
        (prompt_group([1], samples=0), "does not fit"),
    ],
)
def test_what_can_never_be_decoded_is_refused_at_once(group: PromptGroup, message: str) -> None:
    decoder = make_decoder(lively_model(), 4)
    with pytest.raises(ValueError, match=message):
        decoder.add(group)
    assert decoder.idle
    assert decoder.step() == []


def test_a_completion_is_truncated_only_if_the_limit_ended_it() -> None:
    """A stop token at the very last place ends it by itself."""
    model, prompt = lively_model(), [3, 1, 4]
    endless = decode_all(make_decoder(model, 16, eos_ids=()), [prompt_group(prompt, samples=1, max_new_tokens=5)])[0]
    tokens = tokens_of(endless.completions[0])
    assert len(tokens) == 5
    assert endless.completions[0].truncated
    length = tokens.index(tokens[-1]) + 1
    group = prompt_group(prompt, samples=1, max_new_tokens=length)
    stopped = decode_all(make_decoder(model, 16, eos_ids=(tokens[-1],)), [group])[0].completions[0]
    assert tokens_of(stopped) == tokens[:length]
    assert not stopped.truncated


def test_any_of_several_stop_tokens_ends_a_completion() -> None:
    stops = (2, 5, 9)
    group = prompt_group([3, 1, 4], samples=16, max_new_tokens=MAX_NEW)
    for completion in decode_all(make_decoder(lively_model(), 16, eos_ids=stops), [group])[0].completions:
        *inside, last = tokens_of(completion)
        assert not set(inside) & set(stops), "it went on after a stop token"
        assert completion.truncated == (last not in stops)
        assert completion.num_tokens == MAX_NEW or last in stops


def test_the_longest_prompt_and_completion_fit_the_positions_exactly() -> None:
    assert SHAPE.max_positions == 64
    limits = Limits(slots=4, max_prompt_tokens=40, max_new_tokens=24)
    decoder = ContinuousDecoder(lively_model(), limits, eos_ids=(), seed=SEED)
    group = prompt_group([1 + i % 20 for i in range(40)], samples=2, max_new_tokens=24)
    found = decode_all(decoder, [group])[0]
    assert [completion.num_tokens for completion in found.completions] == [24, 24]
