"""Which settings may change on a resume, and how it is told."""

from __future__ import annotations

import pytest

from llamarl.config.file import load_config
from llamarl.errors import ConfigError
from llamarl.jobs.changed_settings import describe_changes


def changes(*now: str) -> list[str]:
    return describe_changes(load_config(None, []), load_config(None, now))


def test_what_may_change_is_listed() -> None:
    assert changes() == []
    assert changes("trainer.threads=3", "snapshots.every=7") == [
        "trainer.threads: 0 so far, 3 from here on",
        "snapshots.every: 25 so far, 7 from here on",
    ]


def test_the_ranks_of_a_trainer_may_change() -> None:
    assert changes("trainer.replicate=2", "trainer.data=4", "trainer.context=2", "trainer.tensor=2") == [
        "trainer.replicate: 1 so far, 2 from here on",
        "trainer.data: 1 so far, 4 from here on",
        "trainer.context: 1 so far, 2 from here on",
        "trainer.tensor: 1 so far, 2 from here on",
    ]


def test_all_that_would_make_it_another_run_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError) as one:
        changes("seed=5", "trainer.threads=3")
    assert str(one.value) == (
        "--resume: seed was 0 and is now 5, which would make it another run; leave it, or start a new one"
    )
    with pytest.raises(ConfigError) as several:
        changes("seed=5", "trainer.weight_decay=0.1")
    assert str(several.value) == (
        "--resume: seed was 0 and is now 5, trainer.weight_decay was 0.0 and is now 0.1, "
        "which would make it another run; leave them, or start a new one"
    )
