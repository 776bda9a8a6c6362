"""What Pods and Jobs say of a run."""

import json

from persist_operator.api import names, times
from persist_operator.plan.observed import Phase
from persist_operator.steps.children import driver_run, executors, maintenance_run


def pod(phase, *, state=None, status=None, **labels):
    container = [{"name": "c", "state": state}] if state else []
    return {
        "metadata": {"namespace": "n", "name": "p", "creationTimestamp": "2026-11-20T00:00:00Z", "labels": labels},
        "status": {"phase": phase, "containerStatuses": container, **(status or {})},
    }


def test_a_driver_without_container_statuses_is_understood():
    run = driver_run(pod("Failed", status={"reason": "NodeLost", "message": "node x went away"}))
    assert (run.phase, run.reason, run.exit_code) == (Phase.FAILED, "NodeLost", None)
    assert driver_run({"metadata": {"name": "p"}}).phase is Phase.PENDING


def test_a_pending_driver_carries_the_reason_it_waits():
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no image"}}
    assert driver_run(pod("Pending", state=waiting)).reason == "ImagePullBackOff"
    assert driver_run(pod("Pending", state={"waiting": {"reason": "ContainerCreating"}})).reason == ""
    conditions = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes"}]
    assert driver_run(pod("Pending", status={"conditions": conditions})).message == "0/2 nodes"


def test_a_driver_without_a_container_says_what_its_pod_shows():
    scheduled = [{"type": "PodScheduled", "status": "True"}]
    waits = pod("Pending", state={"waiting": {"reason": "ContainerCreating"}}, status={"conditions": scheduled})
    waits["spec"] = {"nodeName": "n1"}
    run = driver_run(waits)
    assert run.reason == ""
    assert "its node has not created its container yet" in run.message
    assert "kubectl describe pod p" in run.message
    waits["status"]["initContainerStatuses"] = [
        {"name": "done", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}},
        {"name": "vault", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}},
    ]
    run = driver_run(waits)
    assert (run.reason, run.message) == ("ImagePullBackOff", "init container vault: no such image")
    waits["status"]["initContainerStatuses"][1]["state"] = {"running": {"startedAt": "2026-11-20T00:00:00Z"}}
    assert driver_run(waits).message == "init container vault has not ended yet; see `kubectl logs p -c vault`"
    waits["status"]["initContainerStatuses"][1]["started"] = True  # one that runs beside the driver
    assert "its node has not created its container yet" in driver_run(waits).message
    waits["status"]["phase"] = "Failed"
    assert driver_run(waits).message == ""
    waits["status"]["initContainerStatuses"][1]["state"] = {"terminated": {"exitCode": 3, "reason": "Error"}}
    run = driver_run(waits)
    assert (run.phase, run.reason, run.exit_code) == (Phase.FAILED, "Error", None)
    assert run.message == "init container vault ended with exit code 3"


def test_a_job_that_is_being_deleted_names_its_finalizers():
    labels = {names.LABEL_KIND: "gc"}
    job = {"metadata": {"name": "j", "labels": labels, "finalizers": ["foregroundDeletion"]}, "status": {}}
    assert maintenance_run(job, []).held_by == ()
    job["metadata"]["deletionTimestamp"] = "2026-11-20T08:00:00Z"
    run = maintenance_run(job, [])
    assert (run.held_by, times.to_text(run.deleted_ms)) == (("foregroundDeletion",), "2026-11-20T08:00:00Z")


def test_a_pod_that_finalizers_hold_after_its_deletion_by_force_names_them():
    held = pod("Running", state={"running": {}})
    held["metadata"] |= {"deletionTimestamp": "2026-11-20T08:00:00Z", "finalizers": ["mesh.example/drain"]}
    held["metadata"]["deletionGracePeriodSeconds"] = 30
    assert driver_run(held).held_by == ()
    held["metadata"]["deletionGracePeriodSeconds"] = 0
    assert driver_run(held).held_by == ("mesh.example/drain",)


def test_a_driver_that_another_scheduler_has_not_placed_says_so():
    """YuniKorn says in events alone that a pod waits in its queue."""

    def on(**spec):
        run = driver_run({**pod("Pending"), "spec": spec})
        return (run.reason, run.message)

    assert on(schedulerName="yunikorn") == ("Unscheduled", "the scheduler yunikorn has not placed the pod yet")
    assert on(schedulerName="yunikorn", nodeName="node-1")[0] == ""
    assert on(schedulerName="default-scheduler") == on() == ("", "")


