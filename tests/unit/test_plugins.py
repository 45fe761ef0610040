"""A user's file is imported as Python itself would import it: with its neighbors, which hide nothing of anybody else's."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from llamarl.errors import ConfigError
from llamarl.plugins import load_function


@pytest.fixture(autouse=True)
def same_path_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_a_file_may_import_its_neighbors_which_hide_nothing(tmp_path: Path) -> None:
    (tmp_path / "neighbor_of_scorer.py").write_text("WORTH = 0.25\n")
    (tmp_path / "json.py").write_text("raise RuntimeError('not the one that was meant')\n")
    (tmp_path / "scorer.py").write_text(
        "import json\nfrom neighbor_of_scorer import WORTH\n\ndef score(*texts):\n    return WORTH, json\n"
    )
    assert load_function("reward.scorer", f"{tmp_path / 'scorer.py'}:score")() == (0.25, json)


def test_whatever_goes_wrong_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_module_anywhere\n")
    (tmp_path / "empty.py").touch()
    for reference, said in {
        "nobody": "'nobody' is neither a known name nor FILE.py:FUNCTION",
        f"{tmp_path}/absent.py:f": f"no file {tmp_path}/absent.py",
        f"{tmp_path}/empty.py:f": f"{tmp_path}/empty.py has no function 'f'",
        f"{tmp_path}/broken.py:f": "cannot be imported: ModuleNotFoundError: No module named 'no_such_module_anywhere' "
        f"({tmp_path}/broken.py:1)",
    }.items():
        with pytest.raises(ConfigError) as caught:
            load_function("reward.scorer", reference)
        assert str(caught.value).startswith("reward.scorer: ") and str(caught.value).endswith(said)
