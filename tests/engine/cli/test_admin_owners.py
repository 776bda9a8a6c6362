"""`persist admin owner|names`, the owner in `inspect`, and the release of a critical hold that is no longer needed."""

import json

import pytest
from persist_engine.base.errors import Fenced
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import CriticalReaderId, ShardId
from persist_engine.model.ownership import Owner
from persist_kit.disk import Disk, write
from persist_kit.world import SCHEMA

FLIGHTS, OTHER = Owner("persist-operator/main", "team", "flights"), Owner("other", "team", "flights")
FIELDS = {"operator_id": "persist-operator/main", "namespace": "team", "name": "flights"}


@pytest.fixture
def disk(tmp_path):
    made = Disk(tmp_path)
    made.shard_id = ShardId.new()
    with made.client() as client:
        client.adopt(FLIGHTS, None, made.shard_id)
        write(client, made.shard_id, range(3))
        made.store_id = client.store_id
    return made


@pytest.fixture
def admin(persist, disk):
    def run(*args):
        return persist("admin", *args, *disk.args)

    return run


def ok(result):
    code, out, err = result
    assert code == 0, (out, err)
    return json.loads(out)


def owner_of(disk):
    with disk.client() as client:
        return client.owner_of(disk.shard_id)


@pytest.mark.slow
def test_every_report_shows_the_owner(admin, persist, disk):
    shown = ok(admin("owner", disk.shard_id, "--json"))
    assert shown == {"shard_id": disk.shard_id, "store_id": disk.store_id, "owner": FIELDS}
    _, out, _ = admin("owner", disk.shard_id)
    assert "persist-operator%2Fmain/team/flights" in out
    seen = ok(persist("inspect", "shard", disk.shard_id, *disk.args, "--json"))
    assert (seen["store_id"], seen["owner"]) == (disk.store_id, FIELDS)
    _, out, _ = persist("inspect", "shard", disk.shard_id, *disk.args)
    assert disk.store_id in out
    assert "persist-operator%2Fmain/team/flights" in out
    assert ok(admin("names", "--json")) == [{**FIELDS, "shard_id": disk.shard_id, "owner": FIELDS}]
    _, out, _ = admin("names")
    assert out.splitlines()[1].split("\t") == [*FIELDS.values(), disk.shard_id, "itself"]


@pytest.mark.slow
def test_a_shard_is_released_only_with_commit(admin, disk):
    report = ok(admin("owner", disk.shard_id, "--release", "--json"))
    assert (report["owner"], report["new_owner"], report["committed"]) == (FIELDS, None, False)
    assert owner_of(disk) == FLIGHTS
    _, _, err = admin("owner", disk.shard_id, "--release")
    assert "nothing was changed" in err
    assert ok(admin("owner", disk.shard_id, "--release", "--commit", "--json"))["committed"] is True
    assert owner_of(disk) is None
    assert ok(admin("names", "--json")) == []


@pytest.mark.slow
def test_a_shard_is_taken_over_only_with_commit(admin, disk):
    report = ok(admin("owner", disk.shard_id, "--take-over", str(OTHER), "--json"))
    assert (report["committed"], report["new_owner"]["operator_id"]) == (False, "other")
    assert owner_of(disk) == FLIGHTS
    ok(admin("owner", disk.shard_id, "--take-over", str(OTHER), "--commit", "--json"))
    assert owner_of(disk) == OTHER
    rows = {row["operator_id"]: row["owner"]["operator_id"] for row in ok(admin("names", "--json"))}
    assert rows == {"other": "other", "persist-operator/main": "other"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--take-over", "a/b"], "OPERATOR/NAMESPACE/NAME"),
        (["--take-over", "a/b/c", "--release"], "exclude each other"),
    ],
)
def test_contradictory_owner_options_are_refused(admin, disk, args, message):
    code, _, err = admin("owner", disk.shard_id, *args, "--commit")
    assert (code, message in err) == (64, True)
    assert owner_of(disk) == FLIGHTS


