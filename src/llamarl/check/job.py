"""A job on this machine: would it be refused, does it fit, and is there room for its record?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from llamarl.builders.registry import BUILDERS
from llamarl.check.finding import Finding, gib
from llamarl.check.machine import MachineFacts
from llamarl.config import Config
from llamarl.controller.default_line import default_line
from llamarl.controller.line import executor_names
from llamarl.errors import LlamaRLError
from llamarl.families.parameters import num_parameters
from llamarl.jobs.memory_check import HOST, PROCESSES, MemoryItem, describe_largest, job_parts
from llamarl.jobs.prepare import PreparedJob, prepare_job
from llamarl.machine import FreeMemory
from llamarl.model.hf_config import read_shape

_BASE_BYTES = {"local": 400 << 20, "inline": 250 << 20, "monarch": 400 << 20}
"""Host memory of the main process and its fork server, beside what the executors take; by engine."""
_CONTEXT_BYTES = 512 << 20  # of CUDA itself, in every process on a GPU
_STATE_BYTES, _POLICY_BYTES = 12, 4  # on disk, per parameter: a whole snapshot, and one of the policy alone
_NOTE = "NOTE: "
_FILES, _FILES_PER_RANK = 40, 8  # open files of the main process


def prepared(config: Config) -> tuple[PreparedJob | None, str]:
    """The job, by the checks of `llamarl train` itself; or None and the line with which it would refuse it."""
    try:
        return prepare_job(config, default_line(config), BUILDERS, {}, None), ""
    except LlamaRLError as error:
        return None, str(error)


def check_job(
    config: Config, facts: MachineFacts, run: Path | None, refusal: str, notes: Sequence[str] = ()
) -> Iterator[Finding]:
    """Yield what would keep `llamarl train` from running this job here, and what may. `notes`: what it would say itself."""
    yield from _check_folder(run)
    if not refusal:
        yield Finding("settings", "ok", "llamarl train would start this job")
    elif not refusal.startswith("memory:"):  # which has lines of its own
        yield Finding("settings", "problem", refusal)
    yield from (Finding("note", "warning", one.removeprefix(_NOTE)) for one in notes if one.startswith(_NOTE))
    if config.engine.hosts:
        yield Finding("fits", "warning", "not checked: the job runs on the hosts of engine.hosts; run check there")
        return
    try:
        parts = list(job_parts(config))
        disk = [_check_disk(config, facts), *_check_states(config, facts)]
    except LlamaRLError:
        return  # no model to count; the refusal says so
    yield from check_places(config, parts, facts)
    yield from disk
    yield _check_files(config, facts)


def _check_folder(run: Path | None) -> Iterator[Finding]:
    if run is None or not run.exists():
        return
    if not run.is_dir():
        yield Finding("run folder", "problem", f"{run} is not a folder", "name another one")
    elif any(run.iterdir()):
        yield Finding("run folder", "problem", f"{run} is not empty", "name a new folder, or train with --resume")


def check_places(config: Config, parts: Sequence[MemoryItem], facts: MachineFacts) -> Iterator[Finding]:
    """Yield a line for the host and for each GPU: what the job surely takes, and what it may take, against what is free."""
    for place in dict.fromkeys([HOST, *(part.place for part in parts)]):
        here, room = [part for part in parts if part.place == place], room_at(place, facts)
        base = _BASE_BYTES[config.engine.kind] if place == HOST else 0.0
        contexts = 0 if place == HOST else _CONTEXT_BYTES * sum(part.what == PROCESSES for part in here)
        least = base + contexts + sum(part.num_bytes for part in here if part.sure)
        most = base + sum(part.num_bytes for part in here)  # with the contexts: they are a part of the processes
        yield _judge_place(place, least, most, room, here)


def room_at(place: str, facts: MachineFacts) -> FreeMemory:
    if place == HOST:
        return facts.memory
    gpu = facts.gpus[int(place.rpartition(":")[2])]
    return FreeMemory(gpu.total_bytes, gpu.free_bytes)


def _judge_place(place: str, least: float, most: float, room: FreeMemory, parts: Sequence[MemoryItem]) -> Finding:
    name = "fits memory" if place == HOST else f"fits {place}"
    told = f"takes {gib(least)} at least and {gib(most)} at most, of {gib(room.available_bytes)} free"
    if least > room.available_bytes:
        held = f" ({gib(room.total_bytes)} in all)" if least <= room.total_bytes else ""
        return Finding(
            name, "problem", f"DOES NOT FIT: {told}{held}", describe_largest([one for one in parts if one.sure])
        )
    if most > room.available_bytes:
        return Finding(name, "warning", f"may not fit: {told}", describe_largest(parts))
    return Finding(name, "ok", told)


def _check_disk(config: Config, facts: MachineFacts) -> Finding:
    """Whether the snapshots fit. One more than are kept is there while it is written; without room for one, a job fails."""
    shape, snapshots = read_shape(config.model_folder), config.snapshots
    regular = 0 < snapshots.every <= config.schedule.updates
    each = num_parameters(shape) * {"whole": _STATE_BYTES, "policy": _POLICY_BYTES}.get(snapshots.at_end, 0)
    if regular:
        each = max(each, num_parameters(shape) * _STATE_BYTES)
    most = each * (snapshots.keep + 1 if regular else 1)
    told = f"a snapshot takes {gib(each)}, all of them {gib(most)}, of {gib(facts.disk_free_bytes)} free"
    if not each:
        return Finding("fits disk", "ok", "no snapshots are taken")
    if each > facts.disk_free_bytes:
        return Finding("fits disk", "problem", f"DOES NOT FIT: {told}", "name a folder on a larger disk with --run DIR")
    if most > facts.disk_free_bytes:
        return Finding("fits disk", "warning", f"may not fit: {told}", "lower snapshots.keep")
    return Finding("fits disk", "ok", told)


def _check_states(config: Config, facts: MachineFacts) -> Iterator[Finding]:
    """Whether the states of teachers fit, at most: of the update that is trained, and of the next."""
    if not config.teacher.sends_states:
        return
    tokens = config.schedule.groups_per_update * config.schedule.samples_per_group * config.generator.max_new_tokens
    widest = max(read_shape(folder).hidden_size for folder in config.teacher_folders.values())
    most = 2 * tokens * widest * (4 if config.teacher.dtype == "float32" else 2)
    told = f"states of teachers take {gib(most)} at most, of {gib(facts.disk_free_bytes)} free"
    if most > facts.disk_free_bytes:
        advice = "name a folder on a larger disk with --run DIR, or lower generator.max_new_tokens"
        yield Finding("fits states", "warning", f"may not fit: {told}", advice)
    else:
        yield Finding("fits states", "ok", told)


def _check_files(config: Config, facts: MachineFacts) -> Finding:
    ranks = sum(role.ranks * len(executor_names(role)) for role in default_line(config).roles)
    needed = _FILES + _FILES_PER_RANK * ranks
    told = f"about {needed} of {facts.open_files} open files"
    if needed > facts.open_files:
        return Finding("fits files", "problem", f"DOES NOT FIT: {told}", f"raise the limit: ulimit -n {needed}")
    return Finding("fits files", "ok", told)
