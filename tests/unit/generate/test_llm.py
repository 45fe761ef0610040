"""`LLM` answers text, tokens and chats as the decoder does, and says what is wrong before any weight is read."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from llamarl import LLM, Sampling
from llamarl.config import Config
from llamarl.errors import ArgumentError, InputError, ModelError
from llamarl.generate.llm import Prompt, TextCompletion
from llamarl.machine import FreeMemory

TINY = Config().model_folder
DRAWN = Sampling(samples=3, max_new_tokens=6, temperature=1.0)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", device="cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "model"))


def texts(found: list[list[TextCompletion]]) -> list[list[str]]:
    return [[one.text for one in answers] for answers in found]


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, llamarl; llamarl.Sampling; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False\n"


def test_every_prompt_has_its_samples_in_order(llm: LLM) -> None:
    found = llm.generate(["12+34=", "5+5=", "100+1="], DRAWN)
    assert [len(answers) for answers in found] == [3, 3, 3]
    for one in (one for answers in found for one in answers):
        assert len(one.tokens) == len(one.logprobs) <= 6
        assert max(one.logprobs) <= 0
        assert one.text == llm.tokenizer.decode(one.tokens)
        assert (one.finish_reason == "stop") == (one.tokens[-1] in llm.tokenizer.eos_ids)


def test_the_token_limit_is_a_reason_to_finish(llm: LLM) -> None:
    [[one]] = llm.generate(["12+34="], Sampling(max_new_tokens=1, temperature=0.0))
    assert (len(one.tokens), one.finish_reason) == (1, "length")


def test_text_and_its_tokens_are_the_same_prompt(llm: LLM) -> None:
    tokens = llm.tokenizer.encode("12+34=")
    assert llm.generate([tokens], DRAWN) == llm.generate(["12+34="], DRAWN)


def test_a_seed_decides_and_an_earlier_call_does_not(llm: LLM) -> None:
    sampling = replace(DRAWN, samples=8, temperature=2.0)
    first, again = llm.generate(["12+34="], sampling, seed=1), llm.generate(["12+34="], sampling, seed=1)
    other = llm.generate(["12+34="], sampling, seed=2)
    assert first == again == llm.generate(["12+34="], sampling, seed=1)
    assert texts(first) != texts(other)


def test_few_slots_answer_everything(llm: LLM) -> None:
    prompts = ["1+1=", "12+34=", "5+66=", "77+8="]
    greedy = Sampling(max_new_tokens=6, temperature=0.0)
    assert texts(LLM("tiny", device="cpu", slots=2).generate(prompts, greedy)) == texts(llm.generate(prompts, greedy))


def test_a_call_that_was_interrupted_leaves_nothing_behind(llm: LLM) -> None:
    expected = llm.generate(["12+34="], DRAWN)
    with (
        patch("llamarl.generate.decoder.ContinuousDecoder.step", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        llm.generate(["12+34="], DRAWN)
    assert llm.generate(["12+34="], DRAWN) == expected


def test_a_chat_is_dressed_by_the_models_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}={% endfor %}")
    dressed = LLM(folder, device="cpu")
    assert dressed.encode([[{"role": "user", "content": "1+2"}]]) == dressed.encode(["1+2="])


def test_no_prompts_have_no_answers(llm: LLM) -> None:
    assert llm.generate([]) == []


WRONG: list[tuple[Any, Sampling, str]] = [
    ("1+1=", DRAWN, "prompts: expected a list of prompts, is one text; put it into a list"),
    (["1+1=", ""], DRAWN, r"prompts\[1\]: is empty"),
    ([[]], DRAWN, r"prompts\[0\]: is empty"),
    ([[1, 999_999]], DRAWN, r"prompts\[0\]: token 999999 is not among the model's"),
    ([["1+1="]], DRAWN, r"prompts\[0\]: expected text, token ids, or messages with role and content"),
    (["1+1="], Sampling(max_new_tokens=999), r"sampling\.max_new_tokens: prompt \(4\) and completion \(999\) exceed"),
    (["1+1="], Sampling(samples=0), r"sampling\.samples: expected int >= 1"),
    (["1+1="], Sampling(temperature=-1.0), r"sampling\.temperature: expected float >= 0\.0"),
    (["1+1="], Sampling(top_p=1.5), r"sampling\.top_p: expected float <= 1\.0"),
]


@pytest.mark.parametrize(("prompts", "sampling", "told"), WRONG)
def test_what_cannot_be_answered_is_told_before_any_weight_is_read(
    prompts: list[Prompt], sampling: Sampling, told: str
) -> None:
    llm = LLM("tiny", device="cpu")
    with pytest.raises(ArgumentError, match=told):
        llm.generate(prompts, sampling)
    assert "model" not in vars(llm)


def test_what_is_wrong_with_the_model_is_told_at_once(folder: Path) -> None:
    with pytest.raises(ModelError, match="no folder no/where"):
        LLM("./no/where")
    with pytest.raises(InputError, match="device abacus: expected auto, cpu, cuda or cuda:N"):
        LLM(folder, device="abacus")
    with pytest.raises(ArgumentError, match="dtype: expected auto, float32, bfloat16 or float16, is int4"):
        LLM(folder, dtype="int4")
    with pytest.raises(ArgumentError, match="slots: must be at least 1, is 0"):
        LLM(folder, slots=0)
    for name in ("generation_config.json", "tokenizer_config.json"):
        (folder / name).unlink(missing_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": None}))
    with pytest.raises(ModelError, match="names no end token"):
        LLM(folder)


def test_what_cannot_fit_into_memory_is_refused() -> None:
    def with_memory(num_bytes: float) -> LLM:
        with patch("llamarl.generate.llm.host_memory", return_value=FreeMemory(num_bytes, num_bytes)):
            llm = LLM("tiny", device="cpu", slots=10_000)
            llm.generate(["1+1="], Sampling(samples=10_000, max_new_tokens=200))
        return llm

    with pytest.raises(InputError, match=r"memory: .* in float32; take a narrower dtype or a smaller model"):
        with_memory(1000)
    with pytest.raises(InputError, match=r"memory: .* in float32; lower slots or sampling\.max_new_tokens"):
        with_memory(64 << 20)
