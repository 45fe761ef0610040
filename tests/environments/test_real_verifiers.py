"""The real verifiers: `make test-environments`. Elsewhere a stand-in takes its place (tests/e2e/test_verifiers.py).

Two environments that others wrote train end to end: TextArena's Hangman, and the one that OpenEnv makes with `openenv init`,
both through the tasksets of verifiers, in a virtual environment that `llamarl env install` has made. NLTK's word list, which
Hangman draws from, cannot be had from PyPI; words of TextArena's own dictionary take its place.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from string import ascii_lowercase

import pytest
from helpers.brief import ROOT
from helpers.cli import llamarl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from llamarl import Run
from llamarl.model.checkpoint import random_model, save_model
from llamarl.model_spec import ModelSpec

PYTHON = ROOT / ".venv-verifiers" / "bin" / "python"
pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-verifiers; `make test-environments` makes it"),
    pytest.mark.timeout(1200),
]
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>")
GUESSES = [f"[{letter}]" for letter in ascii_lowercase]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model that reads bytes; a guess such as [e] is one token, so that it makes some."""
    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    backend.add_tokens([AddedToken(guess, normalized=False) for guess in GUESSES])
    size = len(alphabet) + len(SPECIAL) + len(GUESSES)
    spec = ModelSpec(
        vocab_size=size,
        hidden_size=32,
        intermediate_size=64,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        max_positions=4096,
        tied_head=True,
    )
    save_model(random_model(spec, seed=0), folder)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL[1], "chat_template": CHAT}))
    return folder


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of NLTK's word list."""
    where = "import importlib.util as u; print(u.find_spec('textarena').submodule_search_locations[0])"
    package = Path(subprocess.check_output([PYTHON, "-c", where], text=True).strip())
    lines = (package / "envs" / "utils" / "data" / "en_US.dic").read_text().splitlines()
    found = sorted({word for line in lines if re.fullmatch("[a-z]{3,5}", word := line.partition("/")[0])})
    assert len(found) > 1000
    folder = tmp_path / "nltk_data" / "corpora" / "words"
    folder.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (folder / name).write_text("\n".join(found))
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "nltk_data"))


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of the environment that OpenEnv makes: a message is worth a tenth of its length."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "claims"))
    from openenv_learns import echo_server

    with echo_server(PYTHON, tmp_path) as address:
        yield address


def train(model: Path, run: Path, *settings: str) -> Run:
    asked = [
        f"model.path={model}",
        "task=verifiers",
        f"task.env_python={PYTHON}",
        "agent.environment=verifiers",
        "agent.timeout_s=300",
        "agent.workers=2",
        "generator.max_prompt_tokens=3000",
        "generator.max_new_tokens=8",
        "generator.threads=1",
        "trainer.threads=1",
        "trainer.warmup_updates=0",
        "schedule.updates=2",
        "schedule.groups_per_update=2",
        "schedule.samples_per_group=3",
        "algo.zero_variance=keep",
    ]
    code, _, err = llamarl("train", *asked, *settings, "--run", run)
    assert (code, err) == (0, "")
    assert llamarl("audit", run).code == 0
    return Run(run)


def counts(run: Run) -> dict[str, int]:
    assert run.summary is not None and run.summary.updates == 2 and isinstance(run.summary.agents, dict)
    return run.summary.agents


def test_hangman_of_textarena_trains(model: Path, tmp_path: Path, words: None) -> None:
    config = "task.env_config={taskset: {game: Hangman-v0}, player: {max_turns: 3}}"
    run = train(
        model, tmp_path / "run", "task.env=textarena", config, "task.size=40", "task.held_out=0.3", "evaluate.prompts=1"
    )
    told = counts(run)
    assert told["agent_failures"] == told["agent_timeouts"] == told["agent_restarts"] == 0
    assert told["agent_calls"] > told["agent_sessions"]  # games have several turns
    groups = [group for version in (0, 1) for group in run.rollouts.groups(version)]
    assert len(groups) == 4
    assert all(one.reward == one.parts["game_reward"] for group in groups for one in group.rollouts)
    assert max(run.metrics()["logprob_gap"]) < 1e-4


def test_an_environment_of_openenv_trains(model: Path, tmp_path: Path, echo: str) -> None:
    resets = ", ".join(f"{{seed: {seed}}}" for seed in range(4))
    config = f"task.env_config={{taskset: {{base_url: '{echo}', resets: [{resets}]}}, player: {{max_turns: 1}}}}"
    run = train(model, tmp_path / "run", "task.env=openenv", config, "task.held_out=0.001", "evaluate.prompts=0")
    told = counts(run)
    assert told["agent_failures"] == told["agent_timeouts"] == 0
    for version in (0, 1):
        for group in run.rollouts.groups(version):
            for one in group.rollouts:
                assert one.reward == pytest.approx(0.1 * len(one.text.strip()))


def test_a_game_without_its_settings_is_refused_with_one_line(model: Path, tmp_path: Path) -> None:
    asked = ["task=verifiers", "task.env=textarena", f"task.env_python={PYTHON}", "agent.environment=verifiers"]
    code, _, err = llamarl("train", f"model.path={model}", *asked, "--run", tmp_path / "run")
    assert (
        code == 2 and "task.env: textarena cannot be loaded: ValidationError: " in err and "game Field required" in err
    )
