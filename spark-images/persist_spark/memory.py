"""How a write task keeps within the memory that its pod leaves beside the JVM's heap: parts cut small enough, and memory
that goes back to the system when it is free. Knows no Spark: the driver looks up what the pod has, tasks are told.

    beside the heap   [ JVM: 384 MiB, or a tenth of the heap ][ one worker per core: 192 MiB + 6 parts ] ...

The operator makes pods by the same rule (`persist_operator.manifests.sink_memory`; neither imports the other, a test holds
the two together); docs/adr/0004-spark.md has the measurements.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa
from persist_engine.base.settings import MIB

#: Of the memory beside the heap, for the JVM itself (metaspace, code, collector, network): Spark's own rule for pods
#: without Python. Measured: 230 to 260 MiB of 1 GiB heap, 320 of 2 GiB.
JVM_MIB_MIN, JVM_SHARE = 384, 0.1
#: Of one Python worker, before it holds rows: interpreter and libraries.
WORKER_MIB = 192
#: Of one Python worker, so many parts: one is filled while the one before is sorted and encoded.
PARTS_HELD = 6
#: Parts are not cut smaller than this, however little the pod has: too many of them are every reader's burden.
PART_BYTES_MIN = 4 * MIB

#: Blocks from this size on come from the system one by one, and go back to it when they are freed.
_OWN_BLOCK_BYTES = 256 << 10
_M_MMAP_THRESHOLD = -3
_SIZE = re.compile(r"(\d+)([kmgt]?)b?", re.IGNORECASE)
_UNIT_BYTES = {"k": 1 << 10, "": MIB, "m": MIB, "g": 1 << 30, "t": 1 << 40}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorMemory:
    """What an executor's pod has."""

    heap_mib: int
    overhead_mib: int
    """Beside the heap."""
    cores: int
    """Tasks at once."""

    @classmethod
    def of(cls, conf: Callable[[str], str | None]) -> ExecutorMemory | None:
        """As Spark's configuration says; None when it does not (local mode, or pods that others size)."""
        overhead, heap = _mib(conf("spark.executor.memoryOverhead")), _mib(conf("spark.executor.memory"))
        if overhead is None or heap is None:
            return None
        return cls(heap_mib=heap, overhead_mib=overhead, cores=int(conf("spark.executor.cores") or 1))

    def fitting_part_bytes(self, wanted_bytes: int) -> int:
        """The size of parts with which a task on every core fits: what is wanted, or less, but no less than
        PART_BYTES_MIN.
        """
        jvm_mib = max(JVM_MIB_MIN, self.heap_mib * JVM_SHARE)
        worker_mib = (self.overhead_mib - jvm_mib) / self.cores
        fitting = int((worker_mib - WORKER_MIB) * MIB / PARTS_HELD)
        return min(wanted_bytes, max(PART_BYTES_MIN, fitting))


def give_back_freed_memory() -> None:
    """Have this process return what Arrow and NumPy free to the system at once. Idempotent.

    Measured on write tasks: the peak is a quarter lower, and what is left after a task a tenth, at the same speed.
    Allocators that keep what was freed keep it in sizes that the next part does not ask for.
    """
    pa.set_memory_pool(pa.system_memory_pool())
    try:
        # By itself glibc raises the threshold whenever a larger block is freed, until all but the largest stay.
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _OWN_BLOCK_BYTES)
    except (AttributeError, OSError):  # another C library
        return


def _mib(size: str | None) -> int | None:
    """MiB of Spark's `2g`, `512m`, `512`; None for anything else."""
    match = _SIZE.fullmatch((size or "").strip())
    return None if match is None else int(match[1]) * _UNIT_BYTES[match[2].lower()] // MIB
