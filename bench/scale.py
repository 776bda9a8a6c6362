"""`python -m bench scale`: the operator's own process with thousands of shards, against a stub API server with real Redis and S3 servers.

The environment sets SHARDS= (5000), ACTIVE= (300: shards to which a writer appends), IDLE= and BUSY= (60: seconds of each window) and
REPLICAS= (1). Several replicas share the shards in slices, and one of them is killed in the end. With --quick there is a tenth of the
shards. Each figure comes with the load of the machine, and elapsed seconds come with processor seconds, because on a shared machine only
processor seconds can be compared.

The run ends within LIMIT= (570) seconds. Parts without enough time are left out, and the run reports this. WRAP= is a command that starts
the operator, such as a profiler.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from persist_engine import Antichain, Location, PersistClient, ShardId
from persist_engine.base.settings import Settings
from persist_engine.rows.schema import Schema
from persist_kit.servers import free_port, redis_server, s3_server

from bench.measure import Row

NAMESPACES = 20
#: The end of the run: the kill of a replica, the stop of the processes.
_END_S = 45.0
_SETTLE_S = 180.0
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Sample:
    """Counters of the operator and the stub at one time."""

    at_s: float
    cpu_s: float
    counts: dict[str, int]
    metrics: dict[str, float]


class _Report:
    """Prints each row as it comes, and keeps it. Knows how much of the run's time is left."""

    def __init__(self, limit_s: float) -> None:
        self.rows: list[Row] = []
        self._began_s, self._limit_s = time.monotonic(), limit_s

    def row(self, what: str, ours: str, value: float = 0.0, goal: str = "", limit: float = 1.0) -> None:
        load = os.getloadavg()[0]
        self.rows.append(Row(what, f"{ours} (load {load:.1f})", goal, value / max(limit, 1e-9), "<1"))
        self.say(f"{what}: {ours}" + (f", goal {goal}" if goal else "") + f", load {load:.1f}")

    def say(self, text: str) -> None:
        print(f"  {self.took_s:4.0f} s  {text}", file=sys.stderr, flush=True)

    @property
    def took_s(self) -> float:
        return time.monotonic() - self._began_s

    @property
    def left_s(self) -> float:
        """The seconds before the end of the run must begin."""
        return self._limit_s - _END_S - self.took_s


def run(folder: Path, quick: bool) -> list[Row]:
    shards = int(os.environ.get("SHARDS", "500" if quick else "5000"))
    active = min(shards, int(os.environ.get("ACTIVE", "30" if quick else "300")))
    idle_s, busy_s = (float(os.environ.get(name, "60")) for name in ("IDLE", "BUSY"))
    report = _Report(float(os.environ.get("LIMIT", "570")))
    # This makes SIGTERM end the servers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    os.environ["VGW_KEEP_ALIVE"] = "true"  # as S3 does; by default versitygw ends the connection after each request
    with redis_server(appendonly=True) as redis, redis_server(appendonly=True) as other, s3_server() as s3:
        os.environ.update(s3.environment)
        with _stub() as (api, stub_pid):
            report.say(f"{shards} shards are made")
            _seed(api, shards)
            servers = {"API stub": stub_pid, "Redis": redis.pid, "S3": s3.pid}
            profiles = {"default": (s3.location("data"), redis.url), "hung": (s3.location("other"), other.url)}
            with _operators(folder, api, profiles, int(os.environ.get("REPLICAS", "1"))) as operator:
                if _made_ready(report, api, shards, operator, servers):
                    _idle(report, operator, idle_s, redis)
                    location = Location(blob=s3.location("data"), consensus=redis.url)
                    writing = _Writer(location, _ids(api)[:active])
                    _active(report, operator, writing, busy_s, redis=redis, hung=partial(_hung, api, other))
                if operator.count > 1:
                    moved = operator.kill_one()
                    report.row("slices of a killed replica taken after, s", f"{moved:.1f} s", moved, "15 s", 15)
                report.say("all measured")
    return report.rows


