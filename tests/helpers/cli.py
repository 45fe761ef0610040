"""The command line, called in this process: importing torch once is enough."""

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
    """What `llamarl ARGS` would print and exit with; an exception that is not SystemExit would be a traceback."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with patch.object(sys, "argv", ["llamarl", *map(str, args)]), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    return Outcome(code, out.getvalue(), err.getvalue())
