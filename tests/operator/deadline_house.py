"""A shard that is kept by the operator's plan: the plan is real, and so are the engine and its stores. Only the clock is set ahead, and runs
take place in this process. Reads everything that the stores hold, decoded, so that a test can look for what should be gone.
"""

import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import pyarrow.parquet as pq
from persist_engine import Location, PersistClient
from persist_engine.base.settings import Settings
from persist_engine.client.tend import hold_since
from persist_engine.codec.batch import decode_run_listing
from persist_engine.codec.inline_part import decode_inline
from persist_engine.codec.keys import parse_blob_key, parse_deletions_key
from persist_engine.codec.state import decode_rollup
from persist_engine.codec.state_diff import decode_state_diff
from persist_engine.model.batch import InlinePart
from persist_engine.model.diff.state_diff import named_batches
from persist_engine.model.ids import CriticalReaderId, ShardId
from persist_engine.rows.schema import Schema
from persist_engine.work.audit.proof import prove
from persist_engine.work.compact import compact_due
from persist_engine.work.gc import gc_and_truncate
from persist_engine.work.repair.force import collect_fully, force_compaction
from persist_engine.work.rollup import write_rollup
from persist_kit.world import AheadEnv
from persist_operator.api import conditions
from persist_operator.plan.actions import AdvanceSince, StartMaintenance
from persist_operator.plan.observed import Phase, Run, ShardObserved
from persist_operator.plan.shard import plan_shard

SCHEMA = Schema.from_ddl("id BIGINT", "name STRING")
MINUTE_MS, HOUR_MS = 60_000, 3_600_000


