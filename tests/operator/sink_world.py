"""A SparkSink, its status and its drivers over time, for tests of its plan."""

import dataclasses

from persist_operator.api import conditions
from persist_operator.plan.actions import StartDriver, StopRun
from persist_operator.plan.observed import Executors, Phase, Run, SinkObserved
from persist_operator.plan.sink import plan_sink

MINUTE = 60_000


class World:
    """A sink, its status and its drivers over time. Each intent of a plan is carried out unless the test prevents it."""

    def __init__(self, make_sink, sink_resource, shard, settings, now, spec):
        self.make_sink, self.sink_resource, self.shard = make_sink, sink_resource, shard
        self.settings, self.now, self.spec = settings, now, dict(spec)
        self.status, self.runs, self.metadata, self.failures = {}, {}, {}, {}
        self.executors = Executors(running=2)
        self.asked = []
        self.plan = None

    def step(self, *, after=1000, act=True):
        self.now += after
        observed = SinkObserved(
            shard=self.shard,
            runs=tuple(self.runs.values()),
            executors=self.executors,
            failures=self.failures,
        )
        sink = self.make_sink(self.spec, status=self.status, **self.metadata)
        self.plan = plan_sink(sink, observed, now_ms=self.now, settings=self.settings)
        self.status = self.plan.status
        if act:
            self.act()
        return self.plan

    def act(self):
        for action in self.plan.actions:
            if isinstance(action, StopRun) and action.asks:
                self.asked.append(action.name)
            elif isinstance(action, StopRun):
                self.runs.pop(action.name, None)
            elif isinstance(action, StartDriver):
                self.runs.setdefault(action.name, self.driver(action))

    def driver(self, action):
        return Run(
            name=action.name, kind="driver", phase=Phase.PENDING, created_ms=self.now, attempt=action.attempt,
            run_number=action.run_number, run_id=action.run_id, revision=action.spec.revision,
            scheduled_ms=action.scheduled_ms, stands_by=action.stands_by,
        )  # fmt: skip

    def change(self, name=None, **changes):
        name = name or self.status["driver"]["podName"]
        self.runs[name] = dataclasses.replace(self.runs[name], **changes)

    def fails(self, **changes):
        values = {"phase": Phase.FAILED, "finished_ms": self.now, "exit_code": 1, "reason": "Error", **changes}
        self.change(**values)

    def succeeds(self, **report):
        report = {"outcome": "Succeeded", "rows_read": 5, "updates_written": 5, "upper": 77, **report}
        self.change(phase=Phase.SUCCEEDED, finished_ms=self.now, exit_code=0, report=report)

    def reason(self, condition_type):
        found = conditions.find(self.status, condition_type)
        return None if found is None else (found["status"], found["reason"])

    def starts(self):
        return [one for one in self.plan.actions if isinstance(one, StartDriver)]

    def stops(self):
        return [one for one in self.plan.actions if isinstance(one, StopRun)]
