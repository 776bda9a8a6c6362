"""Put each bug of the specification's list back, and see that its tests fail.

    uv run python tests/regressions/put_back.py [number ...]

Works on a copy of the engine. Prints one line for each bug; exits with 1 when one of them goes unnoticed or can no longer
be planted, because the code it changes has moved on: then its entry here has to follow.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Bug:
    """`name` as in README.md. `edits`: (file, what stands there, what stood there with the bug)."""

    name: str
    edits: tuple[tuple[str, str, str], ...]
    tests: tuple[str, ...]


def bug(name: str, file: str, now: str, then: str, *tests: str) -> Bug:
    return Bug(name, ((file, now, then),), tests)


FAULT = "tests/fault/test_unknown_outcomes.py::"
GIVEN_UP = FAULT + "test_regression_1_what_may_have_been_linked_stays_when_retrying_ends"
BAD = "tests/badinput/test_regressions.py::"
MODEL = "tests/engine/model/"
STORIES = "tests/regressions/test_stories.py::"

BUGS = (
    bug(
        "1a",
        "shard/versions.py",
        "if winner.birth != state.birth and all(rollup.key != key for rollup in winner.rollups.values()):",
        "if winner is not None:",
        FAULT + "test_regression_1a_the_first_rollup_survives_an_init_of_unknown_outcome",
    ),
    bug(
        "1b",
        "shard/machine.py",
        "lambda unknown, known: unknown if unknown.outcome.applied else known,",
        "lambda unknown, known: known,",
        FAULT + "test_regression_1b_a_merge_result_of_unknown_outcome_counts_as_applied",
    ),
    bug(
        "1c",
        "shard/machine.py",
        "lambda unknown, known: unknown if unknown.applied else known,",
        "lambda unknown, known: known,",
        FAULT + "test_regression_1c_a_rollup_that_was_linked_and_replaced_before_the_retry_counts_as_linked",
    ),
    Bug(
        "1a (given up)",
        (
            (
                "client/write/handle.py",
                "        except InvalidUsage:\n            self._discard_all(own)\n            raise\n        except BaseException",
                "        except (InvalidUsage, Unavailable):\n            self._discard_all(own)\n            raise\n"
                "        except BaseException",
            ),
            ("client/write/handle.py", "    SchemaMismatch,\n)", "    SchemaMismatch,\n    Unavailable,\n)"),
        ),
        (GIVEN_UP + "[_append_doubtful_copy]",),
    ),
    bug(
        "1b (given up)",
        "work/compact.py",
        "        answer, maintenance = machine.apply_merge_res(MergeRes(output, chunk.input, replaced, chunk.run_ids))\n",
        "        try:\n"
        "            answer, maintenance = machine.apply_merge_res(MergeRes(output, chunk.input, replaced, chunk.run_ids))\n"
        "        except BaseException:\n            writer.abandon()\n            raise\n",
        GIVEN_UP + "[_compact]",
    ),
    bug(
        "1c (given up)",
        "work/rollup.py",
        "    answer, maintenance = machine.add_rollup(state.seqno, HollowRollup(key, size_bytes))\n",
        "    try:\n        answer, maintenance = machine.add_rollup(state.seqno, HollowRollup(key, size_bytes))\n"
        "    except BaseException:\n        machine.versions.delete_rollup(machine.shard_id, key)\n        raise\n",
        GIVEN_UP + "[_roll_up]",
    ),
    bug(
        "2",
        "model/append.py",
        "    if cmd.token == writer.most_recent_write_token:\n",
        "    if False:\n",
        FAULT + "test_regression_2_an_append_of_unknown_outcome_happens_exactly_once",
        "tests/datadriven/test_machine.py::test_script[append_unknown_outcome]",
    ),
    bug(
        "3",
        "shard/machine.py",
        "        state = self.refresh()\n        if command.progress is not None:\n",
        "        state = self.state\n        if command.progress is not None:\n",
        FAULT + "test_regression_3_a_stale_cache_never_refuses_an_append",
    ),
    bug(
        "4",
        "work/gc.py",
        "        for seqno in rollups:\n            if walk.seqno < seqno:\n",
        "        for seqno in rollups if walk.seqno == rollups[0] else []:\n            if walk.seqno < seqno:\n",
        "tests/engine/work/test_gc.py::test_regression_4_gc_killed_at_any_call_is_completed_by_the_next",
    ),
    bug(
        "5",
        "work/gc.py",
        "            upto = held if upto is None else upto\n",
        '            upto = held if upto is None else upto\n            assert upto >= rollup_seqnos(state)[0], "behind"\n',
        "tests/engine/work/test_gc.py::test_regression_5_a_request_behind_what_was_collected_does_nothing",
    ),
    bug(
        "6",
        "work/gc.py",
        "    for key in _named(garbage, walk.state) | _named(garbage, newest):\n        del garbage[key]\n",
        "",
        STORIES + "test_regression_6_a_part_that_a_stale_result_brought_back_is_not_collected",
    ),
    bug(
        "7",
        "shard/log_reader.py",
        "        live = self._scan(shard_id, SeqNo(0), limit)\n        if len(live) < limit:\n",
        "        live = self._scan(shard_id, SeqNo(0), SCAN_ALL)\n        if live or not live:\n",
        "tests/engine/shard/test_versions.py::test_regression_7_scans_are_bounded_when_a_newer_rollup_exists",
        "tests/datadriven/test_rollup.py::test_script[bounded_scan]",
    ),
    Bug(
        "8",
        (
            (
                "storage/consensus_sqlite.py",
                '"DELETE FROM consensus WHERE shard = ? AND sequence_number < ?"',
                '"UPDATE consensus SET data = NULL WHERE shard = ? AND sequence_number < ?"',
            ),
            ("storage/consensus_sqlite.py", "    data BLOB NOT NULL,\n", "    data BLOB,\n"),
            (
                "storage/consensus_sqlite.py",
                'WHERE shard = ? AND sequence_number >= ? "',
                'WHERE shard = ? AND sequence_number >= ? AND data IS NOT NULL "',
            ),
        ),
        (STORIES + "test_regression_8_what_was_truncated_does_not_slow_scans_down",),
    ),
    Bug(
        "9",
        (
            ("client/read/handle.py", "self._pins = Pins()", "self._pins, self._first = Pins(), machine.state.seqno"),
            ("client/read/handle.py", "self._pins.oldest(self._machine.state.seqno)", "self._pins.oldest(self._first)"),
        ),
        (BAD + "test_regression_9_a_reader_that_is_only_kept_does_not_hold_back_collection",),
    ),
    Bug(
        "10",
        (
            (
                "model/diff/trace_diff.py",
                "        out = Trace.unflatten(apply_flat(trace.flatten(), diff))\n",
                "        raise\n        out = trace\n",
            ),
        ),
        (
            MODEL
            + "test_state_diff.py::test_regression_10_empties_that_were_grouped_otherwise_are_regrouped_by_the_full_path",
        ),
    ),
    bug(
        "11",
        "model/spine/edit.py",
        "        if new.is_empty():\n            lowest",
        "        if False:\n            lowest",
        BAD + "test_regression_11_empty_appends_do_not_pile_up",
        "tests/datadriven/test_spine.py::test_script[empty_fused]",
    ),
    bug(
        "12",
        "model/spine/edit.py",
        "            work = max(level.merge.remaining_work - fuel, 0)\n",
        "            work = sum(batch.rows for batch in level.batches) - (sum(batch.rows for batch in level.batches) "
        "- level.merge.remaining_work) - fuel\n",
        BAD + "test_regression_12_merges_go_on_after_a_compaction_shrank_their_inputs",
        "tests/datadriven/test_spine.py",
    ),
    bug(
        "13",
        "model/spine/merge.py",
        "        if res.output.rows > Sizes.total(replaced).rows:\n",
        "        if False:\n",
        STORIES + "test_regression_13_a_result_with_more_updates_than_it_replaces_is_rejected",
    ),
    bug(
        "13 (since)",
        "model/spine/merge.py",
        "        if not res.output.desc.since <= batch.desc.since:\n",
        "        if False:\n",
        MODEL + "test_merge_result.py::test_regression_13_a_since_behind_is_fine_and_ahead_is_not",
    ),
    bug(
        "14",
        "model/spine/compaction_plan.py",
        "            cost = sum(run.memory_bytes for run in found)\n",
        "            cost = sum(run.memory_bytes for run in found) or self._target\n",
        MODEL + "test_compaction_plan.py::test_regression_14_a_run_costs_its_largest_part_and_an_empty_input_nothing",
    ),
    bug(
        "15",
        "work/compact.py",
        "                delete_parts(machine, output.parts)\n            self._records",
        "                delete_parts(machine, [*output.parts, *(part for each in replaced for part in each.parts)])\n"
        "            self._records",
        STORIES + "test_regression_15_a_result_that_is_not_applied_takes_its_own_blobs_with_it_and_no_others",
    ),
    bug(
        "16",
        "model/spine/compaction_plan.py",
        "desc = Description(oldest.desc.lower, newest.desc.upper, self._request.desc.since)",
        "desc = Description(oldest.desc.lower, newest.desc.upper, oldest.desc.since)",
        BAD + "test_regression_16_compaction_writes_the_since_it_was_asked_for",
        "tests/datadriven/test_compaction.py::test_script[regression_16_since_of_outputs]",
    ),
    bug(
        "17",
        "rows/sorting.py",
        "words: Words = values.to_numpy().astype(np.int64, copy=False).view(np.uint64) ^ _SIGN",
        "words: Words = values.to_numpy().astype(np.int64, copy=False).view(np.uint64).byteswap()",
        "tests/properties/test_order_properties.py::test_order_and_equality_are_those_of_rows",
    ),
    bug(
        "18",
        "client/write/batch.py",
        "        rows = [sum(part.rows for part in run) for run in runs]\n",
        "        runs = [tuple(part for run in runs for part in run)]\n"
        "        rows = [sum(part.rows for part in run) for run in runs]\n",
        BAD + "test_regression_18_parts_that_do_not_follow_one_another_are_runs_of_their_own",
    ),
    bug(
        "19",
        "parts/fetch.py",
        "max(self.as_of + 1, self.lower)",
        "self.as_of + 1",
        BAD + "test_regression_19_a_listener_gets_no_row_twice_when_batches_merge_behind_it",
    ),
    bug(
        "20",
        "model/spine/merge.py",
        "    if any(meta.truncated for batch in (*batches, output) for meta in batch.run_metas):\n        return\n",
        "",
        MODEL + "test_merge_result.py::test_regression_20_sums_of_truncated_runs_prove_nothing",
        BAD + "test_regression_20_rows_cut_off_by_truncation_are_neither_read_nor_counted_against_a_compaction",
    ),
    bug(
        "21",
        "model/batch.py",
        "        if upper != desc.upper:\n",
        "        if False:\n",
        "tests/engine/client/test_write.py::test_regression_21_a_rewritten_batch_may_not_be_cut",
    ),
    bug(
        "22",
        "model/transitions.py",
        "    return Refused(answer) if is_tombstone(state) else Applied(after, answer)\n",
        "    return Refused(answer) if is_tombstone(state) else Applied(with_held_since(after), answer)\n",
        "tests/engine/client/test_since.py::test_regression_22_expiring_leaves_the_since_where_it_was",
        "tests/datadriven/test_machine.py::test_script[leased_readers]",
    ),
    bug(
        "23",
        "model/transitions.py",
        "    if before is None:\n        return Refused(c.SinceDowngraded(EMPTY))\n",
        '    if before is None:\n        raise Fenced("reader expired: did the machine sleep")\n',
        "tests/engine/shard/test_machine.py::test_regression_23_a_lapsed_reader_gets_an_empty_since_and_others_keep_theirs",
        "tests/datadriven/test_machine.py::test_script[leased_readers]",
    ),
    bug(
        "24",
        "model/diff/state_diff.py",
        '            count("hostname_mismatch")\n',
        '            raise InvariantViolated("hostname")\n',
        MODEL + "test_state_diff.py::test_regression_24_a_wrong_host_name_is_taken_and_counted",
    ),
    bug(
        "25",
        "shard/roundtrip.py",
        "    if found.structured and wanted.structured:\n        return found == wanted\n",
        "    if found or wanted:\n        return found == wanted\n",
        "tests/engine/shard/test_roundtrip.py::"
        "test_regression_25_a_trace_rebuilt_into_other_levels_passes_when_it_was_flat",
    ),
    bug(
        "26",
        "work/audit/usage.py",
        "                if machine is None:\n",
        "                if False:\n",
        "tests/engine/work/test_usage.py::"
        "test_regression_26_blobs_of_a_shard_that_consensus_does_not_know_are_all_leaked",
    ),
    bug(
        "27",
        "model/step.py",
        "version = state.applier_version if was_tombstone else max(state.applier_version, applier_version, key=parse_version)",
        "version = state.applier_version if was_tombstone else applier_version",
        MODEL + "test_step.py::test_regression_27_the_mark_of_the_highest_writer_never_steps_back",
    ),
    bug(
        "28",
        "model/step.py",
        "version = state.applier_version if was_tombstone else max(",
        "version = max(",
        MODEL + "test_step.py::test_regression_28_tombstones_are_collected_and_rolled_up_at_once_and_carry_no_version",
    ),
    bug(
        "29",
        "base/retry.py",
        "        if is_long or self.attempts >= self._settings.warn_attempts:\n",
        "        if False:\n",
        "tests/engine/base/test_retry.py::test_regression_29_warns_once_attempts_are_many",
    ),
    bug(
        "30 (leak)",
        "flow/append.py",
        "            return [*out, Delete((batch,))]\n",
        "            return out\n",
        "tests/datadriven/test_sink.py::test_script[regression_30_stale_batches_leak]",
    ),
    bug(
        "30 (growth)",
        "flow/write.py",
        "bug 30).\n        self._buffer.consolidate_at_since()\n",
        "bug 30).\n",
        "tests/datadriven/test_sink.py::test_script[regression_30_read_only_growth]",
    ),
    bug(
        "30 (lost append)",
        "flow/append.py",
        "        if not current < commit.lower:\n            out += self._raise_lower(current)\n",
        '        check(current < commit.lower, "the append was lost")\n',
        "tests/datadriven/test_sink.py::test_script[regression_30_lost_append]",
    ),
    bug(
        "30 (since ahead of upper)",
        "dataflow/sink/readback.py",
        "            self._whole = whole\n            yield self._progress(upper)\n",
        "            self._whole = whole\n            yield self._progress(upper.join(since))\n",
        "tests/engine/dataflow/test_sink.py::test_no_relation_of_since_upper_and_as_of_hangs[9-4-6]",
    ),
    bug(
        "31",
        "flow/upsert.py",
        "        before = self._state.multi_get(distinct)\n",
        "        before = self._state.multi_get(distinct[:0])\n",
        "tests/engine/flow/test_upsert.py",
    ),
    bug(
        "32",
        "flow/upsert.py",
        "(known_order >= orders)",
        "(known_order > orders)",
        "tests/engine/flow/test_upsert.py::test_bug_32_a_replay_with_an_equal_order_key_flips_nothing",
    ),
    bug(
        "33",
        "parts/consolidate.py",
        "takes_rest=holding_up is None",
        "takes_rest=True",
        "tests/engine/parts/test_consolidate.py::test_merge_equals_a_dictionary_for_every_cut_and_window",
    ),
    bug(
        "34",
        "shard/applier.py",
        "                before, decided_ms = self.state, env.now_ms()\n",
        "                before = self.state\n"
        "                decided_ms = self.__dict__.setdefault('now', {}).setdefault(id(command), env.now_ms())\n",
        "tests/engine/shard/test_machine.py::test_regression_34_the_clock_is_read_on_every_attempt",
    ),
    bug(
        "35",
        "parts/listings.py",
        "    return [wave for wave in (parts, *reversed(levels)) if wave]\n",
        "    return [wave for wave in (*levels, parts) if wave]\n",
        "tests/engine/parts/test_listings.py::test_regression_an_interrupted_deletion_of_a_run_still_finds_its_children",
    ),
)


def planted(found: Bug, folder: Path) -> str | None:
    """Edit the copy in `folder`; what stands in the way, or None."""
    for file, now, then in found.edits:
        path = folder / "persist_engine" / file
        text = path.read_text()
        if text.count(now) != 1:
            return f"{file} holds {text.count(now)} times: {now.strip()[:60]}"
        path.write_text(text.replace(now, then))
    return None


def ran(tests: tuple[str, ...], folder: Path) -> list[str]:
    """Those of `tests` that pass on the engine in `folder`."""
    passing = []
    for test in tests:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout=60", test]
        env = {**os.environ, "PYTHONPATH": str(folder)}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        if done.returncode != 1:  # 1: tests ran, and some failed
            passing.append(f"{test} (exit {done.returncode})")
    return passing


def main(names: list[str]) -> int:
    failures = 0
    for found in BUGS:
        if names and found.name.split()[0].rstrip("abc") not in names:
            continue
        with tempfile.TemporaryDirectory(prefix="persist-put-back-") as scratch:
            folder = Path(scratch)
            shutil.copytree(ROOT / "engine" / "persist_engine", folder / "persist_engine")
            obstacle = planted(found, folder)
            unnoticed = [] if obstacle else ran(found.tests, folder)
        verdict = (
            f"cannot be planted: {obstacle}"
            if obstacle
            else ("unnoticed by " + ", ".join(unnoticed) if unnoticed else "noticed")
        )
        failures += bool(obstacle or unnoticed)
        sys.stdout.write(f"bug {found.name}: {verdict}\n")
        sys.stdout.flush()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
