"""Every error that a user can meet. Each has the exit code of the command that raises it."""

from __future__ import annotations

_MAX_LINE = 1000


class LlamaRLError(Exception):
    """Base class of our errors; shown as one line, never as a traceback."""

    exit_code = 1

    def __str__(self) -> str:
        """The message as one line without control characters, also if it quotes a user's file or another program."""
        line = " ".join(super().__str__().split())
        shown = line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]} ..."
        return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in shown)


class InputError(LlamaRLError):
    """The user's config, files, data or arguments cannot work. Raised before anything starts."""

    exit_code = 2


class ArgumentError(InputError):
    """An argument of a function of the library cannot work."""

    def __init__(self, argument: str, reason: str) -> None:
        super().__init__(f"{argument}: {reason}")
        self.argument, self.reason = argument, reason


class ConfigError(InputError):
    """A setting is unknown, of the wrong type, out of range, or cannot take effect."""


class ModelError(InputError):
    """A model folder cannot be used; the message names the file or tensor and the reason."""


class JobFailed(LlamaRLError):
    """The job started and had to stop; its results so far are in the run folder."""

    exit_code = 3


class OwnCodeFailed(JobFailed):
    """The user's function raised an error or returned an invalid value. It would do so again, so nothing is restarted."""


class Interrupted(LlamaRLError):
    """The user pressed Ctrl-C."""

    exit_code = 130


class StaleWeights(LlamaRLError):
    """The requested version has been replaced by a newer one in its slot. Not a fault: load the newer one."""


class LostWeights(StaleWeights):
    """The holder of the requested version is gone or does not answer; the reader keeps its old weights."""


class CorruptWeights(LlamaRLError):
    """The bytes in a slot do not match their checksum; the reader keeps its old weights."""


class BrokenWeights(LlamaRLError):
    """A reader loaded damaged weights and could not restore its old ones. It holds a mixture and must be restarted."""


class LeaseTimeout(LlamaRLError):
    """A reader kept its lease longer than `weights.lease_s`; the message names the reader."""
