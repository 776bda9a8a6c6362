"""The actor that recovers the log after consensus lost it, or to go back to an older version, while other processes continue."""

from __future__ import annotations

from functools import partial

from persist_engine.base.errors import ForkedLog, InvalidUsage, MissingBlob, ShardNotFound, Unavailable
from persist_engine.work.repair.recover import recover_shard
from persist_engine.work.repair.restore import restore_shard

from persist_kit.sim.actors.actor import Actor, Host
from persist_kit.sim.calls import Recovering

#: How long it waits for a disaster to end.
_DISASTER_MS = 300


class Recoverer(Actor):
    """Runs recoveries, each in its own process, while all other processes continue. Some recoveries are killed."""

    def open(self) -> None:
        """Each command opens what it needs."""

    def operate(self) -> None:
        """Recovers the log if it is lost, perhaps tries to if it is not, or goes back to the version of a rollup."""
        scheduler = self.history.scheduler
        scheduler.pause(self.rng.choice([0, 50, 200]))
        if not self.history.branches.may_recover():
            scheduler.pause(_DISASTER_MS)
            if not self.history.branches.may_recover():
                return
        ended = self.history.visit(self.name, self._recover)
        if self.rng.random() < 0.3:
            process = self.history.guest
            scheduler.later(self.rng.uniform(0, 40), lambda: scheduler.kill(process))
        ended.wait()

    def _recover(self, host: Host) -> None:
        branches, versions, shard_id = self.history.branches, host.client.versions, self.history.shard_id
        recover = partial(recover_shard, versions, shard_id, replace_log=True)
        rollup = None
        try:
            found = recover(commit=False)
            if not found.needed and self.rng.random() < 0.5:
                whole = [each.key for each in (found.base, *found.others) if each.seqno > 1]
                rollup = self.rng.choice(whole) if whole else None
            with self.history.scheduler.doing(Recovering(rollup, branches.main.rollups_there())):
                found = recover(commit=True, rollup=rollup)
            self.history.scheduler.note(f"recovered {found.seqno} from {found.base.key}, needed {found.needed}")
            if self.history.plan.keeps_blobs:
                restore_shard(versions, shard_id, commit=True)
        except (ShardNotFound, MissingBlob, InvalidUsage, Unavailable) as error:
            self.history.scheduler.note(f"not recovered: {error}")
        except ForkedLog as error:  # another recovery has begun the log anew
            if branches.recovered < 2:
                raise
            self.history.scheduler.note(f"not restored: {error}")
