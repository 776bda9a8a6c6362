"""SparkSink: the spec as a value, and the revision of the fields that define a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from persist_operator.api import names
from persist_operator.api.resource import Meta
from persist_operator.api.sink_status import SinkStatus

#: The fields that define a driver. A change of one of them starts another run; a change of retries, timeouts, cleanup or suspend does not.
_REVISED = ("shardRef", "input", "envelope", "write", "spark")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The schedule of a Scheduled sink."""

    cron: str
    time_zone: str
    starting_deadline_seconds: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """How a new revision of a Streaming sink takes over from the running driver without a gap."""

    is_automatic: bool
    max_lag_seconds: int
    timeout_seconds: int

    @classmethod
    def of(cls, spec: Mapping[str, Any] | None) -> Rollout | None:
        """From spec.rollout; None when the driver is stopped before the next one starts. The resource definition has no defaults for its
        fields, because a default there would change stored resources.
        """
        if spec is None or spec.get("strategy") != "BlueGreen":
            return None
        return cls(
            is_automatic=spec.get("promotion", "Automatic") == "Automatic",
            max_lag_seconds=spec.get("maxLagSeconds", 60),
            timeout_seconds=spec.get("timeoutSeconds", 3600),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkPod:
    """Size and template of driver or executor pods. Quantities stay as the user wrote them."""

    cores: int
    memory: str
    memory_overhead: str | None
    template: Mapping[str, Any]
    instances: int = 1

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> SparkPod:
        """From spec.spark.driver or spec.spark.executor."""
        overhead = spec.get("memoryOverhead")
        return cls(
            cores=spec["cores"],
            memory=str(spec["memory"]),
            memory_overhead=None if overhead is None else str(overhead),
            template=spec.get("template") or {},
            instances=spec.get("instances", 1),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicAllocation:
    """Limits within which Spark decides on the number of executors."""

    least: int
    most: int

    @classmethod
    def of(cls, spec: Mapping[str, Any] | None) -> DynamicAllocation | None:
        """From spec.spark.dynamicAllocation; None when the number of executors is fixed."""
        if spec is None or not spec["enabled"]:
            return None
        return cls(least=spec.get("minExecutors", 1), most=spec["maxExecutors"])


@dataclass(frozen=True, slots=True, kw_only=True)
class PodScheduler:
    """The scheduler that places the pods. `queue` and `priority_class_name` are None if the resource names none."""

    name: str
    queue: str | None
    priority_class_name: str | None

    @classmethod
    def of(cls, spec: Mapping[str, Any] | None) -> PodScheduler:
        """From spec.spark.scheduler."""
        given = spec or {}
        return cls(
            name=given.get("name", "Default"),
            queue=given.get("queue"),
            priority_class_name=given.get("priorityClassName"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkSpec:
    """The Spark application: image, configuration and pods."""

    image: str | None
    image_pull_policy: str | None
    image_pull_secrets: tuple[str, ...]
    conf: Mapping[str, str]
    service_account_name: str | None
    driver: SparkPod
    executor: SparkPod
    dynamic: DynamicAllocation | None
    scheduler: PodScheduler
    queue_priority: int

    @property
    def executors_max(self) -> int:
        """The most executors that run at once."""
        return self.executor.instances if self.dynamic is None else self.dynamic.most


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkSpec:
    """The spec of a SparkSink. The driver gets `input`, `envelope` and `write` verbatim."""

    shard_name: str
    mode: str
    commit_interval_seconds: int | None
    """For a Streaming sink. None: the driver's default."""
    schedule: Schedule | None
    input: Mapping[str, Any]
    envelope: Mapping[str, Any]
    write: Mapping[str, Any]
    write_mode: str | None
    """None: the driver's default."""
    spark: SparkSpec
    restart_policy: str
    max_consecutive_failures: int
    backoff_seconds: int
    max_backoff_seconds: int
    reset_after_seconds: int
    """When a stream's driver has run for this time, the count of failures is reset."""
    driver_start_seconds: int
    active_deadline_seconds: int | None
    termination_grace_seconds: int
    retain_driver: str
    ttl_seconds_after_finished: int
    history_limit: int
    suspend: bool
    rollout: Rollout | None
    fresh_seconds: int | None
    """How old the rows of the shard may become; None without a limit."""
    revision: str

    @property
    def input_shard(self) -> str | None:
        """The name of the PersistShard that the sink reads; None for an input of another type."""
        name: str | None = (self.input.get("shard") or {}).get("name")
        return name

    @property
    def options_secret(self) -> str | None:
        """The Secret with further options of the input; None without one."""
        name: str | None = (self.input.get("format") or self.input.get("python") or {}).get("optionsSecretName")
        return name

    @property
    def code_config_map(self) -> str | None:
        """The ConfigMap with the files of the function that makes the input; None without one."""
        name: str | None = (self.input.get("python") or {}).get("configMapName")
        return name

    @property
    def mounted(self) -> tuple[str, ...]:
        """The objects that the resource makes its driver's pod mount. If one of them is missing in the namespace, the pod does
        not start.
        """
        named = (("Secret", self.options_secret), ("ConfigMap", self.code_config_map))
        return tuple(f"{kind} {name}" for kind, name in named if name is not None)

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> SinkSpec:
        """From a JSON object with defaults filled in."""
        restart, timeouts, cleanup = spec["restart"], spec["timeouts"], spec["cleanup"]
        return cls(
            shard_name=spec["shardRef"]["name"],
            mode=spec["mode"],
            commit_interval_seconds=spec.get("commitIntervalSeconds"),
            schedule=_schedule(spec.get("schedule")),
            input=spec["input"],
            envelope=spec["envelope"],
            write=spec["write"],
            write_mode=spec.get("writeMode"),
            spark=_spark(spec["spark"]),
            restart_policy=restart["policy"],
            max_consecutive_failures=restart["maxConsecutiveFailures"],
            backoff_seconds=restart["backoffSeconds"],
            max_backoff_seconds=restart["maxBackoffSeconds"],
            reset_after_seconds=restart.get("resetAfterSeconds", restart["maxBackoffSeconds"]),
            driver_start_seconds=timeouts["driverStartSeconds"],
            active_deadline_seconds=timeouts.get("activeDeadlineSeconds"),
            termination_grace_seconds=timeouts["terminationGraceSeconds"],
            retain_driver=cleanup["retainDriver"],
            ttl_seconds_after_finished=cleanup["ttlSecondsAfterFinished"],
            history_limit=cleanup["historyLimit"],
            suspend=spec["suspend"],
            rollout=Rollout.of(spec.get("rollout")),
            fresh_seconds=(spec.get("freshness") or {}).get("targetSeconds"),
            revision=names.revision_of(_revised(spec)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sink:
    """A SparkSink as the API server returned it."""

    meta: Meta
    spec: SinkSpec
    status: Mapping[str, Any]
    known: SinkStatus = field(init=False, compare=False, repr=False)
    """The status as a value. Parsed once, because a reconcile reads it several times."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "known", SinkStatus.of(self.status))

    @classmethod
    def of(cls, resource: Mapping[str, Any]) -> Sink:
        """From the JSON object of the resource."""
        return cls(meta=Meta.of(resource), spec=SinkSpec.of(resource["spec"]), status=resource.get("status") or {})


def _revised(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that define a driver. A field of one mode counts only when it is set, so that it changes no revision of the other modes.
    The same is true for a `writeMode` other than the default.
    """
    of_mode = {name: spec[name] for name in ("commitIntervalSeconds",) if spec.get(name) is not None}
    if spec.get("writeMode") not in {None, "ReadWrite"}:
        of_mode["writeMode"] = spec["writeMode"]
    if spec["mode"] == "Streaming" and spec.get("freshness") is not None:
        of_mode["freshness"] = spec["freshness"]  # the driver of a stream reports by this target
    # A place in the queue only concerns the next start, so it must not stop a driver.
    spark = {name: value for name, value in spec["spark"].items() if name != "queuePriority"}
    return {**{name: spec.get(name) for name in _REVISED}, "spark": spark, **of_mode}


def _schedule(spec: Mapping[str, Any] | None) -> Schedule | None:
    if spec is None:
        return None
    return Schedule(
        cron=spec["cron"],
        time_zone=spec["timeZone"],
        starting_deadline_seconds=spec.get("startingDeadlineSeconds"),
    )


def _spark(spec: Mapping[str, Any]) -> SparkSpec:
    return SparkSpec(
        image=spec.get("image"),
        image_pull_policy=spec.get("imagePullPolicy"),
        image_pull_secrets=tuple(spec.get("imagePullSecrets") or ()),
        conf=dict(spec.get("conf") or {}),
        service_account_name=spec.get("serviceAccountName"),
        driver=SparkPod.of(spec["driver"]),
        executor=SparkPod.of(spec["executor"]),
        dynamic=DynamicAllocation.of(spec.get("dynamicAllocation")),
        scheduler=PodScheduler.of(spec.get("scheduler")),
        queue_priority=spec.get("queuePriority", 0),
    )
