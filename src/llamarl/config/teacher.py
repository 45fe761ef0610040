"""`teacher`: frozen policies whose distributions the policy learns."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from llamarl.config.section import OwnRanks
from llamarl.errors import ConfigError

THE_TEACHER = "teacher"  # name of the one at `path` or `adapter`


class TeacherConfig(OwnRanks, frozen=True):
    """Policies that never change and that answers are compared with, token by token; see docs/distillation.md."""

    path: Annotated[
        str, Meta(description="model folder of the one teacher of all problems; empty: none, or several by_name")
    ] = ""
    by_name: Annotated[
        dict[str, str],
        Meta(description="several teachers, name: model folder; task.teacher or a column of the data names one"),
    ] = field(default_factory=dict)
    column: Annotated[
        str, Meta(description="by_name: column of the data that names the teacher of a row; empty: task.teacher does")
    ] = ""
    adapter: Annotated[
        str,
        Meta(description="with model.lora: PEFT folder of a teacher that is the same base with other adapters"),
    ] = ""
    url: Annotated[
        str,
        Meta(
            pattern=r"^(https?://[^@?#\s]+)?$",
            description="address of a teacher that is served elsewhere, such as http://127.0.0.1:8000; needs kl=sampled and "
            "place=own",
        ),
    ] = ""
    key_env: Annotated[
        str,
        Meta(pattern=r"^\w*$", description="url: environment variable that holds the API key; empty: no key is sent"),
    ] = ""
    kl: Annotated[
        Literal["exact", "sampled"],
        Meta(
            description="exact: KL over the whole vocabulary, a term of its own; sampled: its estimate from the sampled "
            "token, added to the advantage"
        ),
    ] = "exact"
    weight: Annotated[float, Meta(gt=0, description="weight of the KL in the loss, or in the advantage")] = 1.0
    forward: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="kl=exact: share of the forward KL(teacher || policy); the rest is the reverse KL(policy || teacher)",
        ),
    ] = 0.0
    place: Annotated[
        Literal["trainer", "own"],
        Meta(description="on the trainer's ranks, before each of its updates, or on ranks of its own, beside them"),
    ] = "trainer"
    offload: Annotated[
        bool,
        Meta(description="on the trainer's ranks, keep its weights (place=own: its head) in host memory between uses"),
    ] = True
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "fp8"],
        Meta(
            description="precision of its passes; auto: that of the trainer; fp8: that, with narrow weights and inputs of "
            "its layers"
        ),
    ] = "auto"

    def __post_init__(self) -> None:
        if sum(map(bool, (self.path, self.by_name, self.adapter, self.url))) > 1:
            raise ConfigError("teacher.path: set one of path, by_name, adapter and url")
        if self.url and (self.kl != "sampled" or self.place != "own" or self.ranks > 1):
            raise ConfigError(
                "teacher.url: gives log-probs of sampled tokens; set teacher.kl=sampled and teacher.place=own"
            )
        if self.column and not self.by_name:
            raise ConfigError("teacher.column: names teachers of teacher.by_name; set it")
        if self.forward and self.kl == "sampled":
            raise ConfigError(
                "teacher.forward: cannot take effect with teacher.kl=sampled, which estimates the reverse KL"
            )
        if self.place == "own" and self.adapter:
            raise ConfigError(
                "teacher.place: adapters are applied to the trainer's base, on its ranks; set place=trainer, or teacher.path"
            )

    def __bool__(self) -> bool:
        return bool(self.path or self.by_name or self.adapter or self.url)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.by_name) or ((THE_TEACHER,) if self else ())

    @property
    def alone(self) -> bool:
        """Whether it is an executor of its own."""
        return bool(self) and self.place == "own"

    @property
    def sends_states(self) -> bool:
        """Whether it sends its states to the trainer, which has its head."""
        return self.alone and self.kl == "exact"
