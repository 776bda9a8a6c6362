"""The programs of the README and of the page on handles run as they stand, in a fresh folder, and what they say of themselves is so."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README, HANDLES = (ROOT / page for page in ("README.md", "docs/howto/write-from-python.md"))


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=240)


def program(folder: Path, page: Path = HANDLES) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert "/tmp/shop" in code
    return code.replace("/tmp/shop", f"{folder}/shop")


@pytest.mark.slow
def test_the_tables_of_the_readme_are_as_its_comments_say(tmp_path):
    ended = run(program(tmp_path, README))
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = ended.stdout.splitlines()
    assert [line.split() for line in lines[:2]] == [["id", "price"], ["0", "2", "10.00"]]
    assert [line.split()[1:] for line in lines[3:5]] == [["1", "ada", "1.50"], ["2", "lin", "12.00"]]
    assert sorted(line.split(" ", 1)[0] for line in lines[5:]) == ["delete", "insert", "update"]


@pytest.mark.slow
def test_the_program_prints_what_its_comments_say(tmp_path):
    ended = run(program(tmp_path))
    assert (ended.returncode, ended.stderr) == (0, "")
    first, lin, changes = ended.stdout.split("pyarrow.Table")[1:]
    assert "ada" in first
    assert "lin" not in first
    assert "grace" not in lin
    for name in ("ada", "grace", "lin"):
        assert name in changes


@pytest.mark.slow
def test_the_program_does_not_pass_over_an_append_that_was_refused(tmp_path):
    code = program(tmp_path)
    appended = next(line for line in code.splitlines() if "compare_and_append(" in line)
    beforehand = "    writer.compare_and_append([], expected_upper=0, new_upper=7)"
    ended = run(code.replace(appended, f"{beforehand}\n{appended}"))
    assert ended.returncode == 1
    assert "nothing was appended, the upper of the shard is {7}, not {0}" in ended.stderr


@pytest.mark.slow
def test_times_are_kept_by_the_hold_of_the_program(tmp_path):
    """Nothing that it opens lets go of 9 while the critical reader stands."""
    check = "open_upsert(client, shard, schema, purpose='later').hydrate()\nprint(client.inspect(shard).since)\n"
    ended = run(program(tmp_path) + check)
    assert ended.stdout.splitlines()[-1] == "0"
