"""What the simulator predicts for a run, from its settings and the lengths of its answers, on a described machine."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from msgspec.structs import replace

from llamarl.config import Config, EvaluateConfig, SnapshotsConfig
from llamarl.errors import LlamaRLError
from llamarl.plan.gpus import gpu_named
from llamarl.plan.lengths import Lengths, lognormal_with
from llamarl.simulate.setup import SimulationSetup, make_simulation, shape_of_job
from llamarl.view.run_reader import RunReader
from llamarl.view.spans import SpanStore

_UPDATES = 24  # simulated updates, without evaluations, snapshots and probes
_HOW = "give --gpu NAME, or --gpu FILE with what `llamarl bench --calibrate --json FILE` measured on its machine"


class PredictedRun:
    """The simulated run, made once when it is first asked for."""

    def __init__(self, run: RunReader, gpu: str) -> None:
        self._run, self._gpu, self._lock = run, gpu, threading.Lock()
        self._found: dict[str, Any] | None = None
        self._store = SpanStore()

    def figures(self, prompt_tokens: float) -> dict[str, Any]:
        """Predicted and measured seconds of an update and waiting of each role; or, under `missing`, why there are none."""
        if not self._gpu:
            return {"missing": f"no prediction: the run does not record what its machine can do; {_HOW}"}
        with self._lock:
            if self._found is None:
                try:
                    self._found = self._simulate(prompt_tokens)
                except LlamaRLError as error:
                    self._found = {"missing": f"no prediction: {error}"}
            return self._found

    def drawn(self, start_s: float, end_s: float, bins: int) -> list[dict[str, Any]]:
        return self._store.drawn(start_s, end_s, bins)

    def _simulate(self, prompt_tokens: float) -> dict[str, Any]:
        run, config = self._run, self._run.config
        if not run.num_updates:
            return {"missing": "no prediction before the first update: the lengths of answers are not known yet"}
        scene = SimulationSetup(
            config=_shortened(config),
            shape=shape_of_job(config, ""),
            gpu=gpu_named(self._gpu),
            answers=_lengths(run),
            prompt=max(1, round(prompt_tokens)) if prompt_tokens else config.generator.max_prompt_tokens,
            skipped=_skipped(run),
        )
        simulation = make_simulation(scene)
        found = simulation.run()
        for executor, track in simulation.timeline.spans.items():
            self._store.add(executor, ((s.kind, s.name, s.start_s, s.end_s) for s in track))
        return {
            "machine": scene.gpu.name,
            "update_s": found.update_s,
            "waiting": found.idle_share,
            "staleness": {str(age): share for age, share in found.staleness.items()},
            "wall_s": found.wall_s,
            "updates": found.updates,
            "answers": scene.answers.spec,
            "prompt_tokens": scene.prompt,
            "skipped": scene.skipped,
        }


def _shortened(config: Config) -> Config:
    schedule = replace(config.schedule, updates=min(_UPDATES, config.schedule.updates), probe_every=0)
    return replace(config, schedule=schedule, evaluate=EvaluateConfig(prompts=0), snapshots=SnapshotsConfig(every=0))


def _mean(run: RunReader, name: str) -> float:
    values = run.metrics.get(name)
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else 0.0


def _lengths(run: RunReader) -> Lengths:
    mean, truncated, limit = (
        _mean(run, "answer_tokens"),
        _mean(run, "truncated_share"),
        run.config.generator.max_new_tokens,
    )
    if truncated > 0.5 or mean > 0.97 * limit or mean < 1.5:
        return Lengths(f"fixed:{max(1, min(limit, round(mean)))}")
    return lognormal_with(mean, truncated, limit)


def _skipped(run: RunReader) -> float:
    """Share of answer tokens that were not trained on, since their groups had no variance."""
    answered = float(np.nansum(run.metrics.get("answer_tokens") * run.metrics.get("completions")))
    return max(0.0, 1 - float(np.nansum(run.metrics.get("trained_tokens"))) / answered) if answered else 0.0
