"""`persist admin retention`: shows and sets how far since stays behind upper; what `inspect` and `holds` say of it."""

import json

import pytest
from persist_engine import CriticalReaderId, PersistClient, ShardId
from persist_engine.model.ownership import Owner
from persist_kit.disk import Disk
from persist_kit.world import SCHEMA, row

DAY_MS = 86_400_000
WHOLE = 7 * DAY_MS


@pytest.fixture
def disk(tmp_path):
    made = Disk(tmp_path)
    made.shard_id = ShardId.new()
    with PersistClient.open(made.location) as client:
        write(client, made.shard_id, 0, 3)
    return made


def write(client, shard_id, lower, upper):
    with client.open_writer(shard_id, SCHEMA, purpose="test") as writer:
        writer.append([row(lower, "a", lower)], lower=lower, upper=upper)


@pytest.fixture
def retention(persist, disk):
    return lambda *args: persist("admin", "retention", disk.shard_id, *args, *disk.args)


def ok(result):
    code, out, err = result
    assert code == 0, (out, err)
    return json.loads(out)


@pytest.mark.slow
def test_the_retention_is_shown_with_the_since_it_yields(retention, persist, disk):
    seen = ok(retention("--json"))
    assert seen.pop("remark").startswith("the whole history is kept: upper is 3, within 604800000.")
    assert seen == {"shard_id": disk.shard_id, "retain_ms": WHOLE, "since": 0, "upper": 3}
    _, out, _ = retention()
    assert "retention\t7d" in out
    _, out, _ = persist("inspect", "shard", disk.shard_id, *disk.args)
    assert "retain_ms\t604800000" in out
    assert "retention\tthe whole history is kept" in out
    assert ok(persist("inspect", "shard", disk.shard_id, *disk.args, "--json"))["retained_since"] == 0


@pytest.mark.slow
def test_retention_is_set_only_with_commit_and_its_effect_is_shown_before(retention, disk):
    with disk.client() as client:
        write(client, disk.shard_id, 3, 30 * DAY_MS)
        seqno = client.inspect(disk.shard_id).seqno
        planned = ok(retention("2d", "--json"))
        assert (planned["was_ms"], planned["retain_ms"], planned["since"]) == (WHOLE, 2 * DAY_MS, 28 * DAY_MS)
        assert planned.pop("committed") is False
        code, _, err = retention("2d")
        assert (code, "nothing was changed" in err) == (0, True)
        assert client.inspect(disk.shard_id).seqno == seqno
        done = ok(retention("2d", "--commit", "--json"))
        assert done.pop("committed") is True
        assert done == planned
        assert client.inspect(disk.shard_id).seqno == seqno + 1
    longer = ok(retention("9d", "--commit", "--json"))
    assert longer["since"] == 28 * DAY_MS
    assert longer["remark"].startswith(f"times before {28 * DAY_MS} are gone")
    off = ok(retention("none", "--commit", "--json"))
    assert (off["retain_ms"], off["since"]) == (None, 28 * DAY_MS)
    _, out, _ = retention()
    assert "retention\tnone" in out


def test_the_shard_of_retention_may_be_an_option(persist, disk):
    shard = ["--shard", disk.shard_id, "--json", *disk.args]
    assert ok(persist("admin", "retention", *shard))["retain_ms"] == WHOLE
    assert ok(persist("admin", "retention", "1h", "--commit", *shard))["retain_ms"] == 3_600_000
    assert ok(persist("admin", "retention", *shard))["retain_ms"] == 3_600_000


@pytest.mark.slow
@pytest.mark.parametrize("value", ["7", "soon", "0d", "1.5h", "9999999999999999d"])
def test_an_invalid_retention_is_refused(retention, value):
    code, _, err = retention(value, "--commit")
    assert code == 64, err
    assert "a retention is a whole number" in err or "retain_ms must be from 1" in err
    assert ok(retention("--json"))["retain_ms"] == WHOLE


def test_the_retention_of_an_operators_shard_is_left_to_its_operator(retention, disk):
    with disk.client() as client:
        client.adopt(Owner("persist-operator/main", "team", "flights"), disk.shard_id, disk.shard_id, take_over=True)
    assert "its operator ends this retention" in retention("30d")[2]
    assert "operator" not in retention("none")[2]


def test_holds_shows_the_retention_or_its_absence(persist, disk):
    holds = lambda *args: persist("admin", "holds", disk.shard_id, *args, *disk.args)  # noqa: E731
    assert ok(holds("--json"))["retain_ms"] == WHOLE
    code, out, _ = holds()
    assert [line.split("\t")[0] for line in out.splitlines()] == ["kind", "retention"]
    assert "since 0" in out
    with disk.client() as client:
        client.set_retention(disk.shard_id, None)
    code, out, err = holds()
    assert (code, out) == (0, "")
    assert "no holds" in err


@pytest.mark.slow
def test_finalize_says_that_it_ends_the_retention(persist, disk):
    finalize = lambda *args: persist("admin", "finalize", disk.shard_id, *args, *disk.args)  # noqa: E731
    code, out, err = finalize()
    assert "the shard's retention of 604800000 ms" in out + err
    assert "end\tthe retention of 7d" in finalize("--close")[1]
    with disk.client() as client:
        hold = client.open_critical_since(disk.shard_id, CriticalReaderId.new(), opaque=b"me")
        code, _, _ = finalize("--close", "--commit")
        assert code != 0
        assert client.inspect(disk.shard_id).retain_ms == WHOLE, "refused before anything was changed"
        hold.expire()
    assert finalize("--close", "--commit")[0] == 0