def _made_ready(report: _Report, api: str, shards: int, operator: _Operators, servers: dict[str, int]) -> bool:
    """Wait until all shards are ready, and report the cost. Returns False when there was not enough time."""
    before = {name: _cpu_s(pid) for name, pid in servers.items()}
    took, ready = _until_ready(report, api, shards, operator)
    sample = operator.sample()
    each = max(1, ready)
    report.row(
        f"{ready} of {shards} shards ready, s",
        f"{took:.0f} s, {sample.cpu_s:.1f} CPU s, {sample.cpu_s / each * 1000:.1f} ms each",
        took if ready == shards else 1e9,
        "60 s",
        60,
    )
    report.row("API requests per shard until ready", _per(sample.counts, each), sum(sample.counts.values()) / each)
    spent = {"operator": sample.cpu_s, **{name: _cpu_s(pid) - before[name] for name, pid in servers.items()}}
    cores = os.cpu_count() or 1
    report.row(
        "processor until ready",
        ", ".join(f"{name} {value:.1f} s" for name, value in spent.items())
        + f": {sum(spent.values()) / max(took, 1e-9) / cores:.0%} of {cores} cores; most in the {max(spent, key=spent.__getitem__)}",
    )
    report.row("processor of each replica, s", operator.shares())
    report.row(
        "reconciles for each shard until ready", _per(_results(sample.metrics), each), _looks(sample.metrics) / each
    )
    report.row("memory", f"{operator.rss_mib():.0f} MiB", operator.rss_mib(), "300 MiB", 300)
    return ready == shards


def _idle(report: _Report, operator: _Operators, seconds: float, redis: Any) -> None:
    if report.left_s < seconds:
        report.say("no time is left for the idle window")
        return
    quiet = operator.settle(min(_SETTLE_S, report.left_s - seconds))
    _window(report, operator, "idle" if quiet else "idle, not yet quiet", seconds, redis)


def _active(
    report: _Report, operator: _Operators, writing: _Writer, seconds: float, *, redis: Any, hung: Callable[[], Any]
) -> None:
    """Windows with writes to shards. The second window is in `hung`, while another store hangs."""
    if report.left_s < seconds + 10:
        report.say("no time is left for the window with writes")
        return
    active = len(writing)
    with writing:
        if not writing.wait(min(60.0, report.left_s - seconds)):
            report.say(f"only {writing.opened} of {active} writers are open: the window begins all the same")
        _window(report, operator, f"{active} active", seconds, redis)
        if report.left_s < seconds + 10:
            report.say("no time is left for the window beside a store that hangs")
        else:
            with hung():
                _window(report, operator, f"{active} active, one store hung", seconds, redis)
    report.row("appends", f"{writing.count} in all")
    series = operator.metrics()["series"]
    report.row("series in /metrics", f"{series:.0f}")
    report.row("memory at the end", f"{operator.rss_mib():.0f} MiB", operator.rss_mib(), "300 MiB", 300)


def _window(report: _Report, operator: _Operators, what: str, seconds: float, redis: Any) -> None:
    row = report.row
    before, calls = operator.sample(), _redis_calls(redis)
    oldest = 0.0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        # The interval is that of Prometheus, because thousands of series cost a replica half a second of processor time.
        time.sleep(min(10.0, max(0.1, until - time.monotonic())))
        oldest = max(oldest, operator.metrics().get("persist_operator_queue_oldest_seconds", 0.0))
    after = operator.sample()
    span = after.at_s - before.at_s
    rates = {one: (after.counts[one] - before.counts.get(one, 0)) / span for one in after.counts}
    reads = sum(rate for one, rate in rates.items() if one.startswith(("get", "list")))
    writes = sum(rate for one, rate in rates.items() if one.startswith("patch"))
    gets = _blob_gets(after.metrics) - _blob_gets(before.metrics)
    looks = _looks(after.metrics) - _looks(before.metrics)
    row(f"{what}: API reads", f"{reads:.1f}/s", reads, "50/s", 50)
    limit = 1 if what.startswith("idle") else 10
    row(f"{what}: status writes", f"{writes:.2f}/s", writes, f"{limit}/s", limit)
    row(f"{what}: blob GETs", f"{gets:.0f} in {span:.0f} s", gets, "0" if what.startswith("idle") else "", 1)
    row(f"{what}: CPU", f"{(after.cpu_s - before.cpu_s) / span * 100:.0f} % of a core")
    row(f"{what}: Redis commands", f"{(_redis_calls(redis) - calls) / span:.0f}/s")
    row(f"{what}: reconciles", f"{looks / span:.1f}/s")
    row(f"{what}: oldest wait in the queue", f"{oldest:.1f} s", oldest, "15 s", 15)
    others = {one: f"{rate:.2f}" for one, rate in rates.items() if rate > 0.05}
    report.say(f"  by verb: {others}")