class Kept:
    """One shard, its resource, and the operator that looks at it."""

    def __init__(self, make_shard, settings, *, blob: str, consensus: str, inline_bytes: int, spec) -> None:
        self.env = AheadEnv()
        defaults = Settings(retain_ms=None)
        batch = replace(defaults.batch, inline_part_bytes_max=inline_bytes)
        # However small, a compaction sifts out what cancelled: what is sifted must be gone by the deadline, too.
        compaction = replace(defaults.compaction, sift_bytes_min=0)
        self.client = PersistClient.open(
            Location(blob=blob, consensus=consensus),
            env=self.env,
            settings=replace(defaults, batch=batch, compaction=compaction),
        )
        self.shard_id = ShardId.new()
        self.client.initialise(self.shard_id, SCHEMA)
        self._make_shard, self._settings = make_shard, settings
        self._spec = {"schema": {"key": "id BIGINT", "value": "name STRING"}, **spec}
        self.status = {"shardId": str(self.shard_id), "conditions": [{"type": "Ready", "status": "Unknown"}]}
        self._runs: list[Run] = []
        self.fails: Callable[[StartMaintenance], bool] = lambda _: False
        self.full: list[str] = []
        self.annotations: dict[str, str] = {}

    def write(self, *rows: tuple[int, str, int]) -> None:
        """Commit (id, name, diff) at the present time."""
        at = self.env.now_ms()
        with self.client.open_writer(self.shard_id, SCHEMA, purpose="test") as writer:
            upper = writer.upper.time
            updates = [(((key,), (name,)), max(at, upper), diff) for key, name, diff in rows]
            writer.compare_and_append(updates, expected_upper=upper, new_upper=max(at, upper) + 1)

    def shard(self):
        """The resource as it is now."""
        return self._make_shard(self._spec, status=self.status, annotations=self.annotations)

    def look(self):
        """One reconcile: plan, and do what the plan says. Returns the inspection."""
        now_ms, seen = self.env.now_ms(), self.client.inspect(self.shard_id)
        observed = ShardObserved(inspected=seen, shard_id=str(self.shard_id), runs=tuple(self._runs[-3:]))
        plan = plan_shard(self.shard(), observed, now_ms=now_ms, settings=self._settings)
        self.status = json.loads(json.dumps(plan.status))
        for action in plan.actions:
            match action:
                case AdvanceSince():
                    hold = CriticalReaderId(action.critical_id)
                    hold_since(
                        self.client,
                        self.shard_id,
                        hold,
                        token=b"operator",
                        purpose="retention",
                        since_ms=action.since_ms,
                    )
                case StartMaintenance():
                    self._runs.append(self._ran(action, now_ms))
        return seen

    def _ran(self, action: StartMaintenance, now_ms: int) -> Run:
        failed = self.fails(action)
        if not failed:
            self._do(action)
        if action.full:
            self.full.append(action.kind)
        return Run(
            name=action.name,
            kind=action.kind,
            phase=Phase.FAILED if failed else Phase.SUCCEEDED,
            created_ms=now_ms,
            started_ms=now_ms,
            finished_ms=now_ms + 1000,
            seqno=action.seqno,
            planned_reason=action.reason,
            runner=action.runner,
            report={"outcome": "Failed" if failed else "Succeeded", "message": "test"},
        )

    def _do(self, action: StartMaintenance) -> None:
        machine = self.client.machine(self.shard_id)
        match action.kind:
            case "rollup":
                write_rollup(machine)
            case "gc":
                collect_fully(machine) if action.full else gc_and_truncate(machine)
            case "compaction":
                force_compaction(machine, full=True) if action.full else compact_due(machine)

    def pass_ms(self, milliseconds: int, *, step_ms: int = 10 * MINUTE_MS) -> None:
        """Let time pass, with a look after every step."""
        for _ in range(max(1, milliseconds // step_ms)):
            self.env.advance_ms(step_ms)
            self.look()

    def condition(self, name: str) -> tuple[str, str, str]:
        """(status, reason, message)."""
        found = conditions.find(self.status, name)
        return found["status"], found["reason"], found.get("message", "")

    def holding(self, mark: str) -> list[str]:
        """Where `mark` is: keys of objects and versions of the log, raw and decoded."""
        wanted = mark.encode()
        return [where for where, data in self._everything() if wanted in data]

    def proof(self, before_ms: int):
        """What `persist admin proof --before` says."""
        return prove(self.client.machine(self.shard_id), before_ms=before_ms)

    def newest(self) -> int:
        """The newest complete time."""
        return self.client.recent_upper(self.shard_id).time - 1

    def still_there(self, marks: Mapping[str, int]) -> dict[str, int]:
        """Those of `marks` that some object or entry holds."""
        every = b"".join(data for _, data in self._everything())
        return {mark: at for mark, at in marks.items() if mark.encode() in every}

    def _everything(self) -> Iterator[tuple[str, bytes]]:
        versions = self.client.versions
        for entry in versions.fetch_all_live_diffs(self.shard_id):
            yield f"v{entry.seqno}", entry.data
            yield from _inline(f"v{entry.seqno}", named_batches(decode_state_diff(entry.data, key="test")))
        blob = self.client.machine(self.shard_id).blob
        for info in blob.list_prefix(f"{self.shard_id}/"):
            data = blob.get(info.key) or b""
            yield info.key, data
            yield from _decoded(info.key, data, self.shard_id)

    def close(self) -> None:
        """Close the connections."""
        self.client.close()


def _decoded(key: str, data: bytes, shard_id: ShardId) -> Iterator[tuple[str, bytes]]:
    if data[:4] == b"PAR1":
        yield key, json.dumps(pq.read_table(io.BytesIO(data)).to_pylist(), default=str).encode()
    elif "/v" in key:
        rollup = decode_rollup(data, key=key)
        yield key, repr(rollup.state).encode()
        yield from _inline(key, rollup.state.trace.batches())
        for entry in rollup.diffs:
            yield key, entry.data
            yield from _inline(key, named_batches(decode_state_diff(entry.data, key=key)))
    elif data and parse_deletions_key(key) is None:
        parse_blob_key(key)
        yield key, repr(decode_run_listing(data, key=key, shard_id=shard_id)).encode()


def _inline(where: str, batches) -> Iterator[tuple[str, bytes]]:
    for batch in batches:
        yield where, repr(batch).encode()
        for part in batch.parts:
            yield where, repr(part).encode()
            if isinstance(part, InlinePart):
                opened = decode_inline(part.data, format_name=part.format, key=where, schema=None)
                yield where, json.dumps(opened.table.to_pylist(), default=str).encode()
