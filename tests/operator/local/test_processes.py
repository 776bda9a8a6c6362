"""Children: each is started once and found again, and its end is reported."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from persist_engine.base.env import SystemEnv
from persist_engine.base.errors import CorruptData
from persist_operator.local.processes import KILLED, Processes

GO_ON = "import time\nwhile True: time.sleep(0.05)"


@pytest.fixture
def processes(tmp_path):
    made = Processes(tmp_path, SystemEnv())
    yield made
    made.stop([child.name for child in made.every()], grace_s=0)


def start(processes, code, name="one"):
    return processes.start(
        name, [sys.executable, "-c", code], owner="SparkSink/a", labels={"kind": "driver"}, environ=os.environ
    )


def ended(processes, wait_until, name="one"):
    wait_until(lambda: not processes.get(name).running, f"end of {name}")
    return processes.get(name)


def is_alive(pid):
    """Whether the process runs. A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_child_leaves_its_exit_code_report_and_log(processes, wait_until):
    report = "from pathlib import Path; Path('report.json')"
    code = f"import os; os.chdir({str(processes.folder('one'))!r}); {report}.write_text('{{\"outcome\": \"Failed\"}}'); print('output'); raise SystemExit(3)"
    assert start(processes, code)
    child = ended(processes, wait_until)
    assert (child.exit_code, child.report, child.log_tail(5)) == (3, {"outcome": "Failed"}, "output")
    assert child.owner == "SparkSink/a"
    assert child.labels == {"kind": "driver"}
    assert child.ended_ms >= child.started_ms


@pytest.mark.parametrize("text", ["", "{", "[]", '{"owner": "SparkSink/a"}', "null"])
def test_regression_a_file_that_holds_no_record_is_named(processes, wait_until, text):
    """A loss of power can leave a file empty. No command of the folder worked then, and each called it a bug of persist."""
    start(processes, "")
    ended(processes, wait_until)
    path = processes.folder("one") / "child.json"
    path.write_text(text)
    with pytest.raises(CorruptData, match=f"child.json holds no record of a run: .* remove the folder {path.parent}"):
        processes.every()
    path.unlink()
    assert processes.every() == []


@pytest.mark.parametrize("text", ["", "x"])
def test_regression_an_exit_code_that_cannot_be_read_is_that_of_a_killed_child(processes, wait_until, text):
    start(processes, "")
    ended(processes, wait_until)
    for name in ("exit", "pid"):
        (processes.folder("one") / name).write_text(text)
    wait_until(lambda: processes.get("one").exit_code == KILLED, "the supervisor is gone too")
    processes.stop(["one"], grace_s=0)


def test_a_name_is_started_once(processes, wait_until, tmp_path):
    code = f"open({str(tmp_path / 'runs')!r}, 'a').write('x')"
    assert start(processes, code)
    assert not start(processes, code)
    ended(processes, wait_until)
    assert not start(processes, code)
    assert not start(Processes(tmp_path, SystemEnv()), code)
    assert (tmp_path / "runs").read_text() == "x"


def test_a_starter_that_died_before_the_process_left_a_killed_child(processes):
    folder = processes.folder("one")
    (folder / "child.json").write_text('{"owner": "SparkSink/a", "labels": {}, "started_ms": 1}')
    (folder / "log").touch()
    (folder / "lock").touch()
    assert processes.get("one").exit_code == KILLED


def test_a_command_that_cannot_be_run_has_failed(processes, wait_until):
    processes.start("one", ["/no/such/program"], owner="o", labels={}, environ=os.environ)
    child = ended(processes, wait_until)
    assert child.exit_code == 126
    assert "/no/such/program" in child.log_tail(5)


