"""Stands in for `persist_spark.main` in the runner's tests: appends one row, once per run id, by the engine's own sink protocol.

Files in the folder `control` of the test control it: `crash` (it ends by SIGKILL before it appends, once), `hold` (after
the append it waits until the file is gone), `refuse` (it fails as under a wrong configuration). Each attempt leaves `attempt-PID`, that of a
stream `stream`, with how it is to run, one with options from a Secret `options`, with its password backwards, and one with a function `code`, with the
names of its files.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from persist_engine.client.client import PersistClient
from persist_engine.client.location import Location
from persist_engine.client.write.outcomes import Appended
from persist_engine.model.frontier import Antichain
from persist_engine.model.ids import ShardId
from persist_engine.rows.schema import Schema


def append_once(spec):
    """Append the row. Returns False if an earlier attempt of this run has appended it."""
    schema, shard_id = Schema.from_ddl(spec["schema"]["key"], spec["schema"]["value"]), ShardId(spec["shard_id"])
    with PersistClient.open(Location(**spec["location"])) as client:
        known = client.progress(shard_id, spec["sink_id"])
        run = spec["run_id"].encode()
        if known is not None and known.token == run:
            return False
        with client.open_writer(shard_id, schema, purpose="test driver") as writer:
            lower = writer.fetch_recent_upper()
            answer = writer.compare_and_append(
                [((("a",), ()), lower.time, 1)],
                expected_upper=lower,
                new_upper=Antichain.of(lower.time + 1),
                progress=(spec["sink_id"], run),
                expected_progress=None if known is None else known.token,
            )
            assert isinstance(answer, Appended), answer
    return True


def main():
    argv = sys.argv[1:]
    spec = json.loads(Path(argv[argv.index("--spec") + 1]).read_text())
    control = Path(__file__).parents[2] / "control"  # see House
    (control / f"attempt-{os.getpid()}").touch()
    print("the driver speaks", flush=True)
    if "--options" in argv:
        (control / "options").write_text((Path(argv[argv.index("--options") + 1]) / "password").read_text()[::-1])
    if "--code" in argv:
        (control / "code").write_text("".join(path.name for path in Path(argv[argv.index("--code") + 1]).iterdir()))
    if "stream" in spec:
        (control / "stream").write_text(json.dumps(spec["stream"]))
    input_upper = None
    if "source" in spec:
        with PersistClient.open(Location(**spec["source"]["location"])) as client:
            input_upper = client.recent_upper(ShardId(spec["source"]["shard_id"])).time
    report = {
        "type": "Sink",
        "outcome": "Succeeded",
        "class": None,
        "message": "one row",
        "run_id": spec["run_id"],
        "upper": None,
        "input_upper": input_upper,
    }
    code = 0
    if (control / "crash").exists():
        (control / "crash").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    if (control / "refuse").exists():
        report |= {"outcome": "Failed", "class": "Configuration", "message": "input is missing"}
        code = 72
    else:
        now = append_once(spec)
        report |= {"rows_read": 1, "updates_written": int(now), "already_done": not now}
        (control / "appended").touch()
    while (control / "hold").exists():
        time.sleep(0.05)
    Path(argv[argv.index("--report") + 1]).write_text(json.dumps(report))
    return code


if __name__ == "__main__":
    sys.exit(main())
