"""The notes of what write tasks staged: found by their run, and deleted like any blob that no version names (spec 6.7, 10.12)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from persist_engine.base.errors import CorruptData
from persist_engine.base.settings import BatchSettings, Settings
from persist_engine.client.write.notes import StagingNotes
from persist_engine.codec.keys import PartKey, blob_key, parse_blob_key, staging_note_key, staging_notes_prefix
from persist_engine.codec.staging_note import JOB_BYTES, StagingNote
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import PartId
from persist_engine.shard.machine import Machine
from persist_engine.work.audit.orphans import scan_orphans
from persist_engine.work.audit.references import looks_leaked
from persist_engine.work.audit.verify import verify_shard
from persist_kit.world import SCHEMA, World, row

DAY_MS = 86_400_000


class Site:
    """One shard with a row, and the notes of runs."""

    def __init__(self) -> None:
        self.world = World(settings=Settings(batch=BatchSettings(inline_part_bytes_max=0)))
        self.shard_id = self.world.shard_id()
        self.append(0)

    def append(self, time: int) -> None:
        with self.world.process().open_writer(self.shard_id, SCHEMA, purpose="test") as writer:
            writer.append([row(time, "a", time)], lower=Antichain(time), upper=Antichain(time + 1))

    def machine(self) -> Machine:
        return self.world.process().machine(self.shard_id)

    def notes(self, run: bytes = b"r-1", sink_id: str = "ns/s") -> StagingNotes:
        return StagingNotes(self.machine(), sink_id, run)

    def note(self, rows: int = 1, **more: Any) -> StagingNote:
        given: dict[str, Any] = {"sink_id": "ns/s", "run": b"r-1", **more}
        return StagingNote(
            shard_id=self.shard_id,
            job=b"a" * JOB_BYTES,
            batch=b"batch",
            rows=rows,
            errors=0,
            least_time=None,
            low=1,
            high=2,
            least=("1",),
            greatest=("2",),
            **given,
        )

    def keys(self) -> set[str]:
        return {info.key for info in self.world.blob.list_prefix(staging_notes_prefix(self.shard_id))}


@pytest.fixture
def site() -> Site:
    return Site()


def test_a_note_has_the_key_of_a_part_of_version_0() -> None:
    note_id = PartId.staged_at(1_700_000_000_123, b"0123456789")
    key = staging_note_key(note_id)
    assert key == f"n0000000/{note_id}"
    shard_id = World().shard_id()
    assert blob_key(shard_id, key).startswith(staging_notes_prefix(shard_id))
    assert parse_blob_key(blob_key(shard_id, key)) == PartKey(shard_id, (0, 0, 0), note_id, key)


def test_the_notes_of_a_run_are_found_in_the_order_of_their_storing_and_forgotten(site: Site) -> None:
    ours = [site.note(rows) for rows in (3, 1, 2)]
    for note in ours:
        site.notes().put(note)
        site.world.env.advance_ms(1)
    site.notes(run=b"r-2").put(site.note(run=b"r-2"))
    site.notes(sink_id="ns/t").put(site.note(sink_id="ns/t"))
    assert site.notes().read() == ours
    assert site.notes().forget() == 3
    assert site.notes().read() == []
    assert site.notes().forget() == 0
    assert [note.run for note in site.notes(run=b"r-2").read()] == [b"r-2"]
    assert len(site.keys()) == 2


def test_the_note_of_another_run_with_the_same_mark_is_left_out(site: Site) -> None:
    site.notes().put(site.note(run=b"other"))
    assert site.notes().read() == []


@pytest.mark.parametrize("name", ["notes.txt", "p1"])
def test_an_object_of_another_application_among_the_notes_is_left_alone(site: Site, name: str) -> None:
    site.notes().put(site.note())
    strange = staging_notes_prefix(site.shard_id) + name
    site.world.blob.set(strange, b"")
    assert site.notes().read() == [site.note()]
    assert site.notes().forget() == 1
    assert site.keys() == {strange}


def test_a_damaged_note_is_named_and_left_out(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    for rows in (1, 2):
        site.notes().put(site.note(rows))
        site.world.env.advance_ms(1)
    damaged, _ = sorted(site.keys())
    site.world.blob.set(damaged, site.world.blob.get(damaged)[:-1] + b"?")
    assert site.notes().read() == [site.note(2)]
    assert f"staging note is left out: {damaged}: the staging note does not match its checksum" in caplog.text
    assert CorruptData.__name__ not in caplog.text


def test_what_finds_and_deletes_parts_that_no_version_names_does_so_with_notes(site: Site) -> None:
    site.notes().put(site.note())
    (key,) = site.keys()
    assert verify_shard(site.machine()).findings == []
    # A part of code that cannot open the shard any more would look leaked.
    for version in ("0.1.0", "0.9.0"):
        assert not looks_leaked(parse_blob_key(key), replace(site.machine().state, applier_version=version))
    young = scan_orphans(site.machine(), older_than_ms=DAY_MS, commit=True)
    assert (young.young, young.deleted, site.keys()) == (1, 0, {key})
    site.world.env.advance_ms(2 * DAY_MS)
    site.append(1)
    old = scan_orphans(site.machine(), older_than_ms=DAY_MS, commit=True)
    assert ([orphan.key for orphan in old.orphans], old.deleted, site.keys()) == ([key], 1, set())
