"""Small batches of commands on keys. The driver decides and appends them. They need only the Spark job that brings their rows.

The driver keeps the values of all keys of the shard in memory, and reads them only from the shard (persist_engine.dataflow.upsert). If the
shard has too many keys, the driver keeps none, and reads the values of the keys of each batch. Executors decide the batches that are too
large for the driver (staging.py), and the batches for which it would read too much. All three ways write the same updates.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

import pyarrow as pa
from persist_engine import Hydration, PersistClient, ProgressMismatch, SourceProgress, UpsertHandle, open_upsert
from persist_engine.base.errors import Fenced, InvariantViolated, PersistError, SchemaMismatch
from persist_engine.base.settings import MIB
from persist_engine.flow.append_run import after_progress_mismatch
from persist_engine.flow.mint_run import AlreadyDone
from persist_engine.rows.schema import Schema

from persist_spark.envelopes.few_commands import FewWinners, few_winners
from persist_spark.frames import fields_of, has_texts
from persist_spark.report import Log, SinkReport
from persist_spark.spec import ConfigurationError, SinkSpec
from persist_spark.staging import shard_order
from persist_spark.streaming.position import committer

#: The memory for the commands of one batch that the driver decides.
COMMANDS_BYTES_MAX = 16 * MIB
#: The most bytes of all texts of one command, in a shard with texts, and in a shard without (a fault is a text too). With 32 MiB instead of
#: 64, a driver that keeps 500,000 keys beside such a batch took 329 MiB before it loads pyspark, and its pod has 352 MiB.
TEXT_BYTES_MAX, FAULT_BYTES_MAX = 512, 64
#: The memory for the upsert state: half a million keys with short values. The driver's pod has this memory beside its heap.
STATE_BYTES_MAX = 64 * MIB
#: A shard with more updates than this has too many keys, unless most of the updates are retractions.
STATE_UPDATES_MAX = 1_000_000
#: The most rows and bytes that the driver reads for one batch. One core decodes them in a second or two.
READ_ROWS_MAX, READ_BYTES_MAX = 4_000_000, 128 * MIB
#: The columns of a command beside the fields: an order of up to 16 bytes, a flag, a weight, and where the text of a fault ends.
_OTHER_BYTES = 16 + 1 + 8 + 4


class _TooLarge(Exception):
    """Ends a read that would keep more than STATE_BYTES_MAX, or that reads more than READ_ROWS_MAX or READ_BYTES_MAX for one batch."""


@dataclass(kw_only=True)
class DriverUpserts:
    """Decides and appends batches of a stream whose envelope has keys. For one thread. A context manager that releases its handle."""

    spec: SinkSpec
    client: PersistClient
    log: Log
    commands_max: int = field(init=False)
    """The most commands in a batch that the driver takes. 0: executors do all batches from now on."""
    _keeps_all: bool = field(default=True, init=False)
    """Whether the handle keeps all keys. Otherwise it reads the keys of each batch."""
    _handle: UpsertHandle | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.commands_max = commands_max(self.spec.schema)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._let_go()

    def commit(self, commands: pa.Table, token: bytes, *, expected: SourceProgress | None) -> SinkReport | None:
        """Appends the commands of one batch with the progress `token`, after the progress `expected`, in one compare-and-set. Returns None
        when executors must do the batch, or must report why it cannot be done; nothing was written then.

        Raises Fenced when another driver of the sink has committed; ConfigurationError when the shard's schema evolved; and the errors of
        `UpsertHandle.upsert`.
        """
        winners = few_winners(commands, self.spec.schema)
        if winners is None:
            return None
        report = SinkReport(run_id=self.spec.run_id, rows_read=winners.rows, errors=winners.errors)
        order = shard_order(self.spec)
        if order is not None and not _ranks(winners.commands, self.spec.schema.val.field(order).type):
            return None
        return self._upserted(winners, report, token, expected, order)

    def keep_up(self) -> None:
        """Follows the changes of other writers, so that the handle does not hold since back while the source is idle. The thread of
        `commit` calls it, or another thread while no batch is in flight. After an error of the stores the next batch reads the shard anew.
        """
        if self._handle is None:
            return
        try:
            self._handle.hydrate()
        except (PersistError, _TooLarge) as error:
            self.log.event("upserts_let_go", reason=str(error)[:500])
            self._let_go()
        else:
            self._stay_within_memory(self._handle)

    def _upserted(
        self, winners: FewWinners, report: SinkReport, token: bytes, expected: SourceProgress | None, order: str | None
    ) -> SinkReport | None:
        try:
            handle = self._current()
            lower = handle.upper
            self.log.event("decided", rows=report.rows_read, errors=report.errors, keys=winners.commands.num_rows)
            done = handle.upsert(
                winners.commands if order is not None else winners.commands.drop_columns(["order"]),
                keeps_greater=order,
                progress=(self.spec.sink_id, token),
                expected_progress=None if expected is None else expected.token,
            )
        except SchemaMismatch as error:
            raise ConfigurationError(f"schema: {error}") from error
        except (InvariantViolated, _TooLarge) as error:
            if self._keeps_all:
                self._keep_nothing(str(error))
                return self._upserted(winners, report, token, expected, order)
            self._let_go()
            if isinstance(error, _TooLarge):
                # Commands on keys that are closer together would read less. But this is known only after the read.
                self.commands_max = winners.rows // 2
                self.log.event("upserts_on_executors", commands=winners.rows, reason=str(error)[:500])
            return None  # executors report which key has several values
        if isinstance(done, ProgressMismatch):
            return self._overtaken(done.current, token, report)
        self._stay_within_memory(handle)
        updates = done.inserted + done.retracted
        self.log.event("appended", lower=lower.time, upper=done.upper.time, updates=updates)
        return replace(report, lower=lower.time, upper=done.upper.time, updates_written=updates)

    def _overtaken(self, current: SourceProgress | None, token: bytes, report: SinkReport) -> SinkReport:
        """Ends a batch whose expected progress has changed. Either this batch was committed and the answer was lost, or another driver has
        committed.
        """
        match after_progress_mismatch(current, run=token):
            case AlreadyDone(upper):
                return SinkReport(run_id=report.run_id, upper=upper.time, already_done=True)
            case _:
                raise Fenced(
                    f"{committer(current)} of sink {self.spec.sink_id} appended to {self.spec.shard_id} "
                    f"while run {self.spec.run_id} was writing"
                )

    def _current(self) -> UpsertHandle:
        """The handle, opened for the first batch."""
        if self._handle is None:
            updates = self.client.machine(self.spec.shard_id).refresh().trace.sizes.rows
            if self._keeps_all and updates > STATE_UPDATES_MAX:
                self._keep_nothing(f"the shard has {updates} updates")
            self._handle = open_upsert(
                self.client,
                self.spec.shard_id,
                self.spec.schema,
                backend="memory" if self._keeps_all else "shard",
                on_hydration=self._check_size,
                purpose=self.spec.purpose,
            )
            self._handle.hydrate()
        return self._handle

    def _check_size(self, hydration: Hydration) -> None:
        if not self._keeps_all:
            if hydration.rows > READ_ROWS_MAX or hydration.fetched_bytes > READ_BYTES_MAX:
                raise _TooLarge(
                    f"the keys of a batch lie among more than {hydration.rows} rows and {hydration.fetched_bytes} bytes"
                )
        elif self._handle is not None and self._handle.state_bytes > STATE_BYTES_MAX:
            raise _TooLarge(
                f"{hydration.rows} of {hydration.rows_max} updates of the shard take {self._handle.state_bytes} bytes"
            )

    def _stay_within_memory(self, handle: UpsertHandle) -> None:
        if handle.state_bytes > STATE_BYTES_MAX:
            self._keep_nothing(f"the keys take {handle.state_bytes} bytes")

    def _keep_nothing(self, reason: str) -> None:
        self._keeps_all = False
        self.log.event("upserts_read_keys", reason=reason[:500])
        self._let_go()

    def _let_go(self) -> None:
        handle, self._handle = self._handle, None
        if handle is None:
            return
        try:
            handle.expire()
        except PersistError as error:  # nothing renews its leases now, so they will lapse
            self.log.event("upserts_not_released", error=str(error)[:500])


def texts_max(schema: Schema) -> int:
    """The most bytes of all texts of one command together."""
    return TEXT_BYTES_MAX if any(has_texts(f.type) for f in fields_of(schema)) else FAULT_BYTES_MAX


def commands_max(schema: Schema) -> int:
    """The number of commands that fit COMMANDS_BYTES_MAX."""
    fixed = _OTHER_BYTES + sum(_fixed_bytes(field.type) for field in (*schema.key, *schema.val))
    return COMMANDS_BYTES_MAX // (fixed + texts_max(schema))


def _fixed_bytes(kind: pa.DataType) -> int:
    """The bytes of a value of the type in Arrow without its texts, rounded up for the null flag. Lists and maps count as texts."""
    if pa.types.is_struct(kind):
        return 1 + sum(_fixed_bytes(child.type) for child in kind)
    if pa.types.is_nested(kind) or pa.types.is_string(kind) or pa.types.is_binary(kind):
        return 5
    return int(kind.bit_width) // 8 + 1


def _ranks(commands: pa.Table, kind: pa.DataType) -> bool:
    """Whether a field of this type can be compared with the orders of `commands`, as whole numbers or as instants of one unit."""
    order = commands.column("order").type
    if pa.types.is_integer(kind):
        return bool(pa.types.is_integer(order))
    return bool(order == kind and (pa.types.is_date(kind) or pa.types.is_timestamp(kind)))
