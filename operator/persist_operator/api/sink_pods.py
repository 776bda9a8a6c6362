"""Checks whether the operator may create the pods that a resource requests: templates, configuration and service accounts. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from persist_operator.api.pod_template import (
    PodRefused,
    check_account,
    check_secret,
    check_template,
    priority_problems,
)
from persist_operator.api.shard import ShardSpec
from persist_operator.api.sink import SinkSpec
from persist_operator.api.spark_conf import check_conf
from persist_operator.settings import WorkloadSettings

DRIVER_TEMPLATE, EXECUTOR_TEMPLATE = "spec.spark.driver.template", "spec.spark.executor.template"
MAINTENANCE_TEMPLATE = "spec.maintenance.template"

#: `schedulerName` of a pod by spec.spark.scheduler.name. Kueue only admits the pods that the cluster's scheduler places.
SCHEDULER_NAMES = {"Volcano": "volcano", "YuniKorn": "yunikorn"}


def check(spec: SinkSpec, workload: WorkloadSettings) -> None:
    """Checks, in this order, the Spark conf, driver template, executor template, service account, and Secret of the input's options. Raises
    PodRefused for the first forbidden one.
    """
    check_conf(spec.spark.conf, where="spec.spark.conf")
    check_template(spec.spark.driver.template, where=DRIVER_TEMPLATE, role="driver", allow=workload.allow)
    check_template(spec.spark.executor.template, where=EXECUTOR_TEMPLATE, role="executor", allow=workload.allow)
    known = (workload.driver_service_account, *workload.service_accounts)
    check_account(spec.spark.service_account_name, where="spec.spark.serviceAccountName", known=known)
    _check_scheduler(spec, DRIVER_TEMPLATE, spec.spark.driver.template)
    _check_scheduler(spec, EXECUTOR_TEMPLATE, spec.spark.executor.template)
    block = "python" if "python" in spec.input else "format"
    check_secret(spec.options_secret, where=f"spec.input.{block}.optionsSecretName", allow=workload.allow)


def check_maintenance(spec: ShardSpec, workload: WorkloadSettings) -> None:
    """Raises PodRefused when the template, the priority class or the service account of a shard's maintenance pods is not allowed."""
    check_template(spec.maintenance_template, where=MAINTENANCE_TEMPLATE, role="maintenance", allow=workload.allow)
    problems = list(priority_problems(spec.priority_class_name, "spec.maintenance.priorityClassName"))
    if problems:
        raise PodRefused("InvalidTemplate", problems)
    known = workload.service_accounts
    check_account(spec.service_account_name, where="spec.maintenance.serviceAccountName", known=known)


def _check_scheduler(spec: SinkSpec, where: str, template: Mapping[str, Any]) -> None:
    """Raises PodRefused when a checked template disagrees with spec.spark.scheduler. Otherwise one of them would win silently."""
    scheduler, given = spec.spark.scheduler, template.get("spec") or {}
    ours = {"schedulerName": SCHEDULER_NAMES.get(scheduler.name), "priorityClassName": scheduler.priority_class_name}
    problems = [
        (f"{where}.spec.{field}", f"spec.spark.scheduler sets it to {wanted}; remove the one or the other")
        for field, wanted in ours.items()
        if wanted is not None and given.get(field, wanted) != wanted
    ]
    if problems:
        raise PodRefused("InvalidTemplate", problems)
