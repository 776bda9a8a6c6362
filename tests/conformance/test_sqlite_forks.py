"""A process that forks with a log in SQLite open: no commit of either side is lost. Each test forks in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from persist_engine.base.versioned import SCAN_ALL, SeqNo
from persist_engine.storage.consensus_sqlite import SqliteConsensus

#: The parent closes its log while the child has yet to commit. With its last connection, SQLite deletes the write-ahead log.
PARENT_ENDS_FIRST = """
import os, sys
from pathlib import Path
from persist_engine.base.versioned import CasResult
from persist_engine.storage.consensus_sqlite import SqliteConsensus
from persist_engine.testing.conformance import entry, fill

path, opens_anew = Path(sys.argv[1]), sys.argv[2] == "opened anew"
consensus = SqliteConsensus(path)
fill(consensus, "s1", 1, 2)
reading, writing = os.pipe()
child = os.fork()
if not child:
    code = 1
    try:
        mine = SqliteConsensus(path) if opens_anew else consensus
        assert mine.compare_and_set("s1", entry(2).tip, entry(3)) is CasResult.COMMITTED
        os.close(writing)
        os.read(reading, 1)  # until the parent has closed
        assert mine.compare_and_set("s1", entry(3).tip, entry(4)) is CasResult.COMMITTED
        code = 0
    finally:
        os._exit(code)
while consensus.head("s1") != entry(3):
    pass
consensus.close()
os.close(writing)
assert os.waitpid(child, 0)[1] == 0
"""

#: Forks while threads commit to two logs, and lets each child commit too.
FORKS_AMID_COMMITS = """
import os, sys, threading
from pathlib import Path
from persist_engine.base.versioned import CasResult, SeqNo, VersionedData
from persist_engine.storage.consensus_sqlite import SqliteConsensus

folder = Path(sys.argv[1])
logs = [SqliteConsensus(folder / name) for name in ("one.db", "two.db")]
done = threading.Event()

def commit(log):
    while True:
        head = log.head("s1")
        new = VersionedData(SeqNo(1 if head is None else head.seqno + 1), os.urandom(8))
        if log.compare_and_set("s1", None if head is None else head.tip, new) is CasResult.COMMITTED:
            return

def work(log):
    while not done.is_set():
        commit(log)

threads = [threading.Thread(target=work, args=(log,)) for log in logs for _ in range(2)]
for thread in threads:
    thread.start()
for _ in range(5):
    child = os.fork()
    if not child:
        code = 1
        try:
            for log in logs:
                commit(log)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
done.set()
for thread in threads:
    thread.join()
for log in logs:
    print(int(log.head("s1").seqno))
    log.close()
"""


def python(program: str, *args: object) -> str:
    words = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program, *map(str, args)]
    return subprocess.run(words, check=True, timeout=120, stdout=subprocess.PIPE, text=True).stdout


@pytest.mark.parametrize("opened", ["copied", "opened anew"])
def test_regression_a_commit_of_a_forked_process_outlives_the_parents_log(tmp_path: Path, opened: str) -> None:
    """It was acknowledged, the child read it back, and it was gone: it stood in the log that the parent had deleted."""
    path = tmp_path / "log.db"
    python(PARENT_ENDS_FIRST, path, opened)
    consensus = SqliteConsensus(path)
    assert [int(each.seqno) for each in consensus.scan("s1", SeqNo(0), SCAN_ALL)] == [1, 2, 3, 4]
    consensus.close()


@pytest.mark.slow
def test_a_fork_amid_commits_of_other_threads_loses_none_and_ends(tmp_path: Path) -> None:
    heads = python(FORKS_AMID_COMMITS, tmp_path).split()
    for name, head in zip(("one.db", "two.db"), heads, strict=True):
        consensus = SqliteConsensus(tmp_path / name)
        assert [int(each.seqno) for each in consensus.scan("s1", SeqNo(0), SCAN_ALL)] == list(range(1, int(head) + 1))
        consensus.close()
