"""Every command of the tutorial's part on a laptop runs, in order, in a fresh folder. tests/e2e/test_flights.py runs those of the part on a cluster."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TUTORIAL = (Path(__file__).resolve().parents[1] / "docs" / "tutorial.md").read_text()
LAPTOP, _, CLUSTER = TUTORIAL.partition("## On a laptop")[2].partition("## On a cluster")


def blocks(language: str) -> str:
    return "\n".join(re.findall(rf"^```{language}\n(.*?)^```$", LAPTOP, re.DOTALL | re.MULTILINE))


def run(script: str, folder: Path, timeout_s: int) -> str:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PERSIST_")}
    command = ["bash", "-euo", "pipefail", "-c", script]
    ended = subprocess.run(
        command, cwd=folder, env={**kept, "PATH": path}, check=False, capture_output=True, text=True, timeout=timeout_s
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_each_block_is_run_by_a_test():
    assert set(re.findall(r"^```(.+)$", LAPTOP, re.MULTILINE)) == {"sh", "sh spark"}
    assert set(re.findall(r"^```(.+)$", CLUSTER, re.MULTILINE)) == {"sh cluster"}


@pytest.mark.slow
def test_writing_reading_and_looking(tmp_path):
    out = run(blocks("sh"), tmp_path, 240)
    assert "id\tname\tprice\n1\tapple\t120\n2\tpear\t150\n3\tplum\t90\n" in out
    assert '{"id": 3, "name": "plum", "price": 90}' in out
    then = out.partition("0   1  apple    110\n1   3   plum     90\n")[2]
    assert "  update  id=1  price: 120 -> 110\n" in then
    assert '  delete  id=2  name="pear"  price=150\n' in then
    assert then.count("id\tname\tprice\n1\tapple\t120\n2\tpear\t150\n3\tplum\t90\nname\tid\n") == 1, (
        "the past, then the list"
    )
    assert "retention" in then


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(900)
def test_the_resources_of_the_tutorial_run(tmp_path):
    out = run(f"exec 2>&1\n{blocks('sh spark')}", tmp_path, 850)
    first, second = out.split("RunSucceeded")[1:]
    assert "3 rows read, 3 updates written" in first
    assert "3 rows read, 2 updates written" in second
    assert second.endswith("AA\tAmerican Airlines\nDL\tDelta\nUA\tUnited Air Lines\n")
