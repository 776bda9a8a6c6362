"""The metrics port. `NoMetrics` records nothing; `PrometheusMetrics` feeds prometheus-client.

Only `PrometheusMetrics` loads prometheus-client, which brings an HTTP server.

Callers pass names without the `persist_` prefix. `base.metric_names` lists every name with its help and labels.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from persist_engine.base.metric_names import CATALOGUE, PREFIX, Kind

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
    from prometheus_client.metrics_core import GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector

O = TypeVar("O")  # noqa: E741 - the owner of a shard's state

#: The buckets cover everything from a commit in memory to a compaction of minutes.
BUCKETS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0),
)

#: Without a scrape, the series of shards without an owner are removed when at least this many shards are watched, and twice as many as the
#: last removal left.
_SWEEP_MIN = 256

ShardGauges = Mapping[tuple[str, str], float]
"""(name, value of the label other than `shard`, "" if there is none) -> value."""


class Metrics(Protocol):
    """Counters, gauges and duration histograms. Thread-safe. Raises no error for names and labels of the catalogue."""

    def count(self, name: str, amount: float = 1, /, **labels: str) -> None:
        """Add to the counter `persist_<name>_total`."""

    def gauge(self, name: str, value: float, /, **labels: str) -> None:
        """Set the gauge `persist_<name>`."""

    def observe_s(self, name: str, seconds: float, /, **labels: str) -> None:
        """Record a duration into the histogram `persist_<name>_seconds`."""

    def watch_shard(self, shard: str, owner: O, read: Callable[[O], ShardGauges], /) -> None:
        """Export the gauges that `read(owner)` returns. `read` runs when the registry is scraped, so it adds no cost to a commit.

        The owner is held weakly: when the last owner of a shard is gone, all series labelled with the shard disappear.
        """


class _Uncounted:
    """Stands in for a series and records nothing."""

    def inc(self, _: float) -> None:
        """Does nothing."""

    set = observe = inc


class NoMetrics:
    """Records nothing."""

    def count(self, name: str, amount: float = 1, /, **labels: str) -> None:
        """Does nothing."""

    def gauge(self, name: str, value: float, /, **labels: str) -> None:
        """Does nothing."""

    def observe_s(self, name: str, seconds: float, /, **labels: str) -> None:
        """Does nothing."""

    def watch_shard(self, shard: str, owner: O, read: Callable[[O], ShardGauges], /) -> None:
        """Does nothing."""


class PrometheusMetrics:
    """Metrics on a prometheus-client registry, with one collector per name, created at first use.

    A name that the catalogue lacks is recorded, too: a missing line in a table must not stop a write.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        # The lock is reentrant, because the garbage collector may run under it and finalize an object that records metrics here.
        self._lock = threading.RLock()
        self._is_taken = False
        self._collectors: dict[tuple[Kind, str], Counter | Gauge | Histogram] = {}
        #: The series by call key. This avoids prometheus-client's own look-up, which costs more than the increment.
        self._children: dict[tuple[Any, ...], Any] = {}
        self._sweep_at = _SWEEP_MIN
        self._watched: dict[str, list[tuple[weakref.ref[Any], Callable[[Any], ShardGauges]]]] = {}
        registry.register(cast("Collector", self))  # `collect` makes this object a collector

    def count(self, name: str, amount: float = 1, /, **labels: str) -> None:
        """See Metrics."""
        key = ("counter", name, *labels.items())
        child = self._children.get(key)
        (self._child(key, "counter", name, labels) if child is None else child).inc(amount)

    def gauge(self, name: str, value: float, /, **labels: str) -> None:
        """See Metrics."""
        key = ("gauge", name, *labels.items())
        child = self._children.get(key)
        (self._child(key, "gauge", name, labels) if child is None else child).set(value)

    def observe_s(self, name: str, seconds: float, /, **labels: str) -> None:
        """See Metrics."""
        key = ("histogram", name, *labels.items())
        child = self._children.get(key)
        (self._child(key, "histogram", name, labels) if child is None else child).observe(seconds)

    def watch_shard(self, shard: str, owner: O, read: Callable[[O], ShardGauges], /) -> None:
        """See Metrics. If a shard has several owners (several clients of one location), the newest one's gauges are exported."""
        with self._alone():
            self._watched.setdefault(shard, []).append((weakref.ref(owner), read))
            is_due = len(self._watched) >= self._sweep_at
        if is_due:
            # A process that visits thousands of shards, and that nothing scrapes, must not keep the series of all of them.
            self._swept()

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges of watched shards to the registry. Drops shards whose owners are gone."""
        from prometheus_client.metrics_core import GaugeMetricFamily

        families: dict[str, GaugeMetricFamily] = {}
        # SUBTLE: sweep here and not in weakref callbacks, which may run anywhere, even while this thread holds the lock.
        for shard, (owner, read) in self._swept().items():
            for (name, value), number in read(owner).items():
                family = families.get(name)
                if family is None:
                    text, labels = _described("gauge", name, ("shard",))
                    family = families[name] = GaugeMetricFamily(f"{PREFIX}{name}", text, labels=labels)
                family.add_metric([shard, value] if value else [shard], number)
        yield from families.values()

    def _swept(self) -> dict[str, tuple[Any, Callable[[Any], ShardGauges]]]:
        """Return the newest owner of every shard that has one; remove the series of all other shards, in one pass over all series."""
        owned: dict[str, tuple[Any, Callable[[Any], ShardGauges]]] = {}
        gone: set[str] = set()
        with self._alone():
            for shard, owners in list(self._watched.items()):
                alive = [(ref, owner, read) for ref, read in owners if (owner := ref()) is not None]
                if alive:
                    self._watched[shard] = [(ref, read) for ref, _, read in alive]
                    owned[shard] = alive[-1][1:]
                else:
                    del self._watched[shard]
                    gone.add(shard)
            if gone:
                self._forget(gone)
            self._sweep_at = max(_SWEEP_MIN, 2 * len(self._watched))
        return owned

    def _forget(self, shards: set[str]) -> None:
        for key in [key for key in self._children if any(one[0] == "shard" and one[1] in shards for one in key[2:])]:
            del self._children[key]
            kind, name, *labels = key
            values = dict(labels)
            collector = self._collectors[kind, name]
            collector.remove(*(values[one] for one in _described(kind, name, tuple(sorted(values)))[1]))

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """Hold the lock. Yields whether this thread did not hold it already."""
        with self._lock:
            was_taken, self._is_taken = self._is_taken, True
            try:
                yield not was_taken
            finally:
                self._is_taken = was_taken

    def _child(self, key: tuple[Any, ...], kind: Kind, name: str, labels: Mapping[str, str]) -> Any:
        with self._alone() as is_alone:
            if not is_alone:  # drop one sample, because this thread is within an unfinished registration
                return _Uncounted()
            collector = self._collectors.get((kind, name))
            if collector is None:
                text, names = _described(kind, name, tuple(sorted(labels)))
                collector = self._collectors[kind, name] = self._made(kind, f"{PREFIX}{name}", text, names)
            child = self._children[key] = collector.labels(**labels) if labels else collector
        return child

    def _made(self, kind: Kind, name: str, text: str, labels: tuple[str, ...]) -> Counter | Gauge | Histogram:
        from prometheus_client import Counter, Gauge, Histogram

        match kind:
            case "counter":
                return Counter(name, text, labels, registry=self._registry)
            case "gauge":
                return Gauge(name, text, labels, registry=self._registry)
            case "histogram":
                return Histogram(f"{name}_seconds", text, labels, registry=self._registry, buckets=BUCKETS_S)


def _described(kind: Kind, name: str, labels: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Return help and label names from the catalogue, or the bare name and `labels` if the catalogue lacks it."""
    metric = CATALOGUE.get((kind, name))
    return (name, labels) if metric is None else (metric.help, tuple(metric.labels))