def test_a_report_is_read_from_the_termination_message_and_other_text_is_kept():
    def ended(message):
        return driver_run(pod("Failed", state={"terminated": {"exitCode": 70, "reason": "Error", "message": message}}))

    assert ended(json.dumps({"class": "Storage"})).report == {"class": "Storage"}
    assert (ended("Traceback").report, ended("Traceback").message) == (None, "Traceback")
    assert ended("[1]").report is None


def test_a_disruption_outranks_the_exit_reason_of_the_container():
    conditions = [{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "m"}]
    state = {"terminated": {"exitCode": 143, "reason": "Error"}}
    assert driver_run(pod("Failed", state=state, status={"conditions": conditions})).reason == "PreemptionByScheduler"


def test_a_failed_job_carries_the_exit_reason_of_its_pod_or_pod_lost():
    labels = {names.LABEL_KIND: "gc", names.LABEL_SEQNO: "7"}
    ended = [
        {
            "type": "Failed",
            "status": "True",
            "reason": "BackoffLimitExceeded",
            "lastTransitionTime": "2026-11-20T00:00:09Z",
        }
    ]
    job = {"metadata": {"name": "j", "labels": labels}, "status": {"conditions": ended}}
    died = pod("Failed", state={"terminated": {"exitCode": 137, "reason": "OOMKilled"}})
    died["metadata"]["labels"]["batch.kubernetes.io/job-name"] = "j"
    run = maintenance_run(job, [died])
    assert (run.phase, run.reason, run.seqno, run.exit_code) == (Phase.FAILED, "OOMKilled", 7, 137)
    assert run.finished_ms == times.to_ms("2026-11-20T00:00:09Z")
    assert maintenance_run(job, []).reason == "PodLost"
    ended[0]["reason"] = "DeadlineExceeded"
    assert maintenance_run(job, [died]).reason == "DeadlineExceeded"
    assert maintenance_run({"metadata": {"name": "other"}}, []) is None


def test_a_job_with_a_failure_target_counts_as_failed_before_its_pod_is_gone():
    """The node of the pod is cut off. If the Job counted as running, no other of its kind would ever start."""
    labels = {names.LABEL_KIND: "gc", names.LABEL_SEQNO: "7"}
    moment = "2026-11-20T00:00:09Z"
    ends = {"type": "FailureTarget", "status": "True", "reason": "DeadlineExceeded", "lastTransitionTime": moment}
    stuck = pod("Running", state={"running": {"startedAt": "2026-11-20T00:00:00Z"}})
    stuck["metadata"]["labels"]["batch.kubernetes.io/job-name"] = "j"
    run = maintenance_run({"metadata": {"name": "j", "labels": labels}, "status": {"conditions": [ends]}}, [stuck])
    assert (run.phase, run.reason, run.finished_ms) == (Phase.FAILED, "DeadlineExceeded", times.to_ms(moment))


def test_a_sidecar_is_not_taken_for_the_driver():
    """The status of a sidecar may come first in the list. Its termination message is no report."""
    ended = {"exitCode": 70, "reason": "Error", "message": json.dumps({"class": "Storage"})}
    beside = {"name": "a-proxy", "state": {"terminated": {"exitCode": 0, "message": "bye"}}}
    found = pod("Failed")
    found["status"]["containerStatuses"] = [beside, {"name": "driver", "state": {"terminated": ended}}]
    run = driver_run(found)
    assert (run.exit_code, run.report) == (70, {"class": "Storage"})


def test_executors_are_counted_for_one_attempt():
    pods = [pod("Running", **{names.LABEL_ATTEMPT: "2"}), pod("Failed", **{names.LABEL_ATTEMPT: "2"}), pod("Running")]
    counted = executors(pods, 2)
    assert (counted.running, counted.pending, counted.failed) == (1, 0, 1)
    assert counted.stuck_ms is None
    waiting = {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}
    late = pod("Pending", **{names.LABEL_ATTEMPT: "2"})
    late["metadata"]["creationTimestamp"] = "2026-11-20T00:05:00Z"
    counted = executors([late, pod("Pending", state=waiting, **{names.LABEL_ATTEMPT: "2"})], 2)
    assert (counted.pending, counted.why_pending) == (2, "ErrImagePull: no such image")
    assert times.to_text(counted.pending_from_ms) == "2026-11-20T00:00:00Z"
