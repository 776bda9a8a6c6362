"""A write task fits the memory of its pod. The operator sizes pods by one rule, the driver cuts parts to fit them by another: the
two rules agree, and a real task stays within them.

A task's peak is the whole resident memory of a process of its own (bench.write_task) that has loaded the modules of a Python worker
of Spark. Measured peaks are 60 to 90 percent of the given memory; the rest is the margin.
"""

import sys
from pathlib import Path

import pytest
from persist_engine.base.settings import MIB
from persist_operator.manifests import sink_memory
from persist_spark import memory
from persist_spark.memory import ExecutorMemory

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench import write_task


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "width", "part_mib"), [("corrections", 32, 64), ("corrections", 1024, 16), ("append", 32, 16)]
)
def test_a_write_task_stays_within_the_memory_of_its_pod(tmp_path, kind, width, part_mib):
    """Parts of the default size and smaller ones, enough for the steady state: one is filled while one is sorted and encoded."""
    task = write_task.measured(tmp_path, kind, width=width, part_mib=part_mib, parts=4)
    assert task["parts"] >= 4
    assert task["idle_mib"] < memory.WORKER_MIB
    assert task["peak_mib"] < memory.WORKER_MIB + memory.PARTS_HELD * part_mib
    assert task["peak_mib"] > 2 * part_mib, "the task really held parts of this size"


@pytest.mark.slow
def test_a_task_that_upserts_stays_within_the_memory_of_its_pod(tmp_path):
    """It reads parts of the default size, sixteen times as many rows as it has commands, and holds commands of half a part."""
    task = write_task.measured(tmp_path, "upsert", width=1024, part_mib=64, parts=0.5)
    assert task["peak_mib"] < memory.WORKER_MIB + memory.PARTS_HELD * 64
    assert task["peak_mib"] > 2 * 64, "the task really read and staged parts"


@pytest.mark.parametrize("cores", [1, 2, 8])
@pytest.mark.parametrize("heap_mib", [512, 1024, 4096, 20_000])
@pytest.mark.parametrize("part_mib", [4, 16, 64, 128, 1024])
def test_pods_sized_by_the_operator_hold_parts_of_the_configured_size(cores, heap_mib, part_mib):
    jvm_mib = max(sink_memory.JVM_MIB_MIN, heap_mib * sink_memory.JVM_SHARE)
    overhead = sink_memory._rounded(
        int(jvm_mib) + 1 + cores * (sink_memory.PROCESS_MIB + sink_memory.PARTS_HELD * part_mib)
    )
    pod = ExecutorMemory(heap_mib=heap_mib, overhead_mib=overhead, cores=cores)
    assert pod.fitting_part_bytes(part_mib * MIB) == part_mib * MIB
    less = ExecutorMemory(heap_mib=heap_mib, overhead_mib=overhead // 2, cores=cores)
    assert memory.PART_BYTES_MIN <= less.fitting_part_bytes(part_mib * MIB) <= part_mib * MIB


def test_operator_and_driver_use_the_same_figures():
    ours = (memory.JVM_MIB_MIN, memory.JVM_SHARE, memory.WORKER_MIB, memory.PARTS_HELD)
    assert ours == (sink_memory.JVM_MIB_MIN, sink_memory.JVM_SHARE, sink_memory.PROCESS_MIB, sink_memory.PARTS_HELD)


@pytest.mark.parametrize(
    ("overhead", "cores", "part_mib"),
    [("960m", "1", 64), ("512m", "1", 4), ("1536m", "2", 64), ("800", "1", 37.33), ("2g", "2", 64)],
)
def test_parts_are_smaller_in_pods_with_less_memory(overhead, cores, part_mib):
    conf = {"spark.executor.memory": "1g", "spark.executor.memoryOverhead": overhead, "spark.executor.cores": cores}
    pod = ExecutorMemory.of(conf.get)
    assert pod is not None
    assert pod.fitting_part_bytes(64 * MIB) == pytest.approx(part_mib * MIB, rel=0.001)
    assert ExecutorMemory.of({}.get) is None
