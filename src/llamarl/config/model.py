"""`model`: the policy that is trained."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from llamarl.config.section import Section


class ModelConfig(Section, frozen=True):
    """The policy that is trained; see docs/models.md."""

    path: Annotated[
        str, Meta(description="folder with config.json, *.safetensors and tokenizer.json; 'tiny' is the shipped model")
    ] = "tiny"
