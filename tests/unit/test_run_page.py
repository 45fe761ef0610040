"""The runner of pages fails where a page is wrong, and names the line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_page(tmp_path: Path, text: str, *options: str) -> tuple[int, str, str]:
    (page := tmp_path / "page.md").write_text(text)
    command = [sys.executable, str(ROOT / "scripts/docs/run_page.py"), str(page), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


GOOD = """# A page

```python title="tools/double.py"
def double(number):
    return 2 * number
```

```bash
cp tools/double.py .
ls examples/arithmetic.yaml
```

```output
examples/arithmetic.yaml
```

```python
from double import double

print("first")
print("reward 0.5 -> 0.75 in 3 min 02 s")
print(double(21))
```

```output
...
reward   0.1 -> 0.9 in 45 s
40
```
<!-- check: n[0] < n[1] and n[2] == 42 -->

```console
$ echo one; echo two
one
...
```

```text
only shown
```
"""


def test_blocks_run_in_order_in_one_folder(tmp_path: Path) -> None:
    code, out, err = run_page(tmp_path, GOOD)
    assert (code, err) == (0, "")
    assert "4 blocks ran" in out and "0 were skipped" in out


@pytest.mark.parametrize(
    ("old", "new", "line", "reason"),
    [
        ("examples/arithmetic.yaml\n```\n\n```python", "examples/other.yaml\n```\n\n```python", 14, "was not printed"),
        ("reward   0.1", "rewards   0.1", 27, "was not printed"),
        ("n[2] == 42", "n[2] == 43", 30, "does not hold: n[0] < n[1] and n[2] == 43"),
        ("from double", "from triple", 17, "exit code 1, expected 0"),
        ("one\n...", "two\none", 35, "was not printed"),
        ('```python title="tools/double.py"', "```yaml", 3, 'a block of yaml needs title="FILE"'),
        ('title="tools/double.py"', 'title="../double.py"', 3, "leads out of the folder"),
        ("```text\nonly shown\n```", "```text\nonly shown", 38, "never closed"),
        ("```text", "<!-- run: tpu -->\n```text", 38, "unknown mark 'tpu'"),
        ("```text", "<!-- run: gpu -->\nwords\n```text", 39, "in the line above a block"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(tmp_path: Path, old: str, new: str, line: int, reason: str) -> None:
    assert old in GOOD
    code, _, err = run_page(tmp_path, GOOD.replace(old, new))
    assert code == 1
    assert f"page.md:{line}: " in err and reason in err


def test_blocks_for_a_gpu_are_skipped_and_counted(tmp_path: Path) -> None:
    text = "<!-- run: gpu -->\n```bash\necho gpu\n```\n\n```output\ngpu\n```\n\n"
    text += "<!-- run: no, needs the hub -->\n```bash\nfalse\n```\n"
    assert "0 blocks ran" in (found := run_page(tmp_path, text)[1]) and "2 were skipped" in found
    assert "1 blocks ran" in (found := run_page(tmp_path, text, "--gpu")[1]) and "1 were skipped" in found


def test_a_page_reads_the_data_that_is_named_and_makes_its_own_beside_it(tmp_path: Path) -> None:
    (given := tmp_path / "given" / "gsm8k").mkdir(parents=True)
    (given / "train.jsonl").write_text("a row\n")
    text = "```bash\nmkdir data/own\ncat data/gsm8k/train.jsonl\n```\n\n```output\na row\n```\n"
    assert run_page(tmp_path, text)[0] == 1
    assert run_page(tmp_path, text, "--data", str(given.parent))[0] == 0
    assert [one.name for one in given.parent.iterdir()] == ["gsm8k"]


def test_an_expected_exit_code_must_come(tmp_path: Path) -> None:
    text = "<!-- run: exit 2 -->\n```bash\nexit {code}\n```\n"
    assert run_page(tmp_path, text.format(code=2))[0] == 0
    assert "exit code 0, expected 2" in run_page(tmp_path, text.format(code=0))[2]


def test_what_a_page_leaves_running_ends_with_it(tmp_path: Path) -> None:
    text = "```bash\nsleep 600 &\necho $!\n```\n\n```output\n1\n```\n<!-- check: open('pid', 'w').write(str(int(n[0]))) -->\n"
    (page := tmp_path / "page.md").write_text(text)
    command = [sys.executable, str(ROOT / "scripts/docs/run_page.py"), str(page)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    stat = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    assert not stat.exists() or stat.read_text().rpartition(") ")[2].startswith("Z"), "it still runs"
