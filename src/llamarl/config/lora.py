"""`model.lora`: small trainable matrices beside a frozen model."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from llamarl.config.section import Section
from llamarl.errors import ConfigError

_KNOWN = ("all", "attention", "mlp")


class LoraConfig(Section, frozen=True):
    """Low-rank adapters: y = W x + (alpha / rank) B A x, where only A and B are trained; see docs/lora.md."""

    rank: Annotated[
        int, Meta(ge=0, le=4096, description="rank of the adapters; 0: no adapters, all weights are trained")
    ] = 0
    alpha: Annotated[float, Meta(gt=0, description="the adapters' product is multiplied by alpha / rank")] = 32.0
    targets: Annotated[
        str | tuple[str, ...],
        Meta(
            description="layers with adapters: all, attention, mlp, or a list such as [q_proj, v_proj]; those of experts are "
            "among all and mlp, and are named experts in a list"
        ),
    ] = "all"

    def __post_init__(self) -> None:
        if isinstance(self.targets, str) and self.targets not in _KNOWN:
            raise ConfigError(
                f"model.lora.targets: expected {', '.join(_KNOWN)} or a list of layers, got '{self.targets}'"
            )
        if not self.targets or (len(set(self.targets)) < len(self.targets) and not isinstance(self.targets, str)):
            raise ConfigError("model.lora.targets: the list must name at least one layer, and each layer once")

    @property
    def scale(self) -> float:
        """Factor of the adapters' product."""
        return self.alpha / self.rank

    def __bool__(self) -> bool:
        """Whether there are adapters."""
        return self.rank > 0


NO_LORA = LoraConfig()
