"""Resources as files: the outcomes of apply, the fields it keeps, and concurrent writers that lose no change."""

import json
import os
import threading
from pathlib import Path

import pytest
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import CorruptData
from persist_operator.local.objects import Objects


@pytest.fixture
def objects(tmp_path):
    return Objects(tmp_path, SystemEnv())


def document(spec, **metadata):
    return {"kind": "PersistShard", "metadata": {"name": "a", **metadata}, "spec": spec}


def test_the_first_apply_creates(objects):
    made, outcome = objects.apply(document({"x": 1}))
    assert outcome == "created"
    assert made["metadata"]["generation"] == 1
    assert len(made["metadata"]["uid"]) == 36
    assert objects.get("PersistShard", "a") == made
    assert list(objects.every("PersistShard")) == [made]


@pytest.mark.parametrize("name", ["a" * 300, "../a", "a\x1b[31m", "a\0b", ""], ids=range(5))
def test_a_name_that_no_resource_has_leads_to_none(objects, name):
    assert objects.get("PersistShard", name) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"kind": "PersistShard"}', "null"])
def test_regression_a_file_that_holds_no_resource_is_named(objects, tmp_path, text):
    objects.apply(document({"x": 1}))
    path = tmp_path / "objects" / "PersistShard" / "a.json"
    path.write_text(text)
    for look in (lambda: objects.get("PersistShard", "a"), lambda: list(objects.every("PersistShard"))):
        with pytest.raises(CorruptData, match="a.json holds no resource: .*; remove the file"):
            look()


def test_applying_the_same_changes_nothing(objects):
    made, _ = objects.apply(document({"x": 1}))
    assert objects.apply(document({"x": 1})) == (made, "unchanged")


def test_another_spec_is_another_generation_of_the_same_resource(objects):
    made, _ = objects.apply(document({"x": 1}))
    objects.set_status("PersistShard", "a", {"shardId": "s1"})
    again, outcome = objects.apply(document({"x": 2}))
    assert outcome == "configured"
    assert again["metadata"] == made["metadata"] | {"generation": 2}
    assert again["status"] == {"shardId": "s1"}


def test_annotations_are_added_and_make_no_generation(objects):
    objects.apply(document({"x": 1}, annotations={"one": "1"}))
    assert objects.annotate("PersistShard", "a", "two", "2")
    again, outcome = objects.apply(document({"x": 1}, annotations={"one": "changed"}))
    assert outcome == "configured"
    assert again["metadata"]["generation"] == 1
    assert again["metadata"]["annotations"] == {"one": "changed", "two": "2"}


def test_an_absent_document_is_none_and_cannot_change(objects):
    assert objects.get("PersistShard", "a") is None
    assert not objects.annotate("PersistShard", "a", "two", "2")
    objects.set_status("PersistShard", "a", {"x": 1})
    assert list(objects.every("PersistShard")) == []


def test_a_resource_that_is_removed_during_a_look_is_left_out(objects):
    """`get`, and the page of `ui`, failed beside a `delete`."""
    for name in ("a", "b", "c"):
        objects.apply(document({}, name=name))
    found = objects.every("PersistShard")
    first = next(found)
    objects.remove("PersistShard", "b")
    assert [one["metadata"]["name"] for one in (first, *found)] == ["a", "c"]


def test_a_folder_that_cannot_be_read_is_no_empty_folder(objects, tmp_path):
    """`get` then showed no sinks, and no error."""
    (tmp_path / "objects").mkdir()
    folder = tmp_path / "objects" / "SparkSink"
    folder.symlink_to(folder)  # even root cannot read it
    with pytest.raises(OSError, match="objects/SparkSink"):
        list(objects.every("SparkSink"))
    assert list(objects.every("PersistShard")) == []


def test_a_write_that_was_killed_half_way_is_invisible(objects, tmp_path):
    made, _ = objects.apply(document({"x": 1}))
    (tmp_path / "objects" / "PersistShard" / "a.tmp").write_text('{"half')
    assert objects.get("PersistShard", "a") == made
    assert list(objects.every("PersistShard")) == [made]


def test_status_and_annotations_written_at_once_are_both_kept(tmp_path):
    Objects(tmp_path, SystemEnv()).apply(document({}))
    barrier = threading.Barrier(2)

    def annotate():
        mine = Objects(tmp_path, SystemEnv())
        barrier.wait()
        for number in range(200):
            mine.annotate("PersistShard", "a", f"n{number}", "")

    def report():
        mine = Objects(tmp_path, SystemEnv())
        barrier.wait()
        for number in range(200):
            mine.set_status("PersistShard", "a", {"count": number})

    threads = [threading.Thread(target=one) for one in (annotate, report)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = json.loads((tmp_path / "objects" / "PersistShard" / "a.json").read_text())
    assert len(found["metadata"]["annotations"]) == 200
    assert found["status"] == {"count": 199}


def test_what_was_written_survives_a_power_loss(objects, tmp_path, monkeypatch):
    """The intent of an action, and the id of a shard, must be there after it: a file that was renamed and not synced is empty then."""
    synced, real = [], os.fsync

    def fsync(handle):
        path = Path(f"/proc/self/fd/{handle}").readlink()
        synced.append((path.relative_to(tmp_path).as_posix(), len(list(path.glob("*.json")))))
        real(handle)

    objects.apply(document({}))
    monkeypatch.setattr(os, "fsync", fsync)
    objects.apply(document({}, name="other"))
    objects.set_status("PersistShard", "other", {"shardId": "s"})
    objects.remove("PersistShard", "other")
    folder = "objects/PersistShard"
    assert synced == [
        *((f"{folder}/other.tmp", 0), (folder, 2)),
        *((f"{folder}/other.tmp", 0), (folder, 2)),
        (folder, 1),
    ]
