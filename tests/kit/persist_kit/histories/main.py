"""List-append histories of several processes on a real Redis and a real S3 server, through fault proxies, with the verdict of a checker
(`make linearizability`).

    workers (persist_kit.histories.list_append) -> fault proxies -> redis-server, versitygw
    their records -> one history -> tests/linearizability/checker

Runs one history from a new shard to its verdict. It chooses the faults, kills servers and workers (after a number of exchanges, not after a
time), and keeps the files of a history that is not linearizable. Knows nothing about the internals of a node.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from persist_engine.model.ids import ShardId

from persist_kit.fault_proxy import FINE, FaultProxy, Trouble
from persist_kit.histories.list_append import Task
from persist_kit.servers import RedisServer, S3Server, ServerMissing, redis_server, s3_server

#: A history that takes longer counts as a hang. The slowest took a tenth of it.
DEADLINE_S = 120.0
CHECKER = "persist-linearizability-checker"
PARTITION_S = 0.3
#: The interval between two checks for a transaction under way.
LOOK_S = 0.002


@dataclass(frozen=True)
class Plan:
    """The parameters of a history: a function of its seed. The order in which real processes run is not part of it."""

    seed: int
    processes: int = 3
    nodes: int = 2
    """The nodes per process, which share its cached state."""
    transactions: int = 8
    """The transactions per node."""
    read_only: float = 0.3
    """The share of read-only transactions."""
    redis: Trouble = FINE
    s3: Trouble = FINE
    events: tuple[tuple[int, str], ...] = ()
    """(number of exchanges with Redis, event after them). "redis", "s3": the server is killed and restarted. "worker": one worker is killed
    during a transaction and replaced. "partition".
    """
    bug: str | None = None


def plan_of(seed: int, *, transactions: int = 8) -> Plan:
    """The plan of `seed`: mild or heavy losses, and some of the events."""
    rng = random.Random(f"linearizability {seed}")  # noqa: S311 - repeatable on purpose
    heavy = rng.choice((0.3, 1.0, 2.0))
    trouble = [
        Trouble(reset=heavy * 0.03, lose_answer=heavy * 0.04, delay=0.1, delay_s_max=rng.choice((0.01, 0.1)))
        for _ in range(2)
    ]
    names = ("redis", "s3", "partition", "worker")
    events = sorted((rng.randint(20, 60 * transactions), name) for name in names if rng.random() < 0.4)
    return Plan(
        seed=seed,
        processes=rng.choice((2, 3)),
        transactions=transactions,
        redis=trouble[0],
        s3=trouble[1],
        events=tuple(events),
    )


@dataclass(frozen=True)
class Verdict:
    """`answer`: "linearizable", "not linearizable", "unknown" (the checker found no answer in time), or an error that is proven without the
    checker. `kept`: the folder of the history, when it is not linearizable.
    """

    plan: Plan
    answer: str
    counts: dict[str, int] = field(default_factory=dict)
    kept: Path | None = None

    @property
    def is_linearizable(self) -> bool:
        """Whether the history is linearizable."""
        return self.answer == "linearizable"


class Worker:
    """One process that runs nodes."""

    def __init__(self, blob: str, consensus: str, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "persist_kit.histories.list_append", blob, consensus],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},  # noqa: TID251 - as a shell would start it
            text=True,
        )
        self._is_ready = False

    def begin(self, task: Task) -> None:
        """Starts `task`. `answer` waits for its end."""
        self.await_ready()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(task)) + "\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        """The answer of the worker at the end of its task; "killed" after SIGKILL. Raises RuntimeError when it ended for another reason."""
        if line := self._line():
            return line
        if (code := self._process.wait()) != -signal.SIGKILL:
            raise RuntimeError(f"a worker ended with exit code {code} during its task: see its standard error")
        return "killed"

    def kill_in_transaction(self, history: Path, *, is_over: Callable[[], bool]) -> bool:
        """Kills the worker (SIGKILL) while its record `history` has a transaction without an end. It checks repeatedly, and stops the
        process during each check. Returns False, with the worker alive, when `is_over` before there was such a moment.
        """
        while not is_over():
            self._process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            found = _transactions([history] if history.exists() else [])
            if any(line["outcome"] == "invoked" for line in found.values()):
                self.kill()
                return True
            self._process.send_signal(signal.SIGCONT)
            threading.Event().wait(LOOK_S)
        return False

    def kill(self) -> None:
        """SIGKILL. Idempotent."""
        self._process.kill()
        self._process.wait()

    def await_ready(self) -> None:
        """Waits until the worker has opened the stores."""
        if not self._is_ready:
            assert self._line() == "ready", "a worker first prints this"
            self._is_ready = True

    def _line(self) -> str:
        assert self._process.stdout is not None
        timer = threading.Timer(DEADLINE_S, self._process.kill)
        timer.start()
        try:
            return self._process.stdout.readline().strip()
        finally:
            timer.cancel()


class Cluster:
    """Both servers behind their proxies, the workers and the checker. Serves many histories."""

    def __init__(self, redis: RedisServer, s3: S3Server, checker: Path, folder: Path) -> None:
        self._redis, self._s3, self._checker, self._folder = redis, s3, checker, folder
        self._redis_proxy, self._s3_proxy = FaultProxy(redis.port), FaultProxy(s3.port)
        self._workers: list[Worker] = []
        self._is_over = threading.Event()
        self._count = 0

    def play(self, plan: Plan) -> Verdict:
        """Runs one history on a new shard and checks it."""
        self._count += 1
        folder = self._folder / f"history-{self._count}-seed-{plan.seed}"
        folder.mkdir()
        self._start_workers(plan.processes)
        counts: Counter[str] = Counter()
        events: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        due = dict(plan.events)

        def on_exchange(number: int) -> None:
            if number in due:
                events.put(due[number])

        nemesis = threading.Thread(target=self._misbehave, args=(events, counts, folder / _record_of(0)))
        nemesis.start()
        self._redis_proxy.begin(plan.redis, seed=plan.seed, on_exchange=on_exchange)
        self._s3_proxy.begin(plan.s3, seed=plan.seed + 1)
        try:
            answers = self._run(plan, folder)
        finally:
            self._is_over.set()
            events.put(None)
            nemesis.join()
            self._is_over.clear()
        for proxy in (self._redis_proxy, self._s3_proxy):
            for name in ("exchanges", "resets", "lost_answers", "delays"):
                counts[name.replace("_", " ")] += getattr(proxy, name)
        return self._judged(plan, folder, counts, answers)

    def close(self) -> None:
        """Ends the workers and the proxies."""
        for worker in self._workers:
            worker.kill()
        self._redis_proxy.close()
        self._s3_proxy.close()

    # -- private ------------------------------------------------------------------------------------------------------

    def _start_workers(self, count: int) -> None:
        """Starts workers without faults, because opening a store probes it at length."""
        blob = self._s3.location("").replace(f"%3A{self._s3.port}", f"%3A{self._s3_proxy.port}")
        consensus = self._redis.url.replace(f":{self._redis.port}", f":{self._redis_proxy.port}")
        while len(self._workers) < count:
            self._workers.append(Worker(blob, consensus, self._s3.environment))
        for worker in self._workers:
            worker.await_ready()

    def _run(self, plan: Plan, folder: Path) -> list[str]:
        task = Task(
            shard_id=str(ShardId.new()),
            history="",
            seed=plan.seed,
            first_node=0,
            nodes=plan.nodes,
            transactions=plan.transactions,
            read_only=plan.read_only,
            bug=plan.bug,
        )
        playing = self._workers[: plan.processes]
        for index, worker in enumerate(playing):
            first = index * plan.nodes + 1
            worker.begin(replace(task, first_node=first, history=str(folder / _record_of(index))))
        answers = [worker.answer() for worker in playing]
        self._redis_proxy.calm_down()
        self._s3_proxy.calm_down()
        dead = [worker for worker, answer in zip(playing, answers, strict=True) if answer == "killed"]
        self._workers = [worker for worker in self._workers if worker not in dead]
        self._start_workers(1)
        # This task runs without faults and bugs. All acknowledged appends must be there.
        last = replace(task, transactions=0, nodes=1, first_node=99, bug=None, history=str(folder / "last.jsonl"))
        self._workers[-1].begin(last)
        return [*answers, self._workers[-1].answer()]

    def _judged(self, plan: Plan, folder: Path, counts: Counter[str], answers: list[str]) -> Verdict:
        """The verdict. The checker judges the records, regardless of the nodes' answers."""
        history = folder / "history.jsonl"
        counts += _merged(folder, history)
        answer = self._checked(history, folder / "history.html")
        wrong = [each for each in answers if each not in ("done", "killed")]
        if answer == "linearizable" and wrong:
            answer = "; ".join(wrong)
        if answer == "linearizable":
            shutil.rmtree(folder)
            return Verdict(plan, answer, dict(counts))
        (folder / "plan.txt").write_text(f"{plan}\n{answer}\n{answers}\n")
        return Verdict(plan, answer, dict(counts), folder)

    def _misbehave(self, events: queue.SimpleQueue[str | None], counts: Counter[str], first_record: Path) -> None:
        while (event := events.get()) is not None:
            match event:
                case "redis":
                    self._redis.restart()
                case "s3":
                    self._s3.restart()
                case "worker":
                    if not self._workers[0].kill_in_transaction(first_record, is_over=self._is_over.is_set):
                        continue
                case _:
                    with self._redis_proxy.partitioned():
                        threading.Event().wait(PARTITION_S)
            counts[f"{event} events"] += 1

    def _checked(self, history: Path, html: Path) -> str:
        run = subprocess.run(
            [self._checker, "-html", html, "-timeout", "60s", history], capture_output=True, text=True, check=False
        )
        if run.returncode == 3:
            raise RuntimeError(f"the checker does not understand {history}: {run.stderr}")
        return str(json.loads(run.stdout)["verdict"])


