"""A sink with a driver that runs and one of a new revision, for tests of the plan of a rollout."""

from persist_operator.api import names
from persist_operator.api.sink_status import RunningProgress
from persist_operator.plan.actions import PromoteDriver
from persist_operator.plan.observed import Phase

MINUTE = 60_000


class Rollout:
    """A sink whose blue driver runs, and whose spec may change."""

    def __init__(self, world, **rollout):
        self.world = world(
            {
                "mode": "Streaming",
                "rollout": {"strategy": "BlueGreen", **rollout},
                "restart": {"maxConsecutiveFailures": 2},
            }
        )
        self.world.step()
        self.blue = self.world.status["driver"]["podName"]
        self.runs(self.blue, "Streaming")
        self.first = self.world.status["run"]["id"]

    def runs(self, name, stage=None, **numbers):
        """The driver runs and reports this stage."""
        running = None if stage is None else RunningProgress(stage=stage, **numbers)
        self.world.change(name, phase=Phase.RUNNING, started_ms=self.world.now, running=running)
        self.world.step()

    def changed(self, parallelism=7, *, act=True):
        """The spec changes. Returns the plan's start of green."""
        self.world.spec["write"] = {"parallelism": parallelism}
        self.world.step(act=act)
        (start,) = self.world.starts()
        return start

    def asked(self, request, token="1"):
        self.world.metadata = {"annotations": {f"{names.REQUEST_PREFIX}{request}": token}}

    @property
    def green(self):
        return self.world.status["rollout"]["driver"]["podName"]

    @property
    def state(self):
        return self.world.status.get("rollout", {}).get("state")

    @property
    def promoted(self):
        """The drivers that the plan orders to take over."""
        return [one.name for one in self.world.plan.actions if isinstance(one, PromoteDriver)]

    def stopped(self):
        return [one.name for one in self.world.stops()]

    def notes(self):
        return [note.reason for note in self.world.plan.notes]

    def check_ready(self):
        assert self.world.reason("Ready") == ("True", "Running")
