"""`llm_judge`: an LLM behind an endpoint as a scorer."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from llamarl.config.section import Section


class LLMJudgeConfig(Section, frozen=True):
    """The endpoint behind `reward.scorer: llm_judge`: anything that speaks OpenAI's chat completions."""

    url: Annotated[
        str, Meta(pattern=r"^https?://[^@?#\s]+$", description="where it is, up to and with /v1; no key in it")
    ] = "http://127.0.0.1:8000/v1"
    model: Annotated[str, Meta(description="the name of the model there")] = ""
    rubric: Annotated[str, Meta(description="file with the rubric, in plain words")] = ""
    key_env: Annotated[
        str, Meta(pattern=r"^\w*$", description="environment variable that holds the key; empty: none is sent")
    ] = ""
    top: Annotated[float, Meta(gt=0, le=1e6, description="the best score; rewards are its shares")] = 10.0
    timeout_s: Annotated[float, Meta(gt=0, le=3600, description="for one request")] = 60.0
    retries: Annotated[int, Meta(ge=0, le=10, description="of a request that met a busy or absent endpoint")] = 3
    max_tokens: Annotated[int, Meta(ge=1, description="that the judge may write")] = 1024
    max_chars: Annotated[int, Meta(ge=1, description="of an answer that the judge is shown")] = 50_000

    @property
    def patience_s(self) -> float:
        """For one answer, pauses between attempts included."""
        return (self.retries + 1) * self.timeout_s + 8.0 * self.retries
