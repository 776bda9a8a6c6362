"""Keeps a write task within the memory that its pod has beside the JVM's heap. Parts are small enough, and freed memory returns to the
system at once. Knows no Spark: the driver reads the pod's memory and passes the part size to the tasks.

    beside the heap   [ JVM: 384 MiB, or a tenth of the heap ][ one worker per core: 192 MiB + 6 parts ] ...

The operator sizes pods by the same rule (`persist_operator.manifests.sink_memory`). Neither imports the other; a test keeps the two equal.
docs/adr/0004-spark.md has the measurements.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pyarrow as pa
from persist_engine.base.settings import MIB

#: The JVM's share of the memory beside the heap (metaspace, code, collector, network): Spark's own rule for pods without Python. Measured:
#: 230 to 260 MiB with a heap of 1 GiB, 320 MiB with 2 GiB.
JVM_MIB_MIN, JVM_SHARE = 384, 0.1
#: The memory of one Python worker before it holds rows: interpreter and libraries.
WORKER_MIB = 192
#: The number of parts that one Python worker holds in memory. It fills one while it sorts and encodes the previous one.
PARTS_HELD = 6
#: The smallest part size, even if the pod has little memory, because many small parts slow down every reader.
PART_BYTES_MIN = 4 * MIB

#: Blocks of at least this size are mapped one by one, and return to the system when they are freed.
_OWN_BLOCK_BYTES = 256 << 10
#: Freed memory at the end of the heap stays up to this size. glibc's 128 KiB are less than a few columns of one record, so the system would
#: take their pages and give them back for each record.
_HEAP_END_BYTES = 8 * MIB
#: Both limits for tasks that only read.
_KEPT_BLOCK_BYTES = 32 * MIB
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_SIZE = re.compile(r"(\d+)([kmgt]?)b?", re.IGNORECASE)
_UNIT_BYTES = {"k": 1 << 10, "": MIB, "m": MIB, "g": 1 << 30, "t": 1 << 40}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorMemory:
    """The memory and cores of an executor's pod."""

    heap_mib: int
    overhead_mib: int
    """The memory beside the heap."""
    cores: int
    """The number of concurrent tasks."""

    @classmethod
    def of(cls, conf: Callable[[str], str | None]) -> ExecutorMemory | None:
        """Reads the values from Spark's configuration. None when they are not set (local mode, or pods that the operator did not size)."""
        overhead, heap = _mib(conf("spark.executor.memoryOverhead")), _mib(conf("spark.executor.memory"))
        if overhead is None or heap is None:
            return None
        return cls(heap_mib=heap, overhead_mib=overhead, cores=int(conf("spark.executor.cores") or 1))

    @property
    def worker_bytes(self) -> int:
        """The memory for one Python worker, if each core has one."""
        jvm_mib = max(JVM_MIB_MIN, self.heap_mib * JVM_SHARE)
        return max(0, int((self.overhead_mib - jvm_mib) * MIB / self.cores))

    def fitting_part_bytes(self, wanted_bytes: int) -> int:
        """The part size with which one task per core fits into the pod: `wanted_bytes` or less, but at least PART_BYTES_MIN."""
        fitting = (self.worker_bytes - WORKER_MIB * MIB) // PARTS_HELD
        return min(wanted_bytes, max(PART_BYTES_MIN, fitting))


def give_back_freed_memory() -> None:
    """Makes this process return freed memory of Arrow and NumPy to the system at once. Idempotent.

    Measured on write tasks: the peak is a quarter lower, the memory after a task is a tenth, and the speed is the same. Allocators that
    keep freed memory keep it in sizes that the next part does not need.
    """
    pa.set_memory_pool(pa.system_memory_pool())
    _set_limits(_OWN_BLOCK_BYTES, _HEAP_END_BYTES)


@contextmanager
def keeping_freed_memory() -> Iterator[None]:
    """Lets this process keep freed memory within the block, for tasks that only read: they need the same sizes for each row group.

    Reading a million rows of a bigint, a text of 32 characters and a bigint takes 70 ms of processor time. Without it, the system gives and
    takes 140 MB of pages, and reading takes 110 ms.
    """
    pa.set_memory_pool(pa.system_memory_pool())
    _set_limits(_KEPT_BLOCK_BYTES, _KEPT_BLOCK_BYTES)
    try:
        yield
    finally:
        give_back_freed_memory()
        with suppress(AttributeError, OSError):
            ctypes.CDLL(None).malloc_trim(0)


def _set_limits(own_block_bytes: int, heap_end_bytes: int) -> None:
    """Sets from which size on glibc maps blocks one by one, and how much freed memory it keeps at the end of the heap. Otherwise it raises
    the first limit each time a larger block is freed, until it keeps all but the largest blocks.
    """
    with suppress(AttributeError, OSError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, own_block_bytes)
        libc.mallopt(_M_TRIM_THRESHOLD, heap_end_bytes)


def _mib(size: str | None) -> int | None:
    """MiB of Spark's `2g`, `512m`, `512`; None for anything else."""
    match = _SIZE.fullmatch((size or "").strip())
    return None if match is None else int(match[1]) * _UNIT_BYTES[match[2].lower()] // MIB
