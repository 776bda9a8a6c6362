"""The process behind a SQL catalog: `python -m persist_spark.catalog.main`. The catalog in the JVM starts it and sends it requests.

It reads one line of JSON from its standard input, the stores of the catalog, and writes one line, the address of its desk. It ends when its
standard input ends, which is open as long as the JVM lives, even if the JVM is killed. Then it releases all leases, unless a store does not
answer in time.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from persist_engine import Location
from persist_engine.base.env import SystemEnv

from persist_spark.catalog.desk import Desk
from persist_spark.catalog.tables import Tables
from persist_spark.held_frames import HeldFrames
from persist_spark.keeper import Keeper
from persist_spark.partitions import sink_settings
from persist_spark.spec import TARGET_PART_BYTES


class _Parent:
    """The session for the keeper. It ends when the standard input ends. The JVM reports its dead frames at the desk."""

    def is_over(self) -> bool:
        return False

    def dead_frames(self) -> Sequence[str]:
        return ()


def main() -> None:
    """Serves until the standard input ends."""
    # Ctrl-C must cancel only a statement of the shell that the JVM runs, not the catalog.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stores = json.loads(sys.stdin.readline())
    held = HeldFrames(settings=sink_settings(TARGET_PART_BYTES), env=SystemEnv())
    keeper = Keeper(_Parent(), held)
    try:
        tables = Tables(Location(**stores), held, keeper=keeper.address)
        address = Path(keeper.address).with_name("catalog")
        desk = Desk(tables, address)
        keeper.on_close = tables.disconnect
        print(json.dumps({"desk": str(address)}), flush=True)  # noqa: T201 - the protocol
        sys.stdin.read()
        desk.close()
    finally:
        keeper.close_at_exit()


if __name__ == "__main__":
    main()
