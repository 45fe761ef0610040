"""Long prompts are read by the steps of running answers: the same tokens come out, and no answer waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.decoding import assert_same, decode_all, short_and_long_groups
from helpers.experts import choices, expert_model, recorded, tokens_of
from helpers.groups import prompt_group
from helpers.models import EOS, copy_weights, lively_model
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.config import GeneratorConfig
from llamarl.config.file import load_config
from llamarl.errors import ConfigError
from llamarl.generate import beside, decoder, scheduler
from llamarl.generate.decoder import ContinuousDecoder
from llamarl.generate.drafts import DraftChoice
from llamarl.generate.limits import Limits, beside_rows
from llamarl.generate.sequences import Admission, Extension
from llamarl.jobs.model_check import check_model
from llamarl.model.transformer import Transformer
from llamarl.types import CompletionGroup, PromptGroup

MAX_PROMPT, MAX_NEW, ROWS = 36, 16, 5
REALLY = beside_rows
FULL = 14  # pages of 4 tokens for 36 + 16 - 1 tokens, and one more for the prompt that is shared


@pytest.fixture(autouse=True, scope="module")
def on_a_cpu_too() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "_SHORT_PROMPT", 0)
        patch.setattr(decoder, "beside_rows", lambda limits, device: limits.prefill_beside)
        yield


class Counting(ContinuousDecoder):
    """Counts what answers wait for."""

    num_waited_for = 0

    def _read(self, admission: Admission) -> None:
        self.num_waited_for += admission.num_tokens if self.num_running > len(admission.started) else 0
        super()._read(admission)


def decoder_with(rows: int = ROWS, *, model: Transformer | None = None, **how: Any) -> Counting:
    of_limits = {
        name: how.pop(name) for name in ("num_pages", "burst", "parked", "slots", "prefill_tokens") if name in how
    }
    limits = Limits(
        **{"slots": 6, "burst": 2, **of_limits},
        max_prompt_tokens=MAX_PROMPT,
        max_new_tokens=MAX_NEW,
        page_tokens=4,
        prefill_beside=rows,
    )
    found = Counting(model or lively_model(), limits, seed=5, **{"eos_ids": (), **how})
    found.version = 0
    return found


def groups_of(seed: int, count: int = 9) -> list[PromptGroup]:
    return short_and_long_groups(seed, count, max_prompt=MAX_PROMPT, max_new=MAX_NEW)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(FULL, 60), st.integers(1, 4), st.integers(0, 1000))
def test_any_rows_pages_and_bursts_give_the_same(rows: int, num_pages: int, burst: int, seed: int) -> None:
    groups = groups_of(seed, count=5)
    found = decoder_with(rows, num_pages=num_pages, burst=burst)
    assert_same(decode_all(found, groups), decode_all(decoder_with(0), groups))
    assert found.cache_share == 0.0, "every page came back"


@pytest.mark.parametrize("num_pages", [FULL + 8, 0])
def test_prompts_are_really_read_beside_answers(num_pages: int) -> None:
    groups, found = groups_of(4), decoder_with(num_pages=num_pages)
    plain = decoder_with(0, num_pages=num_pages)
    assert_same(decode_all(found, groups), decode_all(plain, groups))
    assert not plain.take_counts().read_beside
    assert found.take_counts().read_beside > (0 if num_pages else 60)
    assert found.num_waited_for < plain.num_waited_for


def test_no_answer_waits_for_a_long_prompt() -> None:
    """While over half of the slots run, nothing long is read between bursts; the next groups are read ahead."""
    found = decoder_with()
    for ordinal in range(6):
        found.add(prompt_group(list(range(1, 23)), ordinal=ordinal, samples=3, max_new_tokens=MAX_NEW))
    found.step()
    assert found.num_running == 6, "nothing ran yet: both prompts were read at once"
    assert found._schedule.next_unread == 21 - 2 * ROWS
    found.step()
    found.step()
    assert found.num_running == 6
    assert [one.num_unread for one in list(found._schedule._waiting)[::3]] == [0, 21 - ROWS, 21, 21]
    while not found.idle:
        found.step()
    assert found.num_waited_for == 0


def test_a_prompt_that_is_not_read_correctly_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: the last tokens of a prompt, which do not fill a step, are read at a wrong place."""
    groups = groups_of(4)
    expected = decode_all(decoder_with(0), groups)
    fill = beside.BesideInputs.fill

    def shifted(inputs: beside.BesideInputs, extensions: list[Extension]) -> None:
        fill(inputs, extensions)
        inputs._steps[-1, 1] += 1

    monkeypatch.setattr(beside.BesideInputs, "fill", shifted)
    with pytest.raises(AssertionError):
        assert_same(decode_all(decoder_with(), groups), expected)


