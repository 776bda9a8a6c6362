"""The fields of a pod that put it into the queue of a batch scheduler (`spec.spark.scheduler`).

Each of these projects reads labels, annotations and `schedulerName` of plain pods, so the operator creates none of their objects:

- Kueue (https://kueue.sigs.k8s.io/docs/tasks/run/plain_pods): label `kueue.x-k8s.io/queue-name`. Kueue holds each pod with this label by a
  scheduling gate until its queue has room. Driver and executors are admitted one by one, because the size of a pod group is fixed and the
  number of executors is not.
- Volcano (https://volcano.sh/en/docs/v1-11-0/queue): `schedulerName: volcano` and annotation `scheduling.volcano.sh/queue-name`. Volcano
  makes a PodGroup for pods that name none.
- YuniKorn (https://yunikorn.apache.org/docs/user_guide/labels_and_annotations_in_yunikorn): `schedulerName: yunikorn` and the labels
  `applicationId` and `queue`. Releases from 1.6 on also know longer names, and still read these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from persist_operator.api.sink import PodScheduler
from persist_operator.api.sink_pods import SCHEDULER_NAMES


def scheduled(pod: Mapping[str, Any], scheduler: PodScheduler, *, application: str) -> dict[str, Any]:
    """`pod` (metadata, spec) for this scheduler. `application` is the name that a driver and its executors share."""
    labels, annotations = _marks(scheduler, application)
    head = {**pod["metadata"], "labels": {**pod["metadata"].get("labels", {}), **labels}}
    if annotations:
        head["annotations"] = {**head.get("annotations", {}), **annotations}
    fields = {"schedulerName": SCHEDULER_NAMES.get(scheduler.name), "priorityClassName": scheduler.priority_class_name}
    spec = {**pod["spec"], **{name: value for name, value in fields.items() if value is not None}}
    return {**pod, "metadata": head, "spec": spec}


def _marks(scheduler: PodScheduler, application: str) -> tuple[dict[str, str], dict[str, str]]:
    """Labels and annotations."""
    queue = scheduler.queue
    match scheduler.name:
        case "Kueue":
            return {"kueue.x-k8s.io/queue-name": str(queue)}, {}
        case "Volcano":
            return {}, {} if queue is None else {"scheduling.volcano.sh/queue-name": queue}
        case "YuniKorn":
            return {"applicationId": application, **({} if queue is None else {"queue": queue})}, {}
        case _:
            return {}, {}