@pytest.mark.slow
def test_a_mistyped_shard_gets_no_owner(admin, disk):
    for args in ([], ["--take-over", str(OTHER), "--commit"], ["--release", "--commit"]):
        code, _, err = admin("owner", ShardId.new(), *args)
        assert (code, "does not exist" in err) == (64, True)
    assert len(ok(admin("names", "--json"))) == 1


def test_the_identity_is_no_stray_blob_of_the_store(admin, disk):
    assert (disk.blobs / "store-identity").exists()
    assert ok(admin("usage", "--json"))["foreign_blobs"] == 0


@pytest.mark.slow
def test_a_critical_hold_is_released_only_with_commit(admin, disk):
    held, other = CriticalReaderId.new(), CriticalReaderId.new()
    with disk.client() as client:
        for critical_id in (held, other):
            client.open_critical_since(disk.shard_id, critical_id, opaque=b"t", purpose="operator retention")
    code, _, err = admin("holds", disk.shard_id, "--expire", held, "--commit")
    assert (code, "operator retention" in err, "--force" in err) == (64, True, True)
    report = ok(admin("holds", disk.shard_id, "--expire", held, "--force", "--json"))
    assert [one["id"] for one in report["expired"]] == [held]
    assert report["committed"] is False
    assert {hold["id"] for hold in ok(admin("holds", disk.shard_id, "--json"))["holds"]} == {held, other}
    _, out, err = admin("holds", disk.shard_id, "--expire", held, "--force")
    assert held in out
    assert "nothing was changed" in err
    # Both or none: a mistyped one ends nothing.
    code, _, err = admin(
        "holds", disk.shard_id, *("--expire", held, "--expire", CriticalReaderId.new()), "--force", "--commit"
    )
    assert (code, "has no critical reader" in err) == (64, True)
    assert ok(admin("holds", disk.shard_id, "--expire", held, "--force", "--commit", "--json"))["committed"] is True
    assert {hold["id"] for hold in ok(admin("holds", disk.shard_id, "--json"))["holds"]} == {other}


def test_a_leased_reader_is_expired_alone_and_is_fenced(admin, disk):
    with disk.client() as client:
        gone = client.open_leased_reader(disk.shard_id, SCHEMA, purpose="notebook")
        kept = client.open_leased_reader(disk.shard_id, SCHEMA, purpose="report")
        before = client.machine(disk.shard_id).refresh()
        report = ok(admin("holds", disk.shard_id, "--expire", gone.reader_id, "--json"))
        assert report["expired"] == [
            {
                "id": gone.reader_id,
                "kind": "leased",
                "purpose": "notebook",
                "hostname": report["expired"][0]["hostname"],
            }
        ]
        assert client.machine(disk.shard_id).refresh() == before, "a dry run commits nothing"
        ok(admin("holds", disk.shard_id, "--expire", gone.reader_id, "--commit", "--json"))
        after = client.machine(disk.shard_id).refresh()
        assert set(after.leased_readers) == {kept.reader_id}
        assert (after.trace.since, after.trace.upper) == (before.trace.since, before.trace.upper)
        with pytest.raises(Fenced, match=gone.reader_id):
            gone.downgrade_since(Antichain(3))
        assert kept.downgrade_since(Antichain(0)) == Antichain(0)
        code, _, err = admin("holds", disk.shard_id, "--expire", gone.reader_id, "--commit")
        assert (code, "has no leased reader" in err) == (64, True)
        kept.expire()


@pytest.mark.parametrize(
    ("what", "words"),
    [("retention", "no reader"), ("w00000000-0000-4000-8000-000000000001", "a writer"), ("r1", "not a")],
)
def test_what_is_no_reader_cannot_be_expired(admin, disk, what, words):
    code, _, err = admin("holds", disk.shard_id, "--expire", what, "--force", "--commit")
    assert (code, words in err) == (64, True)
