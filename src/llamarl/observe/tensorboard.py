"""TensorBoard: event files in the run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llamarl.observe.metric_logger import Kind, LoggedRun, MetricLogger, SampleRow


class TensorBoard(MetricLogger):
    """Writes metrics and evaluations as scalars of their names, settings and samples as text. A kill may have cut the last
    update short: after a resume, all from that one on is taken back and written again, but for samples."""

    _writer: Any

    def start(self, run: LoggedRun) -> Mapping[Kind, int]:
        from torch.utils.tensorboard import SummaryWriter

        again = max(0, run.sent["metrics"] - 1) if run.sent.get("metrics") else None
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=again)
        self._writer.add_text(
            "settings", as_code("\n".join(f"{key}: {value}" for key, value in run.settings.items())), run.start
        )
        if again is None:
            return {}
        return {"metrics": again, "evaluations": min(again, run.sent.get("evaluations", 0))}

    def log_metrics(self, update: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, update)
        self._writer.flush()  # what is on disk survives a kill

    def log_evaluation(self, version: int, values: Mapping[str, float]) -> None:
        self.log_metrics(version, values)

    def log_samples(self, kind: Kind, step: int, rows: Sequence[SampleRow]) -> None:
        self._writer.add_text(kind, "\n\n".join(map(_section, rows)), step)
        self._writer.flush()

    def finish(self, outcome: str) -> None:
        self._writer.close()


def _section(row: SampleRow) -> str:
    head = f"**{row.ordinal}**: reward {row.reward:g}, {row.num_tokens} tokens{', cut off' if row.truncated else ''}"
    shown = (("prompt", row.prompt), ("answer", row.answer), ("expected", row.expected))
    return "\n\n".join([head, *(f"{name}:\n\n{as_code(text)}" for name, text in shown)])


def as_code(text: str) -> str:
    """The text as a code block of Markdown, in which nothing has a meaning: no line can end it."""
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])
