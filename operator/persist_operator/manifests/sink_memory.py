"""The memory of a sink's pods beside the JVM's heap, when the user does not set it.

    executor   [ JVM ][ Python worker ] one for each core, each with the parts that it holds
    driver     [ JVM ][ Python driver ] with the few rows that it writes itself

Write tasks cut their parts to fit into this memory, or into the memory that the user sets (`persist_spark.memory`; neither module imports
the other, a test compares the two). docs/adr/0004-spark.md has the measurements.
"""

from __future__ import annotations

from math import ceil

from persist_operator.api import quantity
from persist_operator.api.sink import SinkSpec, SparkPod

_MIB = 1 << 20
#: Memory of the JVM itself (metaspace, code, collector, network), by Spark's own rule for pods without Python.
JVM_MIB_MIN, JVM_SHARE = 384, 0.1
#: Memory of a Python process without rows: interpreter and libraries.
PROCESS_MIB = 192
#: Memory of a write task's rows, in parts of `write.targetBatchBytes`. One part is filled while the former part is sorted and encoded.
PARTS_HELD = 6
#: Memory of a driver's rows. A driver that lost a race reads the newer rows and stages them, in parts of at most 16 MiB.
DRIVER_ROWS_MIB = 160
#: Memory of the Python process of a driver.
DRIVER_MIB = PROCESS_MIB + DRIVER_ROWS_MIB
#: Sums are rounded up to a multiple of this, for sizes that are easy to read.
_STEP_MIB = 64


def executor_overhead_mib(spec: SinkSpec) -> int:
    """Memory overhead of an executor: the user's value, else the need of a write task on every core."""
    pod = spec.spark.executor
    return _given(pod) or _rounded(jvm_mib(pod) + pod.cores * worker_mib(spec))


def driver_overhead_mib(spec: SinkSpec) -> int:
    """Memory overhead of a driver: the user's value, else the need of the driver, which does not depend on the number of executors."""
    pod = spec.spark.driver
    return _given(pod) or overhead_mib(quantity.to_mebibytes(pod.memory), DRIVER_MIB)


def overhead_mib(heap_mib: int, python_mib: int) -> int:
    """Memory overhead of a pod with a JVM of this heap, beside which Python takes `python_mib`."""
    return _rounded(_jvm_mib(heap_mib) + python_mib)


def local_mib(spec: SinkSpec, *, workers: int) -> int:
    """Memory of a local driver, which is its own executors, with this number of Python workers: heaps, JVM, driver and workers."""
    heap_mib = local_heap_mib(spec)
    return heap_mib + _jvm_mib(heap_mib) + PROCESS_MIB + workers * worker_mib(spec)


def local_heap_mib(spec: SinkSpec) -> int:
    """Heap of a local driver. One process is the driver and all executors, so it gets the sum of their heaps."""
    driver, executor = spec.spark.driver, spec.spark.executor
    return quantity.to_mebibytes(driver.memory) + executor.instances * quantity.to_mebibytes(executor.memory)


def worker_mib(spec: SinkSpec) -> int:
    """Memory of the Python worker of one write task."""
    part_bytes = quantity.to_bytes(spec.write["targetBatchBytes"])
    return PROCESS_MIB + -(-PARTS_HELD * part_bytes // _MIB)


def jvm_mib(pod: SparkPod) -> int:
    """Memory of a pod's JVM beside its heap."""
    return _jvm_mib(quantity.to_mebibytes(pod.memory))


def _jvm_mib(heap_mib: int) -> int:
    return max(JVM_MIB_MIN, ceil(heap_mib * JVM_SHARE))


def _given(pod: SparkPod) -> int | None:
    return None if pod.memory_overhead is None else quantity.to_mebibytes(pod.memory_overhead)


def _rounded(mib: int) -> int:
    return -(-mib // _STEP_MIB) * _STEP_MIB