def test_the_exit_code_outlives_the_starter(tmp_path, wait_until):
    child = (
        f"import time, os\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.05)\nraise SystemExit(5)"
    )
    code = (
        "import os, sys; from pathlib import Path; from persist_engine.base.env import SystemEnv\n"
        "from persist_operator.local.processes import Processes\n"
        f"Processes(Path({str(tmp_path)!r}), SystemEnv()).start('one', [sys.executable, '-c', {child!r}], "
        "owner='o', labels={}, environ=os.environ)\n"
        "os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    found = Processes(tmp_path, SystemEnv())
    assert found.get("one").running
    (tmp_path / "go").touch()
    assert ended(found, wait_until).exit_code == 5


def test_a_command_killed_by_a_signal(processes, wait_until):
    start(processes, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert ended(processes, wait_until).exit_code == 128 + signal.SIGKILL


def test_a_child_whose_processes_are_all_gone_was_killed(processes, wait_until):
    start(processes, GO_ON)
    pid_file = processes.folder("one") / "pid"
    wait_until(pid_file.exists, "the supervisor is up")
    os.killpg(int(pid_file.read_text()), signal.SIGKILL)
    assert ended(processes, wait_until).exit_code == KILLED


def test_a_command_that_outlives_its_supervisor_still_runs(processes, wait_until, tmp_path):
    start(processes, f"open({str(tmp_path / 'up')!r}, 'w')\n{GO_ON}")
    wait_until((tmp_path / "up").exists, "the command is up")
    os.kill(int((processes.folder("one") / "pid").read_text()), signal.SIGKILL)
    processes.every()  # reap the supervisor
    assert processes.get("one").running
    processes.stop(["one"], grace_s=0)
    assert processes.get("one").exit_code == KILLED


@pytest.mark.slow
def test_stop_ends_the_whole_group(processes, wait_until, tmp_path):
    grandchild = tmp_path / "grandchild"
    code = (
        "import subprocess, sys, signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        f"process = subprocess.Popen([sys.executable, '-c', {GO_ON!r}])\n"
        f"open({str(grandchild)!r}, 'w').write(str(process.pid)); process.wait()"
    )
    start(processes, code)
    wait_until(lambda: grandchild.exists() and grandchild.read_text(), "the grandchild is up")
    processes.stop(["one"], grace_s=30)
    assert processes.get("one").exit_code == 7
    wait_until(lambda: not is_alive(int(grandchild.read_text())), "end of the grandchild")


@pytest.mark.slow
def test_stop_kills_a_child_that_ignores_sigterm(processes, wait_until, tmp_path):
    up = tmp_path / "up"
    start(processes, f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); open({str(up)!r}, 'w')\n{GO_ON}")
    wait_until(up.exists, "the command is up")
    processes.stop(["one"], grace_s=0.2)
    assert processes.get("one").exit_code == KILLED


def test_stop_reaches_a_child_that_was_only_just_started(processes):
    start(processes, GO_ON)
    processes.stop(["one"], grace_s=30)
    assert processes.get("one").exit_code == 128 + signal.SIGTERM


def test_stop_of_an_ended_or_unknown_child_does_nothing(processes, wait_until):
    start(processes, "")
    ended(processes, wait_until)
    processes.stop(["one", "two"], grace_s=30)
    assert processes.get("one").exit_code == 0
    assert processes.get("two") is None


def test_retired_children_are_left_out_and_keep_their_log(processes, wait_until):
    start(processes, "print('output')")
    start(processes, "", name="two")
    ended(processes, wait_until)
    (processes.folder("one") / "scratch").mkdir()
    processes.retire("one", grace_s=0)
    processes.retire("one", grace_s=0)
    processes.retire("never started", grace_s=0)
    assert [child.name for child in processes.every()] == ["two"]
    assert processes.get("one").log_tail(1) == "output"
    assert not (processes.folder("one") / "scratch").exists()
    assert not start(processes, "")


@pytest.mark.slow
def test_a_discarded_name_is_free_again(processes):
    start(processes, GO_ON)
    processes.discard("one", grace_s=30)
    assert processes.get("one") is None
    assert start(processes, GO_ON)


@pytest.mark.slow
def test_children_come_in_the_order_they_were_started(processes, wait_until):
    for name in ("b", "a"):
        start(processes, "", name=name)
        ended(processes, wait_until, name)
    assert [child.name for child in processes.every()] == ["b", "a"]


def test_a_folder_that_cannot_be_read_is_no_empty_folder(tmp_path):
    """`down` then said that nothing was running."""
    folder = tmp_path / "children"
    processes = Processes(tmp_path, SystemEnv())
    assert processes.every() == []
    folder.symlink_to(folder)  # even root cannot read it
    for look in (processes.every, lambda: processes.forget("SparkSink/a", grace_s=0)):
        with pytest.raises(OSError, match="children"):
            look()


def test_a_broken_report_is_none(processes, wait_until):
    (processes.folder("one") / "report.json").write_text("{half")
    start(processes, "")
    assert ended(processes, wait_until).report is None
