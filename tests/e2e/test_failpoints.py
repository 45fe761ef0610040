"""Whatever fails at whatever change of state: the run goes on, or is resumed, and every group is accounted for."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from helpers.failing import SEGMENT_BYTES, SMALL, all_failpoints, run_and_resume
from helpers.fingerprint import kept_rollouts
from helpers.warm import fork_server

from llamarl import Job
from llamarl.config.file import load_config
from llamarl.controller.ledger import read_ledger
from llamarl.controller.ledger_state import audit
from llamarl.errors import InputError, LlamaRLError
from llamarl.failpoints import Action, arm, failpoint

NAMES = all_failpoints()
SEED = 12
SIDE_BY_SIDE = 3
LORA = ("model.lora.rank=4", "trainer.lr=1e-3")


def test_every_failpoint_has_a_name_of_its_own() -> None:
    assert len(NAMES) == len(set(NAMES)) >= 20


@pytest.mark.parametrize("action", ["raise", "delay"])
@pytest.mark.parametrize("name", NAMES)
def test_an_error_or_a_delay_anywhere_loses_nothing(
    name: str, action: Action, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr("llamarl.io.record_log.MAX_SEGMENT_BYTES", SEGMENT_BYTES)
    monkeypatch.setattr("llamarl.controller.ledger_file.FOLD_BYTES", SEGMENT_BYTES)
    lora = LORA if NAMES.index(name) % 2 else ()
    config, run, flag = load_config(None, ["engine=inline", *SMALL, *lora]), tmp_path / "run", tmp_path / "reached"
    with arm(name, action, flag, nth=2):
        try:
            Job(config).run(run)
        except LlamaRLError:
            assert action == "raise"
            Job.resume(run)
    assert flag.exists(), "never reached"
    assert sorted(kept_rollouts(run)) == list(range(6))
    found = audit(read_ledger(run / "ledger"))
    assert found.clean, found
    assert (found.trained, found.updates, found.dropped) == (12, 6, {})


def some_deaths() -> list[tuple[str, str, int]]:
    chance = random.Random(SEED)
    cases = [(name, action) for name in NAMES for action in ("kill", "stop")]
    return [(*case, chance.randint(1, 2)) for case in chance.sample(cases, 20)]


@pytest.mark.timeout(600)
def test_processes_killed_or_stopped_at_twenty_places_lose_nothing(tmp_path: Path) -> None:
    """Each in a job of its own, half of them with adapters, some side by side: most of the time goes into starting
    processes."""
    cases = some_deaths()

    def outcome(case: tuple[str, str, int]) -> str:
        name, action, nth = case
        folder = tmp_path / f"{name}-{action}"
        folder.mkdir()
        found = run_and_resume(folder, name, action, nth, LORA if cases.index(case) % 2 else ())
        sound = found.clean and (found.trained, found.updates, found.dropped) == (12, 6, {})
        return "" if sound else f"{case}: {found}"

    fork_server()
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        assert not list(filter(None, pool.map(outcome, cases)))


def test_nothing_happens_where_nothing_is_armed(tmp_path: Path) -> None:
    with arm("elsewhere", "raise", tmp_path / "flag"):
        failpoint("here")
    assert not (tmp_path / "flag").exists()


def test_a_malformed_setting_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from llamarl import failpoints

    monkeypatch.setenv("LLAMARL_FAILPOINT", "segment.write:explode")
    with pytest.raises(InputError, match="expected NAME:ACTION:NTH:FLAG"):
        failpoints._from_environment()
