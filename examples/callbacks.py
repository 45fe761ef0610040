"""Callbacks: own code that is called while a job runs. `python examples/callbacks.py [KEY=VALUE ...]`

This one writes the best answer to one prompt of each update into a file, and stops the job once the last ten updates were
good enough. A function in place of a class is called after each update. docs/reading.md says when callbacks are called, and
what happens if one fails.
"""

from __future__ import annotations

import sys
from pathlib import Path

from llamarl import Callback, EvaluationDone, Job, Run, StopTraining, UpdateDone
from llamarl.observe.summary import Summary


class StopWhenGood(Callback):
    def __init__(self, reward: float, window: int = 10) -> None:
        self._reward, self._window = reward, window
        self._seen: list[float] = []

    def on_start(self, folder: Path) -> None:
        self._file = (folder / "best.txt").open("a")

    def on_update(self, event: UpdateDone) -> None:
        for group in Run(event.folder).rollouts.groups(event.update, count=1):
            best = max(group.rollouts, key=lambda rollout: rollout.reward, default=None)
            if best is not None:
                print(f"{event.update}: {group.prompt!r} {best.text!r} {best.reward:g}", file=self._file, flush=True)
        self._seen.append(event.metrics.get("reward", 0.0))
        recent = self._seen[-self._window :]
        if len(recent) == self._window and sum(recent) / len(recent) > self._reward:
            raise StopTraining(f"mean reward above {self._reward}")

    def on_evaluation(self, event: EvaluationDone) -> None:
        print(f"version {event.version}: {event.score_name} {event.score:.3f}")

    def on_end(self, summary: Summary) -> None:
        print(f"{summary.outcome} after {summary.updates} updates")
        self._file.close()


def print_update(event: UpdateDone) -> None:
    print(f"update {event.update + 1} of {event.updates}: reward {event.metrics.get('reward', 0.0):.3f}")


def main(settings: list[str], folder: Path | None = None) -> Summary:
    job = Job.load(None, settings, callbacks=[StopWhenGood(reward=0.9), print_update])
    return job.run(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