def _record_of(index: int) -> str:
    return f"process-{index}.jsonl"


def _transactions(records: Iterable[Path]) -> dict[tuple[int, int], dict[str, Any]]:
    """The transactions in these files, each once. A transaction without an end in any file is "invoked"."""
    transactions: dict[tuple[int, int], dict[str, Any]] = {}
    for path in records:
        for text in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # truncated by a kill: the call is in an earlier line
                line = json.loads(text)
                transactions[line["process"], line["call"]] = line
    return transactions


def _merged(folder: Path, history: Path) -> Counter[str]:
    """Merges the records of all processes into one history. A transaction without an end has an unknown outcome."""
    counts: Counter[str] = Counter()
    found = _transactions(sorted(folder.glob("*.jsonl")))
    with history.open("w") as out:
        for line in found.values():
            if line["outcome"] == "invoked":
                line |= {"outcome": "unknown", "return": 0}
            counts[f"{line['outcome']} transactions"] += 1
            out.write(json.dumps(line) + "\n")
    return counts


@contextmanager
def cluster(folder: Path | None = None) -> Iterator[Cluster]:
    """In the block, the servers and the checker run. Failing histories are kept in `folder` (default: a new folder in the system's
    temporary folder).
    """
    kept = Path(tempfile.mkdtemp(prefix="persist-linearizability-")) if folder is None else folder
    with redis_server() as redis, s3_server() as s3:
        running = Cluster(redis, s3, find_checker(), kept)
        try:
            yield running
        finally:
            running.close()
            with contextlib.suppress(OSError):
                kept.rmdir()  # empty: nothing is kept