class _Writer:
    """Appends ten rows to each shard in turn, to each at most every ten seconds. A context manager."""

    def __init__(self, location: Location, names: list[str]) -> None:
        self._location, self._names = location, names
        self._stop, self._is_open = threading.Event(), threading.Event()
        self.opened = self.count = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __len__(self) -> int:
        return len(self._names)

    def __enter__(self) -> _Writer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def wait(self, timeout_s: float) -> bool:
        """Wait until every shard has its writer. Returns whether that is so."""
        return self._is_open.wait(timeout_s)

    def _run(self) -> None:
        schema = Schema.from_ddl("id BIGINT", "")
        with PersistClient.open(self._location, settings=Settings()) as client, contextlib.ExitStack() as stack:
            writers = []
            for name in self._names:
                if self._stop.is_set():
                    return
                writers.append(stack.enter_context(client.open_writer(ShardId(name), schema, purpose="bench")))
                self.opened = len(writers)
            self._is_open.set()
            while not self._stop.is_set():
                began = time.monotonic()
                for writer in writers:
                    now = int(time.time() * 1000)
                    rows = [(((number,), ()), now, 1) for number in range(10)]
                    writer.append(rows, lower=writer.upper, upper=Antichain.of(now + 1))
                    self.count += 1
                    if self._stop.is_set():
                        return
                self._stop.wait(max(0.0, 10 - (time.monotonic() - began)))


class _Operators:
    """All replicas. Metrics are sums over them; the oldest wait and the memory are the maximum."""

    def __init__(self, each: list[_Operator], api: str) -> None:
        self._each, self._api = each, api

    @property
    def count(self) -> int:
        return len(self._each)

    def cpu_s(self) -> float:
        return sum(one.cpu_s() for one in self._each)

    def sample(self) -> Sample:
        return Sample(time.monotonic(), self.cpu_s(), _get(f"{self._api}/stub/counts"), self.metrics())

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for one in self._each:
            for series, value in one.metrics().items():
                before = found.get(series, 0.0)
                found[series] = max(before, value) if "oldest" in series else before + value
        return found

    def shares(self) -> str:
        return ", ".join(f"{one.cpu_s():.1f}" for one in self._each)

    def rss_mib(self) -> float:
        return max(one.rss_mib() for one in self._each)

    def is_alive(self) -> bool:
        return all(one.is_alive() for one in self._each)

    def kill_one(self) -> float:
        """Kill one replica. Returns the seconds until the others have all slices. All series of 25,000 shards take seconds to read."""
        self._each.pop().kill()
        began = time.monotonic()
        while sum(one.slices() for one in self._each) < 64 and time.monotonic() - began < 120:
            time.sleep(0.2)
        return time.monotonic() - began

    def settle(self, limit_s: float) -> bool:
        """Wait until the second look at every shard is over: no status written and no blob read for five seconds. Returns whether that came
        within `limit_s`.
        """
        until, quiet, last = time.monotonic() + limit_s, time.monotonic(), (-1.0, -1.0)
        while time.monotonic() < until and time.monotonic() - quiet < 5:
            sample = self.sample()
            now = (float(sample.counts.get("patch persistshards", 0)), _blob_gets(sample.metrics))
            if now != last:
                last, quiet = now, time.monotonic()
            time.sleep(1)
        return time.monotonic() - quiet >= 5


class _Operator:
    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process, self._log = process, log
        self._port = 0

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def slices(self) -> float:
        return float(self._scraped("?name[]=persist_operator_slices").split()[-1])

    def _scraped(self, query: str = "") -> str:
        if not self._port:
            line = next(one for one in self._log.read_text().splitlines() if '"serving"' in one)
            self._port = int(json.loads(line)["port"])
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics{query}", timeout=60) as answer:
            return answer.read().decode()

    def metrics(self) -> dict[str, float]:
        """Sums of the series by name, over all labels; of counters of stores also by operation."""
        found: dict[str, float] = {}
        for line in (lines := [one for one in self._scraped().splitlines() if not one.startswith("#")]):
            series, _, value = line.rpartition(" ")
            name = series.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
            if name.startswith(("persist_blob", "persist_consensus", "persist_store", "persist_operator")):
                found[series] = float(value)
        found["series"] = len(lines)
        return found

    def rss_mib(self) -> float:
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return int(next(one for one in lines if one.startswith("VmRSS")).split()[1]) / 1024

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def cpu_s(self) -> float:
        return _cpu_s(self._process.pid)


