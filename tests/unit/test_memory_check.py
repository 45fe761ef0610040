"""What surely does not fit is refused before anything starts; what may not fit is said."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
from helpers.cli import llamarl

from llamarl.builders.context import BuildContext
from llamarl.builders.trainer import build_trainer
from llamarl.config import Config
from llamarl.config.file import load_config
from llamarl.controller.default_line import default_line
from llamarl.errors import ConfigError
from llamarl.executors.trainer import Trainer
from llamarl.generate.decoder import ContinuousDecoder
from llamarl.generate.limits import Limits, Precision
from llamarl.jobs.job import Job
from llamarl.jobs.memory_check import HOST, MemoryItem, check_memory, job_parts
from llamarl.machine import FreeMemory
from llamarl.model.checkpoint import load_model
from llamarl.model.hf_config import read_shape
from llamarl.observe.display import Quiet
from llamarl.weights.slot_file import SlotFile

GIB = 1 << 30
SHORT = ["engine=inline", "schedule.updates=1", "schedule.groups_per_update=2", "schedule.samples_per_group=2"]


def size(parts: list[MemoryItem], what: str, place: str = HOST) -> float:
    return sum(part.num_bytes for part in parts if (part.what, part.place) == (what, place))


def room(total: float, available: float | None = None) -> FreeMemory:
    return FreeMemory(total, total if available is None else available)


@pytest.mark.parametrize("setting", ["generator.kv_pages=0", "generator.kv_pages=50", "generator.kv_cache=fp8"])
def test_the_cache_takes_what_the_check_says(setting: str) -> None:
    config = load_config(None, ["generator.slots=24", setting, "generator.device=cpu"])
    model = load_model(config.model_folder)
    decoder = ContinuousDecoder(
        model, Limits.of(config), eos_ids=(1,), seed=0, precision=Precision.of(config.generator)
    )
    cache = decoder._device._steps.cache
    pages = cache._parts[0].shape[2]
    taken = sum(part.nbytes for part in cache._parts) * (pages - 1) / pages  # page 0 is nobody's
    assert size(list(job_parts(config)), "KV cache") == pytest.approx(taken)


def test_the_trainer_takes_what_the_check_says() -> None:
    config = load_config(None, ["trainer.device=cpu", "generator.device=cpu"])
    slots = {"trainer": SlotFile()}
    trainer = build_trainer(
        BuildContext(
            config, "trainer/0", slots, default_line(config).weights_source, first_gpus={"trainer": 0, "generator": 1}
        )
    )
    assert isinstance(trainer, Trainer)
    optimizer = trainer.learner.optimizer
    weights = sum(slot.local.nbytes for slot in optimizer.slots)
    state = sum(tensor.nbytes for slot in optimizer.slots for tensor in slot.state.values())
    found = list(job_parts(config))
    assert size(found, "optimizer state and gradients") == weights + state + weights  # as many gradients
    assert size(found, "copy for snapshots") == weights + state
    assert size(found, "published weights") == pytest.approx(2 * weights)
    slots["trainer"].close()


def test_replicas_and_ranks_on_one_machine_count_together() -> None:
    one, three = (
        list(
            job_parts(load_config(None, [f"generator.replicas={count}", "generator.device=cpu", "trainer.device=cpu"]))
        )
        for count in (1, 3)
    )
    assert size(three, "KV cache") == 3 * size(one, "KV cache")
    assert size(three, "optimizer state and gradients") == size(one, "optimizer state and gradients")
    sharded = list(job_parts(load_config(None, ["trainer.data=2", "generator.device=cpu", "trainer.device=cpu"])))
    assert len([part for part in sharded if part.what == "activations"]) == 2
    again = ["trainer.replicate=3", "trainer.data=2", "generator.device=cpu", "trainer.device=cpu"]
    replicated = list(job_parts(load_config(None, again)))
    for what in ("published weights", "copy for snapshots"):
        assert size(replicated, what) == size(sharded, what), "one replica publishes and saves"
    assert size(replicated, "optimizer state and gradients") == 3 * size(sharded, "optimizer state and gradients")


def test_ranks_that_share_packs_hold_a_part_of_their_activations_and_of_the_state() -> None:
    settings = ["generator.device=cpu", "trainer.device=cpu", "generator.max_new_tokens=5000"]
    one = list(job_parts(load_config(None, settings)))
    four = list(job_parts(load_config(None, [*settings, "trainer.context=4"])))
    assert len([part for part in four if part.what == "activations"]) == 4
    assert size(four, "optimizer state and gradients") == pytest.approx(size(one, "optimizer state and gradients"))
    assert size(four, "activations") / 4 < 0.4 * size(one, "activations")


def test_gpus_are_counted_each_for_itself_and_shared_ones_together() -> None:
    for count, places in ((2, {"cuda:0", "cuda:1"}), (1, {"cuda:0"})):
        with patch("torch.cuda.device_count", return_value=count):
            found = list(job_parts(load_config(None, ["trainer.offload=true", "algo.reference_kl=0.1"])))
        assert {part.place for part in found} - {HOST} >= places
        generator = "cuda:1" if count == 2 else "cuda:0"
        assert size(found, "KV cache", generator) > 0
        assert size(found, "published weights", "cuda:0") > 0
        assert size(found, "optimizer state in host memory") > size(found, "optimizer state and gradients", "cuda:0"), (
            "most of it is offloaded"
        )


def refusal(total: float, *settings: str) -> str:
    with (
        patch("llamarl.jobs.memory_check.host_memory", return_value=room(total)),
        pytest.raises(ConfigError) as refused,
    ):
        check_memory(load_config(None, ["generator.device=cpu", "trainer.device=cpu", *settings]))
    return str(refused.value)


def test_what_surely_does_not_fit_names_its_largest_parts_and_the_settings_to_lower() -> None:
    told = refusal(16 * GIB, "generator.slots=10000000")
    assert told.startswith(
        "memory: this machine has 16.0 GiB, and this takes at least 1144.4 GiB: KV cache 1144.4 GiB; "
    )
    assert "lower generator.slots, generator.max_new_tokens or generator.kv_pages" in told
    assert "optimizer" not in told, "what is small is not named"
    told = refusal(10 << 20, "generator.slots=8", "generator.replicas=1")
    assert "optimizer state and gradients" in told


def test_a_gpu_that_is_too_small_is_named() -> None:
    with (
        patch("torch.cuda.device_count", return_value=1),
        patch("llamarl.jobs.memory_check.total_memory", return_value=1 << 20),
        pytest.raises(
            ConfigError, match=r"memory: cuda:0 has 0\.0 GiB, and this takes at least .*trainer\.offload=true"
        ),
    ):
        check_memory(Config())


def test_what_may_not_fit_is_said_and_what_fits_is_not() -> None:
    config = load_config(None, ["generator.device=cpu", "trainer.device=cpu"])
    with patch("llamarl.jobs.memory_check.host_memory", return_value=room(16 * GIB, 1 * GIB)):
        (note,) = check_memory(config)
    assert note.startswith("memory is tight: this machine has 1.0 GiB free, and this may take 1.5 GiB: ")
    assert "trainer.tokens_per_pack" in note
    with patch("llamarl.jobs.memory_check.host_memory", return_value=room(16 * GIB)):
        assert check_memory(config) == []


def test_hosts_of_a_cluster_are_not_judged_by_this_machine() -> None:
    config = load_config(None, ["engine=monarch", "engine.hosts=[one:1]", "generator.slots=100000000"])
    assert check_memory(config) == []


def test_train_and_eval_refuse_before_anything_starts(tmp_path: Path) -> None:
    for command in (
        ["train", "generator.slots=100000000", "generator.device=cpu", "--run", tmp_path / "run"],
        ["eval", "tiny", "arithmetic", "--device", "cpu", "--samples", "10000000", "generator.slots=100000000"],
    ):
        code, out, err = llamarl(*command)
        assert (code, out) == (2, "")
        assert err.splitlines()[-1].startswith("llamarl: memory: this machine has ")
    assert not (tmp_path / "run").exists()


def test_a_tight_job_says_so_once_and_runs(tmp_path: Path) -> None:
    said: list[str] = []

    class Listening(Quiet):
        def note(self, text: str) -> None:
            said.append(text)

    settings = [*SHORT, "generator.slots=16", "evaluate.prompts=0", "generator.device=cpu", "trainer.device=cpu"]
    with patch("llamarl.jobs.memory_check.host_memory", return_value=room(16 * GIB, 1 << 20)):
        job = Job.load(None, settings)
    job.run(tmp_path / "run", display=Listening())
    assert len([text for text in said if text.startswith("memory is tight")]) == 1


@pytest.mark.parametrize(("device", "offload"), [("cpu", "true"), ("cuda", "true"), ("cuda", "false")])
def test_the_trainer_has_the_heads_of_teachers_that_send_their_states(device: str, offload: str) -> None:
    own = ["teacher.path=tiny", "teacher.place=own", f"teacher.offload={offload}", f"trainer.device={device}"]
    config = load_config(None, [*own, "generator.device=cpu", "teacher.device=cpu", "trainer.dtype=float32"])
    shape, place = read_shape(config.model_folder), "cuda:0" if device == "cuda" else HOST
    head = 4 * shape.vocab_size * shape.hidden_size
    with patch("torch.cuda.device_count", return_value=1):
        parts = list(job_parts(config))
    assert size(parts, "heads of the teachers", place) == head
    assert size(parts, "heads of the teachers in host memory") == (head if (device, offload) == ("cuda", "true") else 0)
    assert not size(list(job_parts(load_config(None, ["teacher.path=tiny"]))), "heads of the teachers")
