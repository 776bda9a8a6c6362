"""Handles in a process that forks: neither side's end, nor its appends, are taken for those of the other. Each test forks in a process of
its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = """
import os, sys
from persist_engine import Appended, Location, PersistClient, Schema, ShardId

folder = sys.argv[1]
client = PersistClient.open(Location(blob=f"file://{folder}/blobs", consensus=f"sqlite://{folder}/log.db"))
shard, schema = ShardId.new(), Schema.from_ddl("id BIGINT", "")
writer = client.open_writer(shard, schema, purpose="test")

def append(upper):
    answer = writer.compare_and_append([(((upper,), ()), upper, 1)], expected_upper=upper, new_upper=upper + 1)
    assert isinstance(answer, Appended), answer

def in_a_child(do):
    child = os.fork()
    if not child:
        code = 1
        try:
            do()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
"""

#: The record that the parent's append left is what the parent finds after a lost answer. The child's end must not take it away, and its
#: appends must not replace it.
WRITERS = """
append(0)
mine = writer.writer_id

def in_child():
    append(1)
    assert writer.writer_id != mine
    assert {mine, writer.writer_id} == {one.id for one in client.inspect(shard).writers}
    writer.expire()

in_a_child(in_child)
assert writer.writer_id == mine
assert [one.id for one in client.inspect(shard).writers] == [mine]
in_a_child(writer.expire)
assert [one.id for one in client.inspect(shard).writers] == [mine]
append(2)
writer.expire()
assert client.inspect(shard).writers == ()
"""

READERS = """
append(0)
reader = client.open_leased_reader(shard, schema, purpose="test")
in_a_child(reader.expire)
assert [one.id for one in client.inspect(shard).readers] == [reader.reader_id]
assert reader.snapshot(0).to_table().num_rows == 1
reader.expire()
assert client.inspect(shard).readers == ()
"""


@pytest.mark.parametrize("program", [WRITERS, READERS], ids=["writers", "readers"])
def test_a_forked_process_ends_no_handle_of_its_parent(tmp_path: Path, program: str) -> None:
    words = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", BEGIN + program, str(tmp_path)]
    done = subprocess.run(words, check=False, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
