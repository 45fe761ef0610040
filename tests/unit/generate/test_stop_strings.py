"""Stop strings: an answer ends with the token that completes one, with the tokens and log-probs it had anyway."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from helpers.decoding import decode_all
from helpers.groups import prompt_group

from llamarl import Job
from llamarl.config import Config, ConversationConfig, GeneratorConfig
from llamarl.config.file import load_config
from llamarl.errors import ConfigError
from llamarl.generate.decoder import ContinuousDecoder
from llamarl.generate.limits import Limits
from llamarl.generate.llm import LLM
from llamarl.generate.stop_strings import StopStrings
from llamarl.model.tokenizer import Tokenizer
from llamarl.types import Completion, bytes_to_floats, bytes_to_tokens

LONG = 80


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", device="cpu")


def endless_decoder(llm: LLM, stop: Sequence[str], slots: int) -> ContinuousDecoder:
    """A decoder without an end token: answers are as long as they may be, unless a stop string ends them."""
    limits = Limits(slots=slots, max_prompt_tokens=8, max_new_tokens=LONG, page_tokens=4)
    decoder = ContinuousDecoder(llm.model, limits, eos_ids=(), seed=5, stop=StopStrings(llm.tokenizer, stop))
    decoder.version = 0
    return decoder


def answers(llm: LLM, stop: Sequence[str], slots: int) -> list[Completion]:
    decoder, prompt = endless_decoder(llm, stop, slots), llm.tokenizer.encode("1+2=")
    groups = [prompt_group(prompt, ordinal=n, samples=3, max_new_tokens=LONG, temperature=9.0) for n in range(4)]
    found = decode_all(decoder, groups)
    assert decoder.idle
    return [completion for ordinal in sorted(found) for completion in found[ordinal].completions]


def tokens_of(completion: Completion) -> list[int]:
    return [int(token) for token in bytes_to_tokens(completion.tokens)]


@pytest.mark.parametrize("stop", [["7"], ["12"], ["34", "9+"], ["no such text"]])
@pytest.mark.parametrize("slots", [2, 12])
def test_an_answer_ends_where_the_first_stop_string_is_complete(llm: LLM, stop: list[str], slots: int) -> None:
    decode = llm.tokenizer.decode
    stopped = 0
    for whole, cut in zip(answers(llm, (), slots), answers(llm, stop, slots), strict=True):
        tokens, shorter = tokens_of(whole), tokens_of(cut)
        holds = [n for n in range(1, len(tokens) + 1) if any(text in decode(tokens[:n]) for text in stop)]
        assert shorter == tokens[: holds[0]] if holds else shorter == tokens
        logprobs = bytes_to_floats(cut.behavior_logprobs).tolist()
        assert logprobs == pytest.approx(bytes_to_floats(whole.behavior_logprobs).tolist()[: len(shorter)], abs=1e-4)
        assert sum(run.count for run in cut.versions) == len(shorter)
        assert cut.truncated == (whole.truncated and not holds)
        stopped += bool(holds)
    assert (stopped > 0) == (stop != ["no such text"])


def test_running_answers_are_ended_early_to_save_time(llm: LLM) -> None:
    def steps(stop: Sequence[str]) -> int:
        decoder = endless_decoder(llm, stop, slots=1)
        decoder.add(prompt_group(llm.tokenizer.encode("1+2="), samples=1, max_new_tokens=LONG, temperature=9.0))
        count = 0
        while not decoder.idle:
            decoder.step()
            count += 1
        return count

    longest = steps(())
    assert longest > 40
    assert steps([str(digit) for digit in range(10)]) <= 17 < longest


def test_the_shortest_part_that_holds_a_stop_string_is_found() -> None:
    tokenizer = Tokenizer.load(Config().model_folder)
    tokens = tokenizer.encode("12+34=46")
    for stop, end in (("1", 1), ("2+3", 4), ("46", 8), ("5", None)):
        assert StopStrings(tokenizer, [stop]).end_of(tokens) == end
    assert StopStrings(tokenizer, ["46", "+"]).end_of(tokens) == 3
    assert StopStrings(tokenizer, ["1"]).end_of([]) is None and StopStrings(tokenizer, []).end_of(tokens) is None


def test_settings_that_cannot_take_effect_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"generator\.stop: an empty text would end every answer"):
        GeneratorConfig(stop=("",))
    with pytest.raises(ConfigError, match=r"generator\.stop: cannot take effect in conversations"):
        Config(generator=GeneratorConfig(stop=("x",)), conversation=ConversationConfig(tool="calculator"))


def test_a_job_cuts_its_answers(tmp_path_factory: pytest.TempPathFactory) -> None:
    from helpers.brief import BRIEF

    digits = [str(digit) for digit in range(10)]
    config = load_config(None, [*BRIEF, "schedule.updates=1", f"generator.stop={digits}", "evaluate.prompts=0"])
    run = tmp_path_factory.mktemp("stop") / "run"
    summary = Job(config).run(run)
    answers_made = 16 * 1
    assert summary.outcome == "finished" and summary.tokens_generated <= answers_made * 2, "one digit each, or an end"
