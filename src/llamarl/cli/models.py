"""`llamarl generate`, `eval`, `merge` and `import-gguf`: commands for a model folder besides training."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from llamarl.cli.devices import DeviceOption, device_or_refuse, say_device
from llamarl.cli.help_format import OVERRIDES
from llamarl.config import Config, model_folder
from llamarl.config.file import load_config
from llamarl.errors import ArgumentError, InputError
from llamarl.hub.models import fetch_model
from llamarl.hub.resolve import with_hub_files

if TYPE_CHECKING:
    from llamarl.tasks.task import Prompter
    from llamarl.types import Problem

_SECONDS_BETWEEN_LINES = 5.0


MODEL_HELP = "a model or PEFT folder, or a name on the hub: ORG/NAME or ORG/NAME@REVISION; 'tiny' is the shipped model"


class Dtype(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Split(StrEnum):
    auto = "auto"
    held_out = "held_out"
    test = "test"


class StoredDtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def generate_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    prompt: Annotated[str, typer.Option(help="what to complete")],
    chat: Annotated[bool, typer.Option("--chat", help="treat the prompt as a user's message")] = False,
    samples: Annotated[int, typer.Option(min=1, help="how many completions")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="longest completion")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="only the k likeliest tokens; 0: all")] = 0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="only the likeliest that make up this share")] = 1.0,
    min_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="none below this share of the likeliest")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="seed of the sampling")] = 0,
    dtype: Annotated[Dtype, typer.Option(help="of weights and cache; auto: as in eval and train")] = Dtype.auto,
    device: DeviceOption = "auto",
) -> None:
    """Sample from a model folder."""
    from llamarl.generate.llm import LLM
    from llamarl.types import Sampling

    folder = model_folder(fetch_model(model, "MODEL"))
    _say_ignored_keys(folder)
    llm = LLM(folder, device=device_or_refuse(device), dtype=dtype.value, slots=samples)
    sampling = Sampling(
        samples=samples,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
    )
    try:
        asked = llm.encode([[{"role": "user", "content": prompt}] if chat else prompt], sampling)
    except ArgumentError as error:
        raise InputError(f"{_option_of(error.argument)}: {error.reason}") from None
    say_device(llm.device, llm.precision)
    if piece := llm.tokenizer.unreadable(prompt):
        print(f"NOTE: the model's tokenizer has no token for {piece!a}", file=sys.stderr)
    for number, completion in enumerate(llm.generate(asked, sampling, seed=seed)[0], start=1):
        if samples > 1:
            print(f"--- {number} of {samples}")
        print(completion.text)


def _option_of(argument: str) -> str:
    """The option of `generate` that gives this argument of `LLM`."""
    return "--prompt" if argument.startswith("prompts") else f"--{argument.removeprefix('sampling.').replace('_', '-')}"


def import_gguf_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a .gguf file (llama or qwen2 architecture)")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="the model folder to make")],
    dtype: Annotated[StoredDtype, typer.Option(help="of the weights written")] = StoredDtype.bfloat16,
) -> None:
    """Turn a GGUF file into a Hugging Face folder with tokenizer and chat template."""
    from llamarl.model.gguf_import import import_gguf

    import_gguf(file, folder, dtype=dtype.value)
    print(f"written to {folder}")


def merge_command(
    source: Annotated[
        Path, typer.Argument(metavar="RUN_OR_ADAPTER", help="a run folder (its newest snapshot), or a PEFT folder")
    ],
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="the model folder to make")],
    dtype: Annotated[
        StoredDtype | None, typer.Option(help="of the weights written; default: as in the base's folder")
    ] = None,
) -> None:
    """Merge LoRA adapters into their base model: a whole Hugging Face folder."""
    from llamarl.model.adapter_folder import merge

    merge(source, folder, dtype=None if dtype is None else dtype.value)
    print(f"written to {folder}")


def eval_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    task: Annotated[
        str, typer.Argument(metavar="TASK", help="arithmetic, gsm8k, math, svamp, dataset, code, or a YAML file")
    ],
    overrides: Annotated[list[str] | None, OVERRIDES] = None,
    samples: Annotated[int, typer.Option(min=1, help="answers to each problem; more than 1 gives pass@k")] = 1,
    problems: Annotated[int, typer.Option(min=0, help="how many problems; 0: all")] = 0,
    split: Annotated[Split, typer.Option(help="test: the fixed test problems where there are any")] = Split.auto,
    temperature: Annotated[
        float, typer.Option(min=-1.0, help="default: 0 for one answer, else generator.temperature")
    ] = -1.0,
    device: DeviceOption = "auto",
    answers: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write every answer and its reward here, as JSON lines")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the figures as JSON")] = False,
) -> None:
    """Measure how well a model answers a task: accuracy and pass@k, with intervals."""
    from llamarl.tasks.registry import open_task

    # Nothing is trained, so few slots must not be refused for the size of a training group.
    config = task_config(task, [*(overrides or []), f"model.path={json.dumps(model)}", "schedule.samples_per_group=2"])
    config = with_hub_files(config)
    _say_ignored_keys(config.model_folder)
    opened = open_task(config)
    for note in getattr(opened, "notes", ()):
        print(note, file=sys.stderr, flush=True)
    chosen = choose_problems(opened, split, problems)
    settled = device_or_refuse(device)

    from llamarl.generate.evaluate import describe_evaluation, evaluate
    from llamarl.jobs.memory_check import check_evaluation_memory

    for note in check_evaluation_memory(config, settled, max(1, len(chosen)) * samples):
        print(note, file=sys.stderr, flush=True)
    if temperature < 0:
        temperature = 0.0 if samples == 1 else config.generator.temperature
    with _answer_file(answers) as tell:
        found = evaluate(
            config,
            chosen,
            samples=samples,
            temperature=temperature,
            device=settled,
            progress=_progress_on_stderr(),
            tell=tell,
            starting=lambda llm: say_device(llm.device, llm.precision),
        )
    if as_json:
        print(msgspec.json.encode({"score_name": config.score_name, **msgspec.to_builtins(found)}).decode())
    else:
        print(describe_evaluation(found, config.score_name))


@contextmanager
def _answer_file(path: Path | None) -> Iterator[Callable[[msgspec.Struct], None]]:
    """Gives a function that appends a line to a new file; without a path it does nothing."""
    if path is None:
        yield lambda answer: None
        return
    try:
        file = path.open("xb")
    except OSError as error:
        raise InputError(f"--answers {path}: cannot be made: {error.strerror}") from None

    def append(answer: msgspec.Struct) -> None:
        file.write(msgspec.json.encode(answer) + b"\n")

    with file:
        yield append


def choose_problems(task: Prompter, split: Split, count: int) -> Sequence[Problem]:
    """At most `count` problems (0: all). `auto` takes the fixed test problems if there are any, else the held-out ones."""
    wanted = count or sys.maxsize
    if split is not Split.auto:
        return task.evaluation(wanted, split.value)
    try:
        return task.evaluation(wanted, Split.test.value)
    except InputError:
        return task.evaluation(wanted)


def _progress_on_stderr() -> Callable[[int, int], None]:
    """Prints a line to stderr every few seconds."""
    last_s = time.monotonic()

    def show(done: int, of: int) -> None:
        nonlocal last_s
        if time.monotonic() - last_s > _SECONDS_BETWEEN_LINES:
            last_s = time.monotonic()
            print(f"{done} of {of} answers judged", file=sys.stderr, flush=True)

    return show


def task_config(task: str, overrides: list[str]) -> Config:
    """The config of a TASK argument: the name of a task kind, with default settings, or a YAML file."""
    if task.endswith((".yaml", ".yml")):
        return load_config(Path(task), overrides)
    return load_config(None, [f"task.kind={task}", *overrides])


def _say_ignored_keys(folder: Path) -> None:
    from llamarl.model.adapter_folder import base_or_same
    from llamarl.model.hf_config import describe_ignored_keys, read_shape

    base = base_or_same(folder)
    read_shape(base)
    if said := describe_ignored_keys(base):
        print(said, file=sys.stderr, flush=True)