def test_long_replies_of_tools_and_drafts() -> None:
    def converse(one: ContinuousDecoder, groups: list[PromptGroup]) -> dict[int, CompletionGroup]:
        found: dict[int, CompletionGroup] = {}
        for group in groups:
            one.add(group)
        while not one.idle:
            found |= {done.ordinal: done for done in one.step()}
            for turn in one.take_turns():
                one.reply(turn.key, [at % 20 + 1 for at in range(min(9, turn.room - 1))])
        return found

    how: dict[str, Any]
    groups, how = groups_of(1), {"eos_ids": (EOS, 3, 4, 5, 6, 7), "max_turns": 4, "parked": 8}
    expected = converse(decoder_with(0, **how), groups)
    found = decoder_with(4, drafts=DraftChoice(3), slots=6, **how)
    assert_same(converse(found, groups), expected)
    assert found.take_counts().read_beside and any(
        one.given for group in expected.values() for one in group.completions
    )


def test_experts_of_prompts_are_recorded() -> None:
    model = expert_model()
    found = decoder_with(model=expert_model(), record_routes=True)
    groups = [
        prompt_group([1 + (7 * ordinal + at) % 20 for at in range(30)], ordinal=ordinal, samples=3, max_new_tokens=9)
        for ordinal in range(5)
    ]
    for group in decode_all(found, groups).values():
        for sample in range(3):
            expected = choices(model, tokens_of(group, sample))[:-1]
            assert (recorded(group, sample) == expected).all()
    assert found.take_counts().read_beside > 60


@pytest.mark.parametrize("recompute", [False, True])
def test_weights_that_change_while_a_prompt_is_read(recompute: bool) -> None:
    found = decoder_with(recompute=recompute)
    for ordinal in range(4):
        found.add(prompt_group(list(range(1, 23)), ordinal=ordinal, samples=3, max_new_tokens=MAX_NEW))
    found.step()
    copy_weights(lively_model(1), found.model)
    found.version = 1
    assert (found._schedule.next_unread == 21) == recompute, "what was read by the old weights is given up"
    done = decode_all(found, [])
    assert sorted(done) == [0, 1, 2, 3] and found.cache_share == 0.0


def test_a_prompt_that_is_too_short_for_it_is_read_in_chunks_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than a chunk and shorter than what is read beside: somebody must read it while others run."""
    monkeypatch.setattr(scheduler, "_SHORT_PROMPT", 12)
    found = decoder_with(slots=6, prefill_tokens=6)
    found.add(prompt_group([1, 2], ordinal=0, samples=4, max_new_tokens=MAX_NEW))
    found.step()
    found.add(prompt_group(list(range(1, 13)), ordinal=1, samples=2, max_new_tokens=2))
    for _ in range(3):
        found.step()
    assert found.num_running == 6 or 1 not in found._schedule.ordinals


def test_drafts_do_not_keep_a_long_prompt_waiting() -> None:
    found = decoder_with(slots=2, drafts=DraftChoice(3), burst=1)
    for ordinal in range(2):
        found.add(
            prompt_group(
                [1 + (7 * ordinal + at) % 20 for at in range(30)], ordinal=ordinal, samples=1, max_new_tokens=16
            )
        )
        found.step()
    for _ in range(3):
        found.step()
    assert found.num_running == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["generator.slots=256"], "generator.prefill_beside: pays only with at most 128 slots"),
        (
            ["generator.slots=64", "generator.device=cpu"],
            "generator.prefill_beside: prompts are read beside answers on a GPU",
        ),
    ],
)
def test_where_it_would_not_be_applied_it_is_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_model(load_config(None, ["generator.prefill_beside=128", *settings]))
    assert message in str(caught.value)


def test_a_decoder_refuses_it_too() -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    few, many = (
        Limits(slots=slots, max_prompt_tokens=64, max_new_tokens=8, prefill_beside=128) for slots in (128, 129)
    )
    assert GeneratorConfig().prefill_beside == 0, "off until it was measured to pay"
    assert REALLY(few, gpu) == 64, "no more than a prompt has"
    for limits, device in ((few, cpu), (many, gpu)):
        with pytest.raises(ConfigError, match="needs a GPU and at most 128 slots"):
            REALLY(limits, device)
    assert REALLY(Limits(slots=999, max_prompt_tokens=8, max_new_tokens=8), cpu) == 0
