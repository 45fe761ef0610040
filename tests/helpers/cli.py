"""Calls the command line in this process, so that torch is imported only once."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple
from unittest.mock import patch

from llamarl.cli import main


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


def llamarl(*args: object) -> Outcome:
    """Output and exit code of `llamarl ARGS`; any exception but SystemExit would be a traceback for the user."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with patch.object(sys, "argv", ["llamarl", *map(str, args)]), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    return Outcome(code, out.getvalue(), err.getvalue())
