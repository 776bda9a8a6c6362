"""How much memory the pods of a sink get beside the JVM's heap, where the user does not say.

    executor   [ JVM ][ Python worker ] one for each core, each with the parts that it holds
    driver     [ JVM ][ Python driver ] with the few rows that it writes itself

Write tasks cut parts to fit what is given here, or what the user gives (`persist_spark.memory`; neither imports the
other, a test holds the two together). docs/adr/0004-spark.md has the measurements.
"""

from __future__ import annotations

from math import ceil

from persist_operator.api import quantity
from persist_operator.api.sink import SinkSpec, SparkPod

_MIB = 1 << 20
#: The JVM itself (metaspace, code, collector, network), by Spark's own rule for pods without Python.
JVM_MIB_MIN, JVM_SHARE = 384, 0.1
#: A Python process before it holds rows: interpreter and libraries.
PROCESS_MIB = 192
#: Of a write task, so many parts of `write.targetBatchBytes`: one is filled while the one before is sorted and encoded.
PARTS_HELD = 6
#: A driver that lost a race reads what came since and stages it, in parts of at most 16 MiB.
DRIVER_ROWS_MIB = 160
#: Sums are rounded up to this: sizes that people read.
_STEP_MIB = 64


def executor_overhead_mib(spec: SinkSpec) -> int:
    """As the user gives it, else what a write task on every core may take."""
    pod = spec.spark.executor
    return _given(pod) or _rounded(jvm_mib(pod) + pod.cores * worker_mib(spec))


def driver_overhead_mib(spec: SinkSpec) -> int:
    """As the user gives it, else what the driver may take, however many executors there are."""
    pod = spec.spark.driver
    return _given(pod) or _rounded(jvm_mib(pod) + PROCESS_MIB + DRIVER_ROWS_MIB)


def local_mib(spec: SinkSpec, *, workers: int) -> int:
    """What a driver takes that is its own executors, with so many Python workers: heaps, JVM, driver and workers."""
    heap_mib = local_heap_mib(spec)
    return heap_mib + _jvm_mib(heap_mib) + PROCESS_MIB + workers * worker_mib(spec)


def local_heap_mib(spec: SinkSpec) -> int:
    """One process is driver and executors: it gets the heaps of all of them."""
    driver, executor = spec.spark.driver, spec.spark.executor
    return quantity.to_mebibytes(driver.memory) + executor.instances * quantity.to_mebibytes(executor.memory)


def worker_mib(spec: SinkSpec) -> int:
    """Of the Python worker of one write task."""
    part_bytes = quantity.to_bytes(spec.write["targetBatchBytes"])
    return PROCESS_MIB + -(-PARTS_HELD * part_bytes // _MIB)


def jvm_mib(pod: SparkPod) -> int:
    """Of a pod's JVM beside its heap."""
    return _jvm_mib(quantity.to_mebibytes(pod.memory))


def _jvm_mib(heap_mib: int) -> int:
    return max(JVM_MIB_MIN, ceil(heap_mib * JVM_SHARE))


def _given(pod: SparkPod) -> int | None:
    return None if pod.memory_overhead is None else quantity.to_mebibytes(pod.memory_overhead)


def _rounded(mib: int) -> int:
    return -(-mib // _STEP_MIB) * _STEP_MIB