def find_checker() -> Path:
    """The path of the checker, which `make setup` builds. Raises ServerMissing, with instructions to install it."""
    folders = [os.environ.get("PERSIST_TOOLS"), str(Path.home() / ".cache/persist-operator/bin")]  # noqa: TID251 - as in servers
    for path in [None, *[each for each in folders if each]]:
        if program := shutil.which(CHECKER, path=path):
            return Path(program)
    raise ServerMissing(f"no {CHECKER} on PATH, in $PERSIST_TOOLS or ~/.cache/persist-operator/bin: run `make setup`")


def campaign(plans: Sequence[Plan], *, folder: Path | None, report: Callable[[str], None]) -> int:
    """Runs all `plans`. Returns the number of histories that were not linearizable."""
    totals: Counter[str] = Counter()
    broken = 0
    with cluster(folder) as running:
        for number, plan in enumerate(plans, 1):
            verdict = running.play(plan)
            totals.update(verdict.counts)
            if not verdict.is_linearizable:
                broken += 1
                report(f"seed {plan.seed}: {verdict.answer}, see {verdict.kept}")
            if number % 10 == 0 or number == len(plans):
                numbers = ", ".join(f"{count} {name}" for name, count in sorted(totals.items()))
                report(f"{number} of {len(plans)} histories, {broken} broken: {numbers}")
    return broken


def main(arguments: Sequence[str] | None = None) -> int:
    """`make linearizability HISTORIES=100 [FIRST=0]`; exit code 1 when a history is not linearizable."""
    parser = argparse.ArgumentParser(prog="linearizability", description="list-append histories on real servers")
    parser.add_argument("--histories", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--transactions", type=int, default=12, help="per node")
    parser.add_argument("--keep", type=Path, help="folder for histories that are not linearizable")
    options = parser.parse_args(arguments)
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    seeds = range(options.first, options.first + options.histories)
    plans = [plan_of(seed, transactions=options.transactions) for seed in seeds]
    return int(campaign(plans, folder=options.keep, report=lambda text: print(text, flush=True)) > 0)  # noqa: T201 - a command


if __name__ == "__main__":
    sys.exit(main())
