"""`llm_judge`: the LLM endpoint that scores answers."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from llamarl.config.section import Section


class LLMJudgeConfig(Section, frozen=True):
    """The endpoint behind `reward.scorer: llm_judge`; any server with OpenAI's chat completions API."""

    url: Annotated[str, Meta(pattern=r"^https?://[^@?#\s]+$", description="base URL, ending in /v1, without a key")] = (
        "http://127.0.0.1:8000/v1"
    )
    model: Annotated[str, Meta(description="name of the model at the endpoint")] = ""
    rubric: Annotated[str, Meta(description="text file with the rubric")] = ""
    key_env: Annotated[
        str, Meta(pattern=r"^\w*$", description="environment variable that holds the API key; empty: no key is sent")
    ] = ""
    top: Annotated[float, Meta(gt=0, le=1e6, description="highest score of the rubric; reward = score / top")] = 10.0
    timeout_s: Annotated[float, Meta(gt=0, le=3600, description="time limit of one request")] = 60.0
    retries: Annotated[
        int, Meta(ge=0, le=10, description="retries of a request when the endpoint is busy or unreachable")
    ] = 3
    max_tokens: Annotated[int, Meta(ge=1, description="longest verdict of the judge, in tokens")] = 1024
    max_chars: Annotated[int, Meta(ge=1, description="most characters of an answer that the judge is shown")] = 50_000

    @property
    def patience_s(self) -> float:
        """Longest time for one answer, including the pauses between attempts."""
        return (self.retries + 1) * self.timeout_s + 8.0 * self.retries
