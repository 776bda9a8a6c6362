"""A state folder with a shard in real stores (files, SQLite), and browsers without a browser."""

import pytest
from persist_engine.base.env import SeededEnv, SystemEnv
from persist_engine.client.client import PersistClient
from persist_engine.client.location import Location
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import CriticalReaderId, ShardId
from persist_engine.rows.schema import Schema
from persist_operator.api import names
from persist_operator.api.schema_check import load_schemas
from persist_operator.console.guard import Hosts
from persist_operator.console.port import APPROVE
from persist_operator.console.web import console
from persist_operator.local.engine_commands import runner_settings
from persist_operator.local.objects import Objects
from persist_operator.local.ui import LaptopSource
from starlette.testclient import TestClient

DAY_MS = 86_400_000
START_MS = 1_790_000_000_000
#: What a careless template would let through, and what a page must then hold.
HOSTILE = "<script>alert('x')</script>\"'><img src=x onerror=alert(1)>\ud800"


def condition(ready="True", reason="Healthy", message=""):
    return {
        "type": "Ready",
        "status": ready,
        "reason": reason,
        "message": message,
        "lastTransitionTime": "2026-09-20T00:00:00Z",
    }


def frontier_status(shard_id, **changes):
    return {
        "shardId": shard_id,
        "frontiers": {"since": str(START_MS), "upper": str(START_MS + 4 * DAY_MS), "seqno": 9, "upperLagSeconds": 90},
        "storage": {
            "batches": 4,
            "liveBytes": 12_345,
            "updates": 40,
            "runs": 4,
            "parts": 4,
            "liveDiffs": 9,
            "latestRollupSeqno": 1,
        },
        "holds": {"readers": 2, "writers": 0},
        "conditions": [condition()],
        **changes,
    }


class Laptop:
    """A state folder with the shard `orders`: four days of rows in four batches that no merge has made one, and a critical reader."""

    def __init__(self, folder):
        self.state = folder / "state"
        self.objects = Objects(self.state, SystemEnv())
        self.location = Location(
            blob=f"file://{self.state.resolve()}/store/blobs",
            consensus=f"sqlite://{self.state.resolve()}/store/consensus.db",
        )
        self.shard_id = ShardId.new()
        self.fill()
        self.apply("PersistShard", "orders", {"schema": {"key": "id BIGINT"}}, frontier_status(str(self.shard_id)))
        sink = {
            "shardRef": {"name": "orders"},
            "mode": "Streaming",
            "input": {"type": "Format", "format": {"name": "parquet"}},
        }
        self.apply("SparkSink", "load", {**sink, "envelope": {"type": "Append"}}, {"conditions": [condition()]})

    def fill(self):
        with PersistClient.open(self.location) as client:
            schema = Schema.from_ddl("id BIGINT", "")
            client.initialise(self.shard_id, schema)
            client.open_critical_since(self.shard_id, CriticalReaderId.new(), opaque=b"x", purpose="weekly report")
            with client.open_writer(self.shard_id, schema, purpose="load") as writer:
                lower = Antichain.of(0)
                for day in range(4):
                    upper = Antichain.of(START_MS + (day + 1) * DAY_MS)
                    rows = [(((number,), ()), START_MS + day * DAY_MS, 1) for number in range(10)]
                    writer.compare_and_append(rows, expected_upper=lower, new_upper=upper)
                    lower = upper

    def apply(self, kind, name, spec, status):
        document = {"apiVersion": names.API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}
        self.objects.apply(load_schemas().default(document))
        self.objects.set_status(kind, name, status)

    def source(self):
        return LaptopSource(self.state, runner_settings(self.state, None), env=SystemEnv(), credentials_dir="/nowhere")

    def seqno(self):
        """The version of the shard, which each commit raises."""
        with PersistClient.open(self.location) as client:
            return client.inspect(self.shard_id).seqno

    def plan(self, plan_id="compact-9"):
        """Put a plan on the status that waits for approval, as if none had been approved before."""
        self.objects.annotate("PersistShard", "orders", APPROVE, "")
        status = dict(self.objects.get("PersistShard", "orders")["status"])
        plan = {
            "id": plan_id,
            "type": "Compaction",
            "reason": "TooManyBatches",
            "runner": "Pod",
            "estimatedBytes": 1000,
        }
        self.objects.set_status("PersistShard", "orders", {**status, "plan": {**plan, "approved": False}})

    def approved(self):
        return self.objects.get("PersistShard", "orders")["metadata"]["annotations"][APPROVE]


@pytest.fixture(scope="module")
def filled_laptop(tmp_path_factory):
    return Laptop(tmp_path_factory.mktemp("laptop"))


@pytest.fixture
def laptop(tmp_path):
    return Laptop(tmp_path)


@pytest.fixture
def browser():
    """Makes a client of a console over a source, as a browser on this machine sends requests."""

    def make(source, *, entrance=None, base_url="http://127.0.0.1:8787", hosts=(), **options):
        app = console(
            source, env=SeededEnv(7, start_ms=START_MS + 5 * DAY_MS), hosts=Hosts.of(hosts), entrance=entrance
        )
        return TestClient(app, base_url=base_url, follow_redirects=False, **options)

    return make


@pytest.fixture
def hostile():
    return HOSTILE
