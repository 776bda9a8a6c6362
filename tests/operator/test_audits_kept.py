"""Verification and orphan scans as the operator runs them: the real plan, the command line of its Jobs, and real stores."""

import contextlib
import json

import pytest
from persist_engine import Location, PersistClient
from persist_engine.base.settings import BatchSettings, Settings
from persist_engine.cli.main import application
from persist_engine.model.ids import PartId, ShardId
from persist_engine.rows.schema import Schema
from persist_operator.api import conditions
from persist_operator.manifests import maintenance
from persist_operator.plan.actions import StartMaintenance
from persist_operator.plan.observed import Phase, Run, ShardObserved
from persist_operator.plan.shard import plan_shard
from typer.testing import CliRunner

SCHEMA = Schema.from_ddl("id BIGINT", "name STRING")
SETTINGS = Settings(batch=BatchSettings(inline_part_bytes_max=0), retain_ms=None)


class Audited:
    """A shard over files, its resource, and runs whose reports come from the commands that the operator starts."""

    def __init__(self, make_shard, settings, folder, now):
        self.blobs, self.report = folder / "blobs", folder / "report.json"
        self.urls = (f"file://{self.blobs}", f"sqlite://{folder}/log.db")
        self.client = PersistClient.open(Location(blob=self.urls[0], consensus=self.urls[1]), settings=SETTINGS)
        self.shard_id, self.now = ShardId.new(), now
        self.status = {"shardId": str(self.shard_id)}
        self._make_shard, self._settings = make_shard, settings
        with self.client.open_writer(self.shard_id, SCHEMA, purpose="test") as writer:
            for time in range(3):
                rows = [(((time,), (f"row {time}",)), time, 1)]
                writer.compare_and_append(rows, expected_upper=time, new_upper=time + 1)

    def plan(self, spec, runs, **annotations):
        shard = self._make_shard(
            {"schema": {"key": "id BIGINT", "value": "name STRING"}, **spec},
            status=self.status,
            annotations={f"persistshard.io/request-{verb}": token for verb, token in annotations.items()},
        )
        seen = self.client.inspect(self.shard_id)
        observed = ShardObserved(inspected=seen, shard_id=str(self.shard_id), runs=runs)
        plan = plan_shard(shard, observed, now_ms=self.now, settings=self._settings)
        self.status = json.loads(json.dumps(plan.status))
        return [one for one in plan.actions if isinstance(one, StartMaintenance)]

    def ask(self, verb, token, spec=()):
        """Request a run, carry it out, and record it."""
        self.now += 60_000
        (action,) = self.plan(dict(spec), (), **{verb: token})
        arguments = maintenance.arguments(action, *self.urls, memory=None)
        arguments = [str(self.report) if one == maintenance.TERMINATION_LOG else one for one in arguments]
        result = CliRunner().invoke(application(), arguments)
        assert result.exit_code == 0, result.output
        run = Run(
            name=action.name, kind=action.kind, phase=Phase.SUCCEEDED, created_ms=self.now, started_ms=self.now,
            finished_ms=self.now + 1000, seqno=action.seqno, report=json.loads(self.report.read_text()),
        )  # fmt: skip
        self.plan(dict(spec), (run,), **{verb: token})

    def verified(self):
        found = conditions.find(self.status, "Verified")
        return found["status"], found["reason"], self.status["storage"].get("missingBlobs")


@pytest.fixture
def audited(make_shard, settings, tmp_path, now):
    made = Audited(make_shard, settings, tmp_path, now)
    with contextlib.closing(made.client):
        yield made


def test_a_deleted_blob_is_seen_on_the_resource_and_its_return_too(audited):
    audited.ask("verify", "1")
    assert audited.verified() == ("True", "Verified", 0)
    part = next(path for path in (audited.blobs / audited.shard_id).glob("n*/p*"))
    kept = part.read_bytes()
    part.unlink()
    audited.ask("verify", "2")
    assert audited.verified() == ("False", "MissingBlobs", 1)
    assert part.name in conditions.find(audited.status, "Verified")["message"]
    part.write_bytes(kept)
    audited.ask("verify", "3", {"verify": {"mode": "Full"}})
    assert audited.verified() == ("True", "Verified", 0)
    assert audited.status["verification"]["mode"] == "Full"
    assert audited.status["history"][0]["type"] == "Verify"


def test_orphans_are_reported_then_deleted_by_the_mode_and_rows_stay(audited):
    folder = audited.blobs / audited.shard_id / "n0000099"
    folder.mkdir(parents=True)
    for index in range(3):
        (folder / PartId.staged_at(1_700_000_000_000 + index, bytes(10))).write_bytes(b"stray")
    (folder / PartId.staged_at(audited.client.machine(audited.shard_id).env.now_ms(), bytes(10))).write_bytes(b"young")
    audited.ask("orphan-scan", "1")
    assert (audited.status["storage"]["orphanBlobs"], audited.status["storage"]["orphanBytes"]) == (3, 15)
    assert sorted(path.read_bytes() for path in folder.iterdir()) == [b"stray"] * 3 + [b"young"], (
        "Report deletes nothing"
    )
    audited.ask("orphan-scan", "2", {"gc": {"orphans": {"mode": "Delete"}}})
    assert audited.status["storage"]["orphanBlobs"] == 0
    assert [path.read_bytes() for path in folder.iterdir()] == [b"young"]
    assert audited.status["history"][0]["blobsDeleted"] == 3
    audited.ask("verify", "3", {"verify": {"mode": "Full"}})
    assert audited.verified() == ("True", "Verified", 0)
