"""Small states, batches and commands for tests of the core. Ids are made from small numbers, so that failures are readable."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from persist_engine.base.settings import Settings
from persist_engine.base.versioned import SeqNo
from persist_engine.model.batch import NOTHING_WAITS, HollowBatch, HollowPart, HollowRollup, InlinePart, Part, RunMeta
from persist_engine.model.commands import Answer, Command, CompareAndAppend, DowngradeSince, RegisterLeasedReader
from persist_engine.model.diff.state_diff import StateDiff
from persist_engine.model.frontier import Antichain, Description
from persist_engine.model.ids import CriticalReaderId, IdempotencyToken, LeasedReaderId, ShardId, WriterId
from persist_engine.model.maintenance import Maintenance
from persist_engine.model.state import CodecNames, DebugInfo, SchemaPair, ShardState
from persist_engine.model.step import Refused, initial_state, step

SHARD = ShardId.from_bytes(b"\x01" * 16)
BIRTH = b"\x0b" * 16
DEBUG = DebugInfo("host", "test")
SCHEMA = SchemaPair(b"key schema", b"val schema")


def _raw(number: int) -> bytes:
    return number.to_bytes(16, "big")


def writer_id(number: int) -> WriterId:
    """The writer of that number."""
    return WriterId.from_bytes(_raw(number))


def leased_id(number: int) -> LeasedReaderId:
    """The leased reader of that number."""
    return LeasedReaderId.from_bytes(_raw(number))


def critical_id(number: int) -> CriticalReaderId:
    """The critical reader of that number."""
    return CriticalReaderId.from_bytes(_raw(number))


def token(number: int) -> IdempotencyToken:
    """The idempotency token of that number."""
    return IdempotencyToken.from_bytes(_raw(number))


def frontier(time: int | None) -> Antichain:
    """The frontier of one time; None is the closed frontier."""
    return Antichain(time)


def description(lower: int, upper: int | None, since: int | None = 0) -> Description:
    """A description from plain numbers; None is the closed frontier."""
    return Description(Antichain(lower), Antichain(upper), Antichain(since))


def part(key: str, *, rows: int = 1, size_bytes: int = 100, diffs_sum: int | None = None) -> HollowPart:
    """A pointer to a blob that does not exist."""
    return HollowPart(key, size_bytes, rows, rows if diffs_sum is None else diffs_sum, "sha256:none")


#: A run in which no retraction waits.
_PLAIN = RunMeta(waits_from_ms=NOTHING_WAITS)


def batch(
    lower: int, upper: int | None, rows: int = 0, *, since: int | None = 0, keys: tuple[str, ...] = (), runs: int = 1
) -> HollowBatch:
    """A hollow batch with one part per key (without keys: one invented key if there are rows), split into `runs` runs."""
    names = keys or ((f"w/p{lower}-{upper}-{rows}",) if rows else ())
    parts = tuple(part(name, rows=rows // len(names)) for name in names)
    cut = min(runs, len(parts))
    splits = tuple(range(1, cut)) if parts else ()
    return HollowBatch(description(lower, upper, since), rows, parts, splits, (_PLAIN,) * cut)


def inline_batch(lower: int, upper: int, data: bytes, *, rows: int = 1) -> HollowBatch:
    """A batch with one inline part."""
    parts: tuple[Part, ...] = (InlinePart(data, rows, rows),)
    return HollowBatch(description(lower, upper), rows, parts, (), (_PLAIN,))


def rollup(seqno: int, name: str = "r") -> HollowRollup:
    """A pointer to a rollup that does not exist."""
    return HollowRollup(f"v{seqno}/{name}", 1000)


def first_state(now_ms: int = 0) -> tuple[ShardState, StateDiff]:
    """Version 1 of a shard, and the diff to it."""
    return initial_state(
        shard_id=SHARD,
        codecs=CodecNames("struct", "struct"),
        schema=SCHEMA,
        now_ms=now_ms,
        hostname="host",
        applier_version="0.1.0",
        rollup=HollowRollup("v1/first", None),
        birth=BIRTH,
    )


def append(
    content: HollowBatch, *, by: int = 1, token_number: int, lease_ms: int = 1000, inline_total_bytes_max: int = 1 << 20
) -> CompareAndAppend:
    """The command, with defaults for the other fields."""
    return CompareAndAppend(
        batch=content,
        writer_id=writer_id(by),
        token=token(token_number),
        debug=DEBUG,
        lease_ms=lease_ms,
        inline_total_bytes_max=inline_total_bytes_max,
        claim_ms=1000,
    )


@dataclass
class Stepper:
    """A shard without storage: every command is committed at once."""

    state: ShardState = field(default_factory=lambda: first_state()[0])
    settings: Settings = field(default_factory=Settings)
    now_ms: int = 0
    diffs: list[StateDiff] = field(default_factory=list)
    maintenance: Maintenance = field(default_factory=Maintenance)

    def do(self, cmd: Command, *, is_write: bool = True, version: str = "0.1.0", hostname: str = "host") -> Answer:
        """Runs `cmd` against the state. Updates `state`, `diffs`, and `maintenance` (that of this command)."""
        self.maintenance = Maintenance()
        out = step(
            self.state,
            cmd,
            now_ms=self.now_ms,
            hostname=hostname,
            applier_version=version,
            settings=self.settings,
            is_write=is_write,
        )
        if isinstance(out, Refused):
            return out.answer
        self.state, self.maintenance = out.state, out.maintenance
        self.diffs.append(out.diff)
        return out.answer


def refused(shard: Stepper, cmd: Command) -> Answer:
    """The answer of a command that must not commit."""
    before, count = shard.state, len(shard.diffs)
    answer = shard.do(cmd)
    assert shard.state is before
    assert len(shard.diffs) == count
    assert shard.maintenance.is_empty()
    return answer


def committed(shard: Stepper, cmd: Command) -> Answer:
    """The answer of a command that must commit one version."""
    before = shard.state.seqno
    answer = shard.do(cmd)
    assert shard.state.seqno == before + 1
    return answer


def register(shard: Stepper, number: int = 1, **more: Any) -> Answer:
    """Registers a leased reader; the command must commit."""
    return committed(shard, RegisterLeasedReader(reader_id=leased_id(number), lease_ms=1000, debug=DEBUG, **more))


def downgrade(number: int, since: int | None, outstanding: int | None = None) -> DowngradeSince:
    """The command. Without `outstanding` the reader keeps its hold."""
    hold = None if outstanding is None else SeqNo(outstanding)
    return DowngradeSince(reader_id=leased_id(number), outstanding_seqno=hold, new_since=frontier(since))
