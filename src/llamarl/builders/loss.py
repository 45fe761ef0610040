"""The loss that `algo.loss` names: one of ours, or a user's own."""

from __future__ import annotations

from llamarl.algo.custom_loss import guarded, try_loss
from llamarl.algo.losses import LOSSES, Loss
from llamarl.config import Config
from llamarl.errors import ConfigError
from llamarl.plugins import check_call, is_reference, load_function


def make_loss(config: Config) -> Loss:
    """A user's own loss is guarded against what it may return."""
    name = config.algo.loss
    if is_reference(name):
        function = load_function("algo.loss", name)
        check_call("algo.loss", name, function, ("tokens", "algo"))
        return guarded(function)
    if name not in LOSSES:
        raise ConfigError(f"algo.loss: unknown loss '{name}'; known: {', '.join(LOSSES)}, or FILE.py:FUNCTION")
    return LOSSES[name]


def check_loss(config: Config) -> list[str]:
    """Try a user's own loss on a small batch, so that its mistakes show before anything starts. Returns notes."""
    loss = make_loss(config)
    return try_loss(loss, config.algo) if is_reference(config.algo.loss) else []