def _cpu_s(pid: int) -> float:
    """The processor seconds of the process, and of the children for which it waited."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / _TICK


@contextlib.contextmanager
def _stub() -> Iterator[tuple[str, int]]:
    """Runs the stub API server. Yields its address and its process id."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "bench.scale_api", str(port)])
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            with contextlib.suppress(OSError):
                _get(f"{url}/version")
                break
            time.sleep(0.1)
        yield url, process.pid
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _operators(folder: Path, api: str, profiles: dict[str, tuple[str, str]], replicas: int = 1) -> Iterator[_Operators]:
    shared = {"names": [f"team-{number}" for number in range(NAMESPACES)]}
    stores = {
        name: {"blob": blob, "consensus": consensus, "allowedNamespaces": shared}
        for name, (blob, consensus) in profiles.items()
    }
    settings = {
        "storageProfiles": stores,
        "httpPort": 0,
        "leader": {"namespace": "operator"},
        "sharding": {"enabled": replicas > 1},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    (folder / "kubeconfig").write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "c",
                "contexts": [context],
                "clusters": [{"name": "c", "cluster": {"server": api}}],
                "users": [{"name": "u", "user": {"token": "t"}}],
            }
        )
    )
    variables = {"KUBECONFIG": str(folder / "kubeconfig"), "PERSIST_OPERATOR_CONFIG": str(folder / "config.yaml")}
    command = [*os.environ.get("WRAP", "").split(), sys.executable, "-m", "persist_operator.main"]
    started = []
    try:
        for number in range(replicas):
            log = folder / f"operator-{number}.log"
            with log.open("wb") as stream:
                named = {**os.environ, **variables, "POD_NAME": f"replica-{number}"}
                started.append((subprocess.Popen(command, env=named, stderr=stream), log))
        yield _Operators([_Operator(process, log) for process, log in started], api)
    finally:
        for process, _ in started:
            process.send_signal(signal.SIGTERM)
        for process, _ in started:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _seed(api: str, shards: int, *, profile: str = "default", prefix: str = "shard") -> None:
    made = [_resource(f"{prefix}-{number}", f"team-{number % NAMESPACES}", profile) for number in range(shards)]
    for start in range(0, len(made), 500):
        body = json.dumps(made[start : start + 500]).encode()
        urllib.request.urlopen(urllib.request.Request(f"{api}/stub/seed", data=body, method="POST"), timeout=60).close()


@contextlib.contextmanager
def _hung(api: str, store: Any) -> Iterator[None]:
    """Makes some shards on another store, which hangs within the block."""
    _seed(api, 8, profile="hung", prefix="hung")
    time.sleep(10)
    with store.paused():
        yield


def _resource(name: str, namespace: str, profile: str) -> dict[str, Any]:
    return {
        "apiVersion": "persistshard.io/v1alpha1",
        "kind": "PersistShard",
        "metadata": {
            "namespace": namespace,
            "name": name,
            "uid": str(uuid.uuid4()),
            "generation": 1,
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {
            "storageProfile": profile,
            "schema": {"key": "id BIGINT"},
            # There is no kubelet, so no maintenance run would ever end.
            "compaction": {"mode": "Disabled"},
            "gc": {"enabled": False, "orphans": {"mode": "Off"}},
            "verify": {"mode": "Off"},
            "rollup": {"everySeqnos": 100_000},
        },
    }


def _until_ready(report: _Report, api: str, shards: int, operator: _Operators) -> tuple[float, int]:
    """The seconds until all shards are ready, or until two thirds of the run's time are over, and the number of ready shards."""
    began, shown, limit_s = time.monotonic(), 0.0, 2 / 3 * report.left_s
    while True:
        took, count = time.monotonic() - began, int(_get(f"{api}/stub/ready"))
        if count >= shards or took > limit_s or not operator.is_alive():
            return took, count
        if took - shown > 10:
            shown = took
            report.say(f"  {count} ready after {took:.0f} s, {operator.cpu_s():.0f} CPU s")
        time.sleep(0.25)


def _ids(api: str) -> list[str]:
    return [shard_id for name, shard_id in sorted(_get(f"{api}/stub/shards").items()) if "/shard-" in name]


def _per(counts: Mapping[str, float], shards: int) -> str:
    return ", ".join(f"{one} {count / shards:.2f}" for one, count in sorted(counts.items()) if count > shards / 50)


def _blob_gets(metrics: dict[str, float]) -> float:
    return sum(
        value
        for series, value in metrics.items()
        if series.startswith("persist_blob_calls_total{") and '"get"' in series
    )


def _looks(metrics: dict[str, float]) -> float:
    return metrics.get("persist_operator_reconcile_total", 0.0)


def _results(metrics: dict[str, float]) -> dict[str, float]:
    """The number of reconciles of shards by result."""
    found = {}
    for series, value in metrics.items():
        if series.startswith("persist_operator_reconcile_total{") and 'kind="PersistShard"' in series:
            found[series.partition('result="')[2].partition('"')[0]] = value
    return found


def _redis_calls(redis: Any) -> float:
    text = redis.command("INFO", "stats").decode()
    return float(next(line.split(":")[1] for line in text.splitlines() if line.startswith("total_commands_processed")))


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)
