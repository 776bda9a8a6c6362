"""Output that another program reads, such as `head`: its end is the end of the command, as of kubectl, and no error."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
OF_A_SIGNAL = 128 + 13  # SIGPIPE, which ends kubectl


def ended(*arguments, stdout):
    command = [sys.executable, "-m", "persist_operator.kubectl.main", *arguments]
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "arguments", [["--version"], ["top", "-n", "team"], ["status", "flights", "-n", "team", "-o", "json"]]
)
def test_a_reader_that_leaves_is_no_error(team, kubeconfig, arguments):
    team()
    reads, writes = os.pipe()
    os.close(reads)
    try:
        assert ended(*arguments, stdout=writes) == (OF_A_SIGNAL, "")
    finally:
        os.close(writes)


@pytest.mark.parametrize("arguments", [["--help"], ["status", "flights", "-n", "team"]])
def test_an_output_that_takes_no_more_is_one_line(team, kubeconfig, arguments):
    team()
    with Path("/dev/full").open("w") as full:
        assert ended(*arguments, stdout=full) == (1, "error: No space left on device\n")
