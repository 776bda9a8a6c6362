"""One run of a sink for the tests of landing: its driver, its tasks, and a rival that commits first. Without Spark, on stores in memory."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from persist_engine import Antichain, Appended
from persist_engine.base.settings import BatchSettings, CompactionSettings, RetrySettings, Settings
from persist_engine.client.write.batch import Batch
from persist_engine.flow.append_run import Staged
from persist_engine.flow.mint_run import Minted, RunToken, ShardView, mint
from persist_engine.storage.blob_mem import MemBlob
from persist_engine.work.audit.verify import verify_shard
from persist_engine.work.compact import compact
from persist_kit.staged import named_keys
from persist_kit.world import SCHEMA, AheadEnv, World, row
from persist_spark.envelopes.run_keys import RunKeys
from persist_spark.landing import Landing, driver_settings
from persist_spark.report import Log

A = Antichain.of
Rows = Counter  # of (id, name)
SINK, RUN = "ns/s", b"uid-7"
#: The events after which the next step of a run is an append.
BEFORE_AN_APPEND = {"staged", "moved", "corrected", "append_again"}


class RivalLog(Log):
    """The log of a run beside a rival. Runs the next of `acts` after each event that precedes an append."""

    acts: Sequence[Callable[[], Any]] = ()

    def act(self) -> None:
        """Runs the next act, if there is one."""
        first, self.acts = self.acts[:1], self.acts[1:]
        for each in first:
            each()

    def event(self, event: str, **fields: Any) -> None:
        super().event(event, **fields)
        if event in BEFORE_AN_APPEND:
            self.act()


class CountedBlob(MemBlob):
    """A blob store that records the keys of all writes."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[str] = []

    def set(self, key: str, value: Any) -> Any:
        self.written.append(key)
        return super().set(key, value)


