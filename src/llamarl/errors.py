"""Every error a user can meet. Each carries the exit code of the command that raised it."""

from __future__ import annotations

_MAX_LINE = 1000


class LlamaRLError(Exception):
    """Shown as one line, never as a traceback."""

    exit_code = 1

    def __str__(self) -> str:
        """One line without control characters, whatever a user's file or another program put into it."""
        line = " ".join(super().__str__().split())
        shown = line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]} ..."
        return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in shown)


class InputError(LlamaRLError):
    """What the user gave cannot work: config, files, data, arguments. Raised before anything starts."""

    exit_code = 2


class ArgumentError(InputError):
    """An argument of a function of the library cannot work."""

    def __init__(self, argument: str, reason: str) -> None:
        super().__init__(f"{argument}: {reason}")
        self.argument, self.reason = argument, reason


class ConfigError(InputError):
    """A setting is unknown, of the wrong type, out of range, or cannot take effect."""


class ModelError(InputError):
    """A model folder cannot be used; says which file or tensor and why."""


class JobFailed(LlamaRLError):
    """The job began and had to stop; what was done so far is in its run folder."""

    exit_code = 3


class OwnCodeFailed(JobFailed):
    """A function of the user's raised or returned something impossible: it would again, so nothing is started anew."""


class Interrupted(LlamaRLError):
    """The user pressed Ctrl-C."""

    exit_code = 130


class StaleWeights(LlamaRLError):
    """The requested version is no longer in its slot: a newer one took the place. Not a fault; load the newer one."""


class LostWeights(StaleWeights):
    """Whoever holds the requested version is gone, or does not answer; the reader keeps what it had."""


class CorruptWeights(LlamaRLError):
    """The bytes in a slot do not match their checksum; the reader keeps what it had."""


class BrokenWeights(LlamaRLError):
    """A reader took damaged weights and could not go back to those it had: it holds a mixture and must be started anew."""


class LeaseTimeout(LlamaRLError):
    """A reader kept its lease past `weights.lease_s`; the error names it."""
