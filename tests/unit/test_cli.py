"""Whatever a user gets wrong is told in one line on stderr, with exit code 2, before anything has started."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers.cli import llamarl

from llamarl import __version__
from llamarl.config import Config
from llamarl.config.file import load_config, parse_config
from llamarl.controller import ledger
from llamarl.io.record_log import SegmentWriter, segment_files
from llamarl.observe.run_folder import LEDGER

SHORT = [
    "engine=inline",
    "schedule.updates=1",
    "schedule.groups_per_update=2",
    "schedule.samples_per_group=2",
    "generator.slots=16",
    "evaluate.prompts=0",
    "trainer.warmup_updates=0",
]
TINY = Config().model_folder


def python(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def mistake(tmp_path: Path, *args: object) -> str:
    """The one line that `llamarl train` says before it has made a run folder."""
    run = tmp_path / "run"
    code, out, err = llamarl("train", *args, "--quiet", "--run", run)
    assert code == 2, err
    assert err.startswith("llamarl: ")
    assert err.count("\n") == 1 and err.endswith("\n"), err
    assert out == ""
    assert not run.exists(), "something had started"
    return err


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("trainer.lrr=0.1", "trainer.lrr: unknown key; did you mean 'trainer.lr'?"),
        ("trainer.lr=.nan", "trainer.lr: must be a finite number"),
        ("schedule.updates=ten", "schedule.updates: expected int, got str (given: 'ten')"),
        ("generator.slots=4", "generator.slots: 4 slots cannot hold one group"),
        ("generator.max_new_tokens=1000", "1032 tokens, but tiny has 256 positions"),
        ("generator.max_prompt_tokens=1000", "1008 tokens, but tiny has 256 positions"),
        ("generator.max_prompt_tokens=2", "have no tokens, or more than generator.max_prompt_tokens=2"),
        ("task.held_out=1e-9", "no problems are held out to evaluate on"),
        ("task.held_out=0.999999", "no problems are left to train on"),
        ("reward.scorer=nobody", "reward.scorer: unknown scorer 'nobody'; known: exact, numeric"),
        ("algo.loss=nobody", "algo.loss: unknown loss 'nobody'; known: aipo"),
        ("model.path=no/such/folder", "no folder no/such/folder"),
        ('model.path="a\\0b"', "no folder a\\x00b"),
    ],
)
def test_a_setting_that_cannot_work_is_told_in_one_line(tmp_path: Path, setting: str, message: str) -> None:
    assert message in mistake(tmp_path, setting)


def test_a_config_file_that_cannot_be_used_is_told_in_one_line(tmp_path: Path) -> None:
    assert "missing.yaml: no such file" in mistake(tmp_path, tmp_path / "missing.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("seed: 1\nmodel: [\n")
    assert "broken.yaml:3: " in mistake(tmp_path, broken)


def test_a_model_folder_that_lacks_a_file_is_told_in_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    assert f"{folder}: no config.json" in mistake(tmp_path, f"model.path={folder}")
    shutil.copy(TINY / "config.json", folder)
    assert f"{folder}: no weights" in mistake(tmp_path, f"model.path={folder}")
    shutil.copy(TINY / "model.safetensors", folder)
    assert f"{folder}: no tokenizer.json" in mistake(tmp_path, f"model.path={folder}")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "no file"),
        ("x = 1", "has no function 'score'"),
        ("score = 3", "has no function 'score'"),
        ("raise ValueError('two\\nlines')", "cannot be imported: ValueError: two lines"),
        ("import sys; sys.exit(0)", "cannot be imported: SystemExit"),
        ("def score(:", "cannot be imported: SyntaxError"),
        ("import nobody_wrote_this", "cannot be imported: ModuleNotFoundError"),
    ],
)
def test_a_plugin_that_cannot_be_loaded_is_told_in_one_line(tmp_path: Path, source: str | None, message: str) -> None:
    file = tmp_path / "plugin.py"
    if source is not None:
        file.write_text(source)
    for key in ("reward.scorer", "algo.loss"):
        told = mistake(tmp_path, f"{key}={file}:score")
        assert f"{key}: " in told
        assert message in told


@pytest.mark.parametrize("reference", ["plugin.txt:score", "plugin.py:", "nowhere:score"])
def test_a_plugin_that_names_no_python_file_is_told_in_one_line(tmp_path: Path, reference: str) -> None:
    assert "neither a known name nor FILE.py:FUNCTION" in mistake(tmp_path, f"reward.scorer='{reference}'")


def test_a_run_folder_that_holds_something_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "ledger").write_text("of another run")
    code, _, err = llamarl("train", *SHORT, "--quiet", "--run", tmp_path)
    assert code == 2
    assert err.startswith(f"llamarl: --run {tmp_path}: is not empty; name a new folder")
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["ledger"]
    assert (tmp_path / "ledger").read_text() == "of another run"


@pytest.mark.parametrize(
    ("below", "told"), [("file", "is a file; name a new folder"), ("file/run", "cannot be made: ")]
)
def test_a_run_folder_that_cannot_be_made_is_told_in_one_line(tmp_path: Path, below: str, told: str) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = llamarl("train", *SHORT, "--quiet", "--run", tmp_path / below)
    assert code == 2
    assert err.startswith(f"llamarl: --run {tmp_path / below}: {told}")
    assert err.count("\n") == 1


def test_the_installed_command_tells_a_mistake_without_a_traceback(tmp_path: Path) -> None:
    done = python("-m", "llamarl.cli", "train", "trainer.lr=fast", "--run", tmp_path / "run")
    assert done.returncode == 2
    assert done.stderr == "llamarl: command line: trainer.lr: expected float, got str (given: 'fast')\n"
    assert done.stdout == ""


def test_the_package_runs_as_a_program(tmp_path: Path) -> None:
    done = python("-m", "llamarl", "train", "trainer.lr=fast", "--run", tmp_path / "run")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("llamarl: command line: trainer.lr: ")
    assert python("-m", "llamarl", "-h").stdout.startswith("Usage: llamarl [OPTIONS] COMMAND")


def test_an_unknown_command_or_option_is_one_line_that_names_what_was_meant() -> None:
    for args, message in [
        (["trian"], "No such command 'trian'. Did you mean 'train'? See `llamarl --help`"),
        (["train", "--rum", "x"], "--run"),
        (["generate", "tiny"], "Missing option '--prompt'; see `llamarl generate --help`"),
        (["generate", "tiny", "--prompt", "x", "--samples", "0"], "Invalid value for '--samples'"),
        (["eval"], "Missing argument"),
        (["bench", "tarin"], "See `llamarl bench --help`"),
    ]:
        code, out, err = llamarl(*args)
        assert (code, out) == (2, ""), args
        assert err.startswith("llamarl: ") and err.count("\n") == 1, err
        assert message in err


def test_without_a_command_the_help_is_printed() -> None:
    assert llamarl() == llamarl("--help")
    assert llamarl().code == 0


@pytest.mark.parametrize("group", [[], ["bench"]])
def test_help_says_whole_sentences_at_80_columns(group: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = llamarl(*group, "-h")
    assert code == 0
    assert out == llamarl(*group, "--help").out
    assert "..." not in out.partition("Commands:")[2]
    assert max(map(len, out.splitlines())) <= 80
    for line in out.partition("Commands:\n")[2].partition("\n\n")[0].splitlines():  # the exit codes follow
        if line[2] != " ":  # a command, not the rest of a sentence
            help_of_one = llamarl(*group, line.split()[0], "-h").out
            assert max(map(len, help_of_one.splitlines())) <= 80
            assert "[[" not in help_of_one


@pytest.mark.parametrize(
    "args", [["--help"], ["train", "--help"], ["config"], ["audit", "nowhere"], ["train", "trainer.lr=fast"]]
)
def test_what_computes_nothing_does_not_import_torch(args: list[str]) -> None:
    code = (
        "import sys\n"
        f"sys.argv = ['llamarl', *{args!r}]\n"
        "from llamarl.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules)\n"
    )
    assert python("-c", code).stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("early", ["llamarl.cli", "llamarl.cli.train", "llamarl.engine.local.fork_server"])
def test_ctrl_c_says_so_in_one_line_while_imports_are_under_way(early: str) -> None:
    code = (
        "import sys\n"
        "from llamarl.__main__ import main\n"
        "class CtrlC:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {early!r}: raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, CtrlC())\n"
        "sys.argv = ['llamarl', 'train']\n"
        "main()\n"
    )
    done = python("-c", code)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "llamarl: interrupted")


def test_config_prints_the_defaults_as_yaml_to_start_from(tmp_path: Path) -> None:
    code, out, err = llamarl("config")
    assert (code, err) == (0, "")
    assert parse_config(yaml.safe_load(out)) == Config()
    path = tmp_path / "job.yaml"
    path.write_text(out)
    assert load_config(path) == Config()


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "short"
    code, out, err = llamarl("train", *SHORT, "--quiet", "--run", run)
    assert (code, out, err) == (0, "", ""), "--quiet prints nothing but errors"
    return run


@pytest.fixture
def run_copy(short_run: Path, tmp_path: Path) -> Path:
    """Its ledger only: the audit reads nothing else."""
    run = tmp_path / "copy"
    run.mkdir()
    shutil.copytree(short_run / LEDGER, run / LEDGER)
    return run


def test_audit_of_a_real_run_is_clean(run_copy: Path) -> None:
    code, out, err = llamarl("audit", run_copy)
    assert (code, err) == (0, "")
    assert "2 groups, 1 updates, 0 rewinds" in out
    assert "2 trained exactly once" in out
    assert out.splitlines()[-1] == "clean"


def drop_trained(records: list[ledger.Record]) -> list[ledger.Record]:
    return [record for record in records if not isinstance(record, ledger.Trained)]


def train_twice(records: list[ledger.Record]) -> list[ledger.Record]:
    return [record for record in records for _ in range(1 + isinstance(record, ledger.Trained))]


def never_issue(records: list[ledger.Record]) -> list[ledger.Record]:
    return [record for record in records if not (isinstance(record, ledger.Issued) and record.ordinal == 1)]


def never_close(records: list[ledger.Record]) -> list[ledger.Record]:
    return [record for record in records if not isinstance(record, ledger.Closed)]


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (drop_trained, "2 neither trained nor dropped: 0, 1"),
        (train_twice, "2 counted more than once: 0, 1"),
        (never_issue, "1 never issued: 1"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_audit_of_a_run_that_does_not_add_up_is_not_clean(run_copy: Path, tamper: object, message: str) -> None:
    assert callable(tamper)
    rewrite(run_copy, tamper(list(ledger.read_ledger(run_copy / LEDGER))))
    code, out, err = llamarl("audit", run_copy)
    assert (code, err) == (1, "")
    assert message in out
    assert out.splitlines()[-1] == "NOT clean"


def rewrite(run: Path, records: list[ledger.Record]) -> None:
    shutil.rmtree(run / LEDGER)
    writer = SegmentWriter(run / LEDGER)
    for record in records:
        writer.append(ledger.encode_record(record))
    writer.close()


@pytest.mark.parametrize(
    ("closed", "message"),
    [
        ([], "not closed: the job is running, or was killed"),
        ([ledger.Closed("stopped on request after update 1")], "closed: stopped on request after update 1"),
        ([ledger.Closed("stopped: trainer/0 died")], "closed: stopped: trainer/0 died"),
    ],
)
def test_audit_of_a_run_that_was_stopped_says_how_to_go_on(
    run_copy: Path, closed: list[ledger.Record], message: str
) -> None:
    records = never_close(drop_trained(list(ledger.read_ledger(run_copy / LEDGER))))
    rewrite(run_copy, [*records, *closed])
    code, out, err = llamarl("audit", run_copy)
    assert (code, err) == (4, "")
    assert message in out
    assert "2 not trained yet: 0, 1" in out
    assert out.splitlines()[-1].endswith(f"unfinished; go on with: llamarl train --run {run_copy} --resume")


def test_audit_of_a_stopped_run_that_does_not_add_up_is_still_not_clean(run_copy: Path) -> None:
    rewrite(run_copy, never_close(train_twice(list(ledger.read_ledger(run_copy / LEDGER)))))
    code, out, _ = llamarl("audit", run_copy)
    assert code == 1
    assert out.splitlines()[-1] == "NOT clean"


def test_audit_of_what_cannot_be_read_exits_with_2(run_copy: Path, tmp_path: Path) -> None:
    (segment,) = segment_files(run_copy / LEDGER)
    data = bytearray(segment.read_bytes())
    data[20] ^= 1
    segment.write_bytes(data)
    for run, message in [
        (tmp_path / "nowhere", "no such run folder"),
        (tmp_path, "no ledger there"),
        (run_copy, "damaged at byte 0"),
    ]:
        code, out, err = llamarl("audit", run)
        assert (code, out) == (2, "")
        assert message in err
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["train", "trainer.lr", "1e-4"], "command line: trainer.lr: a setting is written with its value"),
        (["train", "--trainer.lr=1e-4"], "settings are written without dashes, such as trainer.lr=..."),
        (["train", "--lr", "1e-4"], "settings are written without dashes, such as trainer.lr=..."),
        (["train", "--learning-rate", "1e-4"], "settings are written without dashes, such as trainer.lr=..."),
        (["train", "trainer.lr="], "trainer.lr: expected float, got null\n"),
        (["train", "generator.device=gpu"], "generator.device: expected auto, cpu, cuda or cuda:N (given: 'gpu')"),
        (["train", "."], ".: cannot be read: Is a directory"),
        (
            ["train", "task.path=mine.jsonl"],
            "task.path: arithmetic makes its own problems; to read data, set the kind",
        ),
        (["train", "model=tiny"], "model: is a section with keys of its own, got 'tiny'; write model.path and so on"),
        (["train", "generator.kv_pages=1"], "generator.kv_pages: 1 pages of 16 tokens cannot hold one sequence"),
        (
            ["train", "engine=monarch", "engine.hosts=[a]"],
            "engine.hosts[0]: expected monarch: HOST:PORT of each worker",
        ),
        (["eval", "tiny", "arithmetic", "--device", "gpu"], "--device gpu: expected auto, cpu, cuda or cuda:N"),
        (["eval", "tiny", "arithmetic", "--answers", "/nowhere/x"], "--answers /nowhere/x: cannot be made"),
        (["eval", "tiny", "arithmetic", "generator.max_new_tokens=999"], "has 256 positions"),
        (["generate", "tiny", "--prompt", ""], "--prompt: is empty"),
        (["generate", "tiny", "--prompt", "hi", "--max-new-tokens", "999"], "exceed the model's 256 positions"),
        (["generate", "tiny", "--prompt", "hi", "--chat"], "no chat template"),
        (
            ["plan", "--model", "llama-3.1-8b", "--gpus", "8", "--precision", "fp4"],
            "--precision fp4: h100 has fp32, bf16",
        ),
        (["plan", "--model", "llama-9", "--gpus", "8"], "no model shape is named 'llama-9'"),
        (["audit", "."], ".: holds no run: no ledger there"),
    ],
)
def test_a_plausible_mistake_is_one_line(args: list[str], message: str) -> None:
    code, out, err = llamarl(*args)
    assert (code, out) == (2, "")
    assert err.startswith("llamarl: ") and err.count("\n") == 1, err
    assert message in err


def test_the_version_is_printed() -> None:
    assert llamarl("--version") == (0, f"llamarl {__version__}\n", "")