class Run:
    """One run of a sink. Its driver, its tasks and the rival are three processes of one world."""

    def __init__(self, **batch: Any) -> None:
        batch = {"inline_part_bytes_max": 0, "target_part_bytes": 4096, **batch}
        self.world = World(
            settings=Settings(
                batch=BatchSettings(**batch),
                retry=RetrySettings(give_up_ms=1),
                compaction=CompactionSettings(claim_ms=0),
            ),
            env=AheadEnv(),
        )
        self.world.blob = self.blob = CountedBlob()
        self.env = self.world.env
        self.id = self.world.shard_id()
        self.client = self.world.process(settings=driver_settings(self.world.settings))
        self.writer = self.client.open_writer(self.id, SCHEMA, purpose="driver")
        self.tasks = self.world.process().open_writer(self.id, SCHEMA, purpose="tasks")
        self.rival = self.world.process().open_writer(self.id, SCHEMA, purpose="rival")
        self.reader: Any = None
        self.lines = io.StringIO()
        self.log = RivalLog(self.lines, self.env)
        self.staged: list[Batch] = []
        self.staged_keys: set[str] = set()
        self.corrections = Rows()

    # -- the rival ---------------------------------------------------------------------------------------------------

    def write(self, rows: dict[tuple[int, str], int], *, at: int | None = None) -> int:
        """The rival writes `rows` at the time `at`, or at the shard's upper when that is later or `at` is None. Returns the time."""
        upper = self.rival.fetch_recent_upper().time
        time = max(upper, upper if at is None else at)
        updates = [row(key, name, time, diff) for (key, name), diff in rows.items()]
        answer = self.rival.compare_and_append(updates, expected_upper=A(upper), new_upper=A(time + 1))
        assert isinstance(answer, Appended)
        return time

    def compacts(self) -> None:
        """The rival compacts the whole shard."""
        while (answer := self.rival.machine.spine_exert(100_000)[0]).requests:
            for request in answer.requests:
                compact(self.rival.machine, request)

    # -- the run -----------------------------------------------------------------------------------------------------

    def append(self, rows: Rows, *, times: int | None = None, tasks: int = 3) -> Landing:
        """A landing of rows staged as an Append stages them. With `times`, rows have times of their own, from `times` on."""
        return self._landing(rows, reads_back=False, times=times, tasks=tasks)

    def mirror(self, desired: Rows, *, tasks: int = 3, lease_ms: int | None = None) -> Landing:
        """A landing of the corrections that a Mirror stages for `desired`."""
        self.reader = self.client.open_leased_reader(self.id, SCHEMA, purpose="driver", lease_ms=lease_ms)
        return self._landing(desired, reads_back=True, times=None, tasks=tasks)

    def upsert(self, wanted: dict[int, str | None], *, is_contestable: bool = False, tasks: int = 3) -> Landing:
        """A landing of the corrections that an Upsert stages: each id of `wanted` gets its name, or is removed."""
        self.reader = self.client.open_leased_reader(self.id, SCHEMA, purpose="driver")
        ids = pa.array(sorted(wanted), pa.int64())
        keys = RunKeys(
            count=len(wanted),
            fetch=lambda: pa.StructArray.from_arrays([ids], names=["id"]),
            where=(("key.id", ">=", min(wanted)), ("key.id", "<=", max(wanted))),
            is_contestable=is_contestable,
        )
        desired = Rows({(id_, name): 1 for id_, name in wanted.items() if name is not None})
        landing = self._landing(desired, reads_back=True, times=None, tasks=tasks, ids=set(wanted))
        return replace(landing, keys=keys, where=keys.where)

    def _landing(
        self, rows: Rows, *, reads_back: bool, times: int | None, tasks: int, ids: set[int] | None = None
    ) -> Landing:
        self.expected = self.client.progress(self.id, SINK)
        view = ShardView(
            since=A(0) if self.reader is None else self.reader.since,
            upper=self.writer.fetch_recent_upper(),
            progress=self.expected,
        )
        minted = mint(view, run=RUN, now_ms=self.env.now_ms(), reads_back=reads_back)
        assert isinstance(minted, Minted)
        self.minted = minted
        if minted.as_of is not None:
            held = self.contents(minted.as_of)
            persisted = Rows({each: diff for each, diff in held.items() if ids is None or each[0] in ids})
            rows = Rows({each: rows[each] - persisted[each] for each in {*rows, *persisted}})
        self.corrections = Rows({each: diff for each, diff in rows.items() if diff})
        updates = [
            row(key, name, minted.time if times is None else times + index, diff)
            for index, ((key, name), diff) in enumerate(sorted(self.corrections.items()))
        ]
        upper = minted.upper if times is None else A(times + len(updates))
        sent = [
            self.tasks.batch(updates[task::tasks], lower=minted.lower, upper=upper).to_transmittable()
            for task in range(tasks)
        ]
        self.staged = [self.writer.batch_from_transmittable(data, is_only_copy=True) for data in sent]
        self.staged_keys = {key for batch in self.staged for key in batch.hollow.blob_keys()}
        return Landing(
            writer=self.writer,
            reader=self.reader,
            staged=Staged(
                lower=minted.lower,
                upper=upper,
                time=minted.time if times is None else None,
                least_time=min((update[1] for update in updates), default=None),
                reads_back=reads_back,
                as_of=minted.as_of,
            ),
            batches=self.staged,
            sink_id=SINK,
            run_token=RunToken(RUN),
            expected=self.expected,
            env=self.env,
            log=self.log,
        )

    def race(self, landing_: Landing, acts: Sequence[Callable[[], Any]]) -> Any:
        """Lands. Runs one of `acts` before each of the first appends."""
        self.log.acts = acts
        self.log.act()
        return landing_.land()

    # -- the result -------------------------------------------------------------------------------------------------

    def events(self, *names: str) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in self.lines.getvalue().splitlines()]
        return [each for each in found if not names or each["event"] in names]

    def contents(self, as_of: int | None = None) -> Rows:
        client = self.world.process()
        as_of = client.recent_upper(self.id).newest_complete if as_of is None else as_of
        with client.open_leased_reader(self.id, purpose="test") as reader:
            rows = reader.snapshot(as_of).to_table().to_pylist() if as_of >= 0 else []
        return Rows({(each["key"]["id"], each["val"]["name"]): each["diff"] for each in rows})

    def blobs(self) -> set[str]:
        return self.world.blob_keys(self.id, kind="part")

    def check_sound(self) -> None:
        """The shard is not damaged, and it names every part in the blob store."""
        assert verify_shard(self.writer.machine).findings == []
        assert self.blobs() == named_keys(self.writer)

    def close(self) -> None:
        if self.reader is not None:
            self.reader.expire()
        self.client.close()


def many(count: int, *, first: int = 0, name: str = "x" * 40) -> Rows:
    return Rows({(key, name): 1 for key in range(first, first + count)})
