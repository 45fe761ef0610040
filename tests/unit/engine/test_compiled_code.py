"""Compiled code is loaded as code: it is kept only where nobody else can have put something."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from llamarl.engine.compiled_code import compiled_code, compiled_environment
from llamarl.errors import ConfigError


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "tmp"))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_folder_is_the_users_alone(tmp_path: Path) -> None:
    found = Path(compiled_environment()["TORCHINDUCTOR_CACHE_DIR"])
    assert found.parent == tmp_path / "cache" / "llamarl"
    assert mode(found) == mode(found.parent) == 0o700
    assert compiled_environment()["TRITON_CACHE_DIR"].startswith(str(found))
    found.chmod(0o777)
    compiled_environment()
    assert mode(found) == 0o700


def test_a_link_that_somebody_put_there_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "llamarl").symlink_to(tmp_path / "elsewhere")
    found = Path(compiled_environment()["TORCHINDUCTOR_CACHE_DIR"])
    assert found.is_relative_to(tmp_path / "tmp" / f"llamarl-{os.geteuid()}")
    assert not any((tmp_path / "elsewhere").iterdir())


def test_folders_of_another_user_are_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    another = os.geteuid() + 1
    for base in (tmp_path / "cache" / "llamarl", tmp_path / "tmp" / f"llamarl-{another}"):
        base.mkdir(parents=True)
    monkeypatch.setattr(os, "geteuid", lambda: another)
    with pytest.raises(ConfigError, match=r"belongs to another user.*set XDG_CACHE_HOME"):
        compiled_environment()


def test_what_is_not_kept_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "as before")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    with compiled_code(keep=False):
        folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        assert mode(folder) == 0o700
        (folder / "code.py").touch()
    assert not folder.exists()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "as before" and "TRITON_CACHE_DIR" not in os.environ
    with compiled_code(keep=True):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "as before"
