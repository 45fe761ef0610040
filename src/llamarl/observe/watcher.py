"""Records counts, metrics, timings and the timeline while a job runs, and updates the display."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from msgspec import UNSET, UnsetType
from msgspec.structs import asdict

from llamarl.config import Config
from llamarl.machine import MemoryPeak
from llamarl.messages import AgentsCounted, DecodingCounted
from llamarl.observe.advice import Advisor
from llamarl.observe.display import Display, Progress
from llamarl.observe.loggers import Loggers
from llamarl.observe.run_folder import TIMELINE, RunFolder
from llamarl.observe.span_rows import SpanRows
from llamarl.observe.summary import MemoryUsed, Summary, Tally
from llamarl.observe.timeline import Span, Timeline, lane_name
from llamarl.types import GroupFacts, RolloutGroup

AGENT_COUNTS = tuple(f"agent_{name}" for name in AgentsCounted.__struct_fields__)
_RECENT_S = 10.0  # period over which the live view shows waiting; the last update, if that took longer
_TOLD_ONE_BY_ONE = 5  # number of dropped groups that get a note each


class Watcher:
    """Records what the engine reports. It counts the tokens of `first_role` (generates), the answers of `last_group_role`
    (finishes groups) and the updates of `last_role` (trains)."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        display: Display,
        *,
        tally: Tally,
        first_role: str,
        last_group_role: str = "reward",
        last_role: str,
        loggers: Loggers | None = None,
    ) -> None:
        self._config, self._folder, self._display = config, folder, display
        self._first_role, self._last_group_role, self._last_role = first_role, last_group_role, last_role
        self._loggers = loggers or Loggers()
        self._weights_s: dict[str, list[float]] = {}  # times of weight transfers since the last update, by name
        self.tally, self.timeline = tally, Timeline()
        self._start_s, self._started_at = time.monotonic(), time.time()
        self._training_s: tuple[float, float] | None = None  # times of the first finished group and of the last update
        self._last_update_s = self._start_s
        self._before = (tally.updates, tally.tokens_generated, tally.tokens_trained)  # totals of earlier starts
        self._memory: dict[str, MemoryPeak] = {}  # the most that a rank of each role has held
        self._num_answers = 0  # answers scored before the first update
        self._sft_loss: float | UnsetType = UNSET
        self._groups_of: Counter[str] = Counter()  # groups that each generator has finished since it joined
        self._num_dropped = 0  # groups dropped since this start of the job
        self._advisor = Advisor(config)
        self._counts = dict.fromkeys(("score_failures", "score_timeouts", "tool_failures", "tool_timeouts"), 0)
        if config.generator.draft:
            self._counts |= dict.fromkeys(("drafted_tokens", "accepted_drafts"), 0)
        if config.generator.prefill_beside:
            self._counts["tokens_read_beside"] = 0
        if config.agent:
            self._counts |= dict.fromkeys(AGENT_COUNTS, 0)
            tally.agents = dict.fromkeys(AGENT_COUNTS, 0)
        self._span_rows = SpanRows(folder.spans, folder.run, self._start_s, config.observe.spans_mb)

    def begin(self) -> None:
        """The job starts now."""
        self._folder.timings.append_json(
            {"start": self._folder.run, "from_version": self.tally.updates, "unix_s": self._started_at}
        )

    def spent(self, executor: str, spans: Sequence[Span], rank: int = 0) -> None:
        self.timeline.add(executor, spans, rank)
        self._span_rows.add(lane_name(executor, rank), spans)

    def held(self, executor: str, peak: MemoryPeak) -> None:
        """Hear the most memory that a rank has held so far. Executors that run inline are one process."""
        name = "job" if self._config.engine.kind == "inline" else executor.partition("/")[0]
        self._memory[name] = self._memory.get(name, MemoryPeak()).merged(peak)

    def group_done(self, executor: str, facts: GroupFacts) -> None:
        role = executor.partition("/")[0]
        if role == self._last_group_role and self.tally.updates == self._before[0]:
            schedule, rows = self._config.schedule, self._config.supervised
            self._num_answers += 1 if rows else schedule.samples_per_group
            whole = schedule.groups_per_update if rows else schedule.answers_per_update
            if self._num_answers <= whole:
                self._display.progress(self._num_answers, whole)
        if role == self._first_role:
            self._groups_of[executor] += 1
            self.tally.tokens_generated += facts.num_tokens
            if self._training_s is None:
                self._last_update_s = time.monotonic()
                self._training_s = (self._last_update_s, self._last_update_s)

    def batch_done(
        self, executor: str, update: int, metrics: Mapping[str, float], timings: Mapping[str, float] | None = None
    ) -> None:
        """Record an update. Metrics depend only on the seed; wall times go into another file, so that runs compare."""
        role = executor.partition("/")[0]
        now_s = time.monotonic()
        self._folder.metrics.add(update, role, metrics)
        if role != self._last_role:
            return
        timings = {**(timings or {}), **MemoryUsed.of(self._memory).flat()}
        self._sft_loss = metrics.get("sft_loss", self._sft_loss)
        self._folder.timings.append_json(
            {
                "update": update,
                "at_s": now_s - self._start_s,
                "update_s": now_s - self._last_update_s,
                **timings,
                **self._take_counts(),
            }
        )
        self._span_rows.flush()
        if self._training_s is not None:
            self._training_s = (self._training_s[0], now_s)
        self.tally.add_update(update, metrics)
        self._display.update(self._snapshot(metrics, now_s))
        self._last_update_s = now_s
        self._log_update(update, {**metrics, **timings})
        for advice in self._advisor.hear(metrics):
            self._display.note(f"NOTE: {advice}")

    def published(self, executor: str, version: int, num_bytes: int, lost_s: float) -> None:
        self._weights_moved("sync_trainer_s", executor, version, num_bytes, lost_s)

    def loaded(self, executor: str, version: int, num_bytes: int, lost_s: float) -> None:
        self._weights_moved("sync_generator_s", executor, version, num_bytes, lost_s)

    def _weights_moved(self, name: str, executor: str, version: int, num_bytes: int, lost_s: float) -> None:
        """Record a weight transfer. `lost_s` is the time it took from the executor's own work; overlapped time is free."""
        moved = {"version": version, "executor": executor, "at_s": time.monotonic() - self._start_s}
        rate = num_bytes / lost_s / 1e9 if lost_s else 0.0
        self._folder.timings.append_json({**moved, "bytes": num_bytes, name: lost_s, "gb_s": rate})
        self._weights_s.setdefault(name, []).append(lost_s)

    def _log_update(self, update: int, values: Mapping[str, float]) -> None:
        """Tell the loggers. Weight transfers count to the update after them, since steps of a log do not go back."""
        moved, self._weights_s = {name: _mean(times) for name, times in self._weights_s.items()}, {}
        marks = {"start": float(self._folder.run), "restarts": float(self.tally.restarts)}
        self._loggers.metrics(update, {**values, **moved, **marks})
        for note in self._loggers.take_notes():
            self._display.note(note)

    def training(self, update: int, groups: Sequence[RolloutGroup]) -> None:
        """Hear which rollouts an update trains on."""
        self._loggers.trained(update, groups)

    def evaluated(self, version: int, accuracy: float, num_problems: int, groups: Sequence[RolloutGroup] = ()) -> None:
        self.tally.evaluations[version] = accuracy
        self._folder.evaluations.append_json({"version": version, "accuracy": accuracy, "problems": num_problems})
        self._loggers.evaluated(version, accuracy, groups)
        self._display.note(f"held-out {self._config.score_name} of version {version}: {accuracy:.3f}")

    def dropped(self, ordinal: int, reason: str) -> None:
        """Count a dropped group. Notes are sparse after the first few, since there may be thousands."""
        self.tally.groups_dropped += 1
        self._num_dropped += 1
        if self._num_dropped <= _TOLD_ONE_BY_ONE:
            self._display.note(f"group {ordinal} dropped: {reason}")
        elif str(self._num_dropped).rstrip("0") in ("1", "2", "5"):
            self._display.note(f"{self._num_dropped} groups dropped so far, the last: {reason}")

    def replaced(self) -> None:
        """Count a group without variance that another one replaced; the metrics of its update tell how many."""
        self.tally.groups_replaced += 1

    def skipped(self, executor: str, update: int, ordinals: Sequence[int]) -> None:
        self._display.note(
            f"{executor} skipped update {update}: loss or gradient was not a number; weights unchanged; "
            f"groups {', '.join(map(str, ordinals))}"
        )

    def scores_failed(self, failures: int, timeouts: int) -> None:
        """Count scoring failures. They are written with the timings, since time-outs depend on the machine, not the seed."""
        self.tally.score_failures += failures
        self.tally.score_timeouts += timeouts
        self._counts["score_failures"] += failures
        self._counts["score_timeouts"] += timeouts

    def tools_failed(self, failures: int, timeouts: int) -> None:
        self.tally.tool_failures += failures
        self.tally.tool_timeouts += timeouts
        self._counts["tool_failures"] += failures
        self._counts["tool_timeouts"] += timeouts

    def decoding_counted(self, counted: DecodingCounted) -> None:
        """Count tokens of drafts and of prompts. They are written with the timings, since they depend on what runs at the
        same time."""
        for name, value in asdict(counted).items():
            if name in self._counts:
                self._counts[name] += value

    def agents_counted(self, counted: AgentsCounted) -> None:
        """Count what agents did. It is written with the timings, since it depends on the agents, not on the seed."""
        for name, value in asdict(counted).items():
            self.tally.agents[f"agent_{name}"] += value
            self._counts[f"agent_{name}"] += value

    def _take_counts(self) -> dict[str, int]:
        """Take the counts since the last update, and reset them."""
        taken, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        return taken

    def note(self, text: str) -> None:
        self._display.note(text)

    def died(self, executor: str, reason: str) -> None:
        self._display.note(f"{executor} died: {reason}")
        self._folder.timings.append_json({"executor": executor, "at_s": self._elapsed_s, "died": reason})

    def joined(self, executor: str, host: str) -> None:
        """Record a replica that joined; the ledger says which groups it was given."""
        self._display.note(f"{executor} joins, on {host}")
        self.timeline.joined(executor, time.monotonic())
        self._folder.timings.append_json({"executor": executor, "host": host, "at_s": self._elapsed_s, "joined": True})

    def left(self, executor: str, host: str, reason: str) -> None:
        self._display.note(f"{executor} has left, on {host}: {reason}")
        self.timeline.left(executor, time.monotonic())
        row = {"executor": executor, "host": host, "at_s": self._elapsed_s, "left": reason}
        self._folder.timings.append_json({**row, "groups": self._groups_of.pop(executor, 0)})

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._start_s

    def restarted(self, executor: str) -> None:
        self.tally.restarts += 1
        self._folder.timings.append_json({"executor": executor, "at_s": self._elapsed_s, "restarted": True})

    def saved(self, version: int) -> None:
        self._folder.timings.append_json({"snapshot": version, "at_s": self._elapsed_s})

    def finish(self, outcome: str, policy: str) -> Summary:
        """Write the timeline and the summary, also when the job failed; then end the loggers."""
        self._display.close()
        try:
            return self._write_summary(outcome, policy)
        finally:
            self._loggers.finish(outcome, self._config.observe.wait_s)
            for note in self._loggers.take_notes():
                self._display.note(note)

    def _write_summary(self, outcome: str, policy: str) -> Summary:
        end_s = time.monotonic()
        self._span_rows.flush()
        start_s, stop_s = self._training_s or (self._start_s, end_s)
        tally, rewards = self.tally, self.tally.rewards
        summary = Summary(
            outcome=outcome,
            eval_before=self.tally.evaluations.get(0),
            eval_after=self.tally.evaluations.get(self._config.schedule.updates),
            score_name=self._config.score_name,
            updates=tally.updates,
            updates_before=self._before[0],
            groups_trained=tally.groups_trained,
            groups_without_variance=tally.groups_without_variance,
            groups_dropped=tally.groups_dropped,
            groups_replaced=tally.groups_replaced,
            skipped=tally.skipped,
            staleness_mean=tally.staleness_mean,
            staleness_max=tally.staleness_max,
            reward_first=_mean(rewards[: max(1, len(rewards) // 10)]),
            reward_last=_mean(rewards[-max(1, len(rewards) // 10) :]),
            sft_loss=self._sft_loss,
            idle_share=self.timeline.idle_share(start_s, stop_s),
            started_at=self._started_at,
            wall_s=end_s - self._start_s,
            train_s=stop_s - start_s,
            tokens_generated=tally.tokens_generated,
            tokens_trained=tally.tokens_trained,
            restarts=tally.restarts,
            score_failures=tally.score_failures,
            score_timeouts=tally.score_timeouts,
            tool_failures=tally.tool_failures,
            tool_timeouts=tally.tool_timeouts,
            agents=tally.agents or UNSET,
            memory=MemoryUsed.of(self._memory) if self._memory else UNSET,
            policy=policy,
            advice=self._advisor.final(),
        )
        self.timeline.write(self._folder.path / TIMELINE, self._start_s, end_s)
        self._folder.write_summary(summary)
        return summary

    def _snapshot(self, metrics: Mapping[str, float], now_s: float) -> Progress:
        """The state after an update. Rates count from the first group of this start. Waiting covers at least the last
        update, since the trainer reports its work only when an update is done."""
        began_s = (self._training_s or (self._start_s, 0.0))[0]
        recent_s = max(began_s, min(now_s - _RECENT_S, self._last_update_s))
        updates, generated, trained = self._before
        return Progress(
            update=self.tally.updates,
            updates=self._config.schedule.updates,
            updates_before=updates,
            metrics=dict(metrics),
            tokens_generated=self.tally.tokens_generated - generated,
            tokens_trained=self.tally.tokens_trained - trained,
            elapsed_s=now_s - began_s,
            waiting=self.timeline.waiting(recent_s, now_s),
            accuracy=next(reversed(self.tally.evaluations.values()), None),
            score_failures=self.tally.score_failures,
            score_timeouts=self.tally.score_timeouts,
            tool_failures=self.tally.tool_failures,
            tool_timeouts=self.tally.tool_timeouts,
            score_name=self._config.score_name,
        )


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0
