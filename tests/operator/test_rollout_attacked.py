"""Rollouts beside a driver that runs, while drivers are killed and the operator is killed between any two of its steps."""

import random

import pytest
from persist_kit.depth import draws
from persist_operator.api.sink_status import RunningProgress
from persist_operator.plan.actions import PromoteDriver, StartDriver, StopRun
from persist_operator.plan.observed import Phase

ATTACKS, CALM = 60, 400


class Field:
    """A sink with its drivers, as they behave: one on standby writes only when it was ordered to, and the shard lets only the last one that
    took over commit.
    """

    def __init__(self, world, dice):
        self.world = world({"mode": "Streaming", "rollout": {"strategy": "BlueGreen"}})
        self.dice, self.writer, self.ordered, self.switches = dice, None, set(), 0
        self.asked = {}
        """The drivers that were asked to end, and whether each does."""

    def alive(self):
        return {name: run for name, run in self.world.runs.items() if not run.phase.finished}

    def drivers_go_on(self):
        """Each driver that lives takes a step of its own."""
        for name, run in self.alive().items():
            stage = None if run.running is None else run.running.stage
            if run.phase is Phase.PENDING:
                hears = self.dice.random() < 0.7
                self.world.change(name, phase=Phase.RUNNING, started_ms=self.world.now, hears_stop=hears)
            elif self.asked.get(name) and self.dice.random() < 0.3:
                report = {"outcome": "Stopped", "batches": 1, "message": "stopped"}
                self.world.change(name, phase=Phase.SUCCEEDED, finished_ms=self.world.now, exit_code=0, report=report)
            elif name in self.asked and stage != "Streaming":
                continue
            elif stage == "Streaming" and self.writer != name:
                self.dies(name, exit_code=71, report={"outcome": "Failed", "class": "Fenced", "message": "fenced"})
            elif stage == "Streaming":
                continue
            elif not run.stands_by or name in self.ordered:
                self.writer, self.switches = name, self.switches + 1
                self.says(name, "Streaming")
            else:
                self.says(name, self.dice.choice(["StandingBy", "Proven", "Proven"]))

    def says(self, name, stage):
        self.world.change(name, running=RunningProgress(stage=stage, compared=5, missing=0, extra=0, lag_seconds=0))

    def dies(self, name, **changes):
        values = {"phase": Phase.FAILED, "finished_ms": self.world.now, "exit_code": 1, "reason": "Error", **changes}
        self.world.change(name, **values)

    def operator_goes_on(self, *, after=1000, dies=False):
        """One reconcile: the status, then the actions one by one. An operator that dies leaves out some of this."""
        before = self.world.status
        actions = self.world.step(after=after, act=False).actions
        done = self.dice.randrange(-1, len(actions) + 1) if dies else len(actions)
        if done < 0:
            self.world.status = before
        for action in actions[: max(0, done)]:
            self.carry_out(action)

    def carry_out(self, action):
        runs = self.world.runs
        if isinstance(action, StopRun) and action.asks and action.name in self.alive():
            assert runs[action.name].hears_stop
            self.asked.setdefault(action.name, self.dice.random() < 0.8)
        elif isinstance(action, StopRun):
            runs.pop(action.name, None)
        elif isinstance(action, StartDriver):
            runs.setdefault(action.name, self.world.driver(action))
        elif isinstance(action, PromoteDriver) and action.name in runs:
            assert runs[action.name].stands_by
            self.ordered.add(action.name)
        plain = [name for name, run in self.alive().items() if not run.is_on_standby]
        assert len(plain) <= 2, "beside the driver that writes there is at most the one that it replaces"

    def attacked(self):
        for _ in range(ATTACKS):
            self.drivers_go_on()
            if self.dice.random() < 0.2 and self.alive():
                self.dies(self.dice.choice(sorted(self.alive())), reason="Evicted", exit_code=137)
            self.operator_goes_on(dies=self.dice.random() < 0.4)

    def left_alone(self):
        """Without attacks. Returns how often it took steps until the sink's revision wrote and nothing else lived."""
        for count in range(CALM):
            self.drivers_go_on()
            self.operator_goes_on(after=5000)
            (*others, name) = sorted(self.alive()) or [None]
            if name is not None and not others and name == self.writer and self.is_settled(name):
                return count
        raise AssertionError(f"{self.alive()}\n{self.writer} writes\n{self.world.status}")

    def is_settled(self, name):
        revision = self.world.make_sink(self.world.spec).spec.revision
        is_current = self.world.runs[name].revision == revision and "rollout" not in self.world.status
        return (
            is_current
            and self.world.status["driver"]["podName"] == name
            and self.world.reason("Ready") == ("True", "Running")
        )


@pytest.mark.parametrize("seed", range(draws(40)))
def test_whatever_is_killed_in_a_rollout_and_on_the_way_back_one_driver_of_the_wanted_revision_writes_in_the_end(
    world, seed
):
    dice = random.Random(seed)
    field = Field(world, dice)
    field.left_alone()
    for parallelism in (7, None, 8):
        if parallelism is None:
            del field.world.spec["write"]  # back to the first revision, in the same way
        else:
            field.world.spec["write"] = {"parallelism": parallelism}
        field.operator_goes_on(dies=dice.random() < 0.5)
        field.attacked()
        field.left_alone()
    assert field.switches >= 4


@pytest.mark.parametrize("seed", range(draws(10)))
def test_without_attacks_the_former_driver_writes_until_the_new_one_does(world, seed):
    """There is no step at which nothing that lives may commit."""
    field = Field(world, random.Random(seed))
    field.left_alone()
    field.world.spec["write"] = {"parallelism": 7}
    for _ in range(CALM):
        field.drivers_go_on()
        assert field.writer in field.alive()
        field.operator_goes_on()
        if field.is_settled(field.writer):
            break
    assert (field.switches, field.is_settled(field.writer)) == (2, True)
