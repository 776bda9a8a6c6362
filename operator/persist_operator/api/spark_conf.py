"""The refused keys of `spec.spark.conf`: keys that the operator sets, and keys that bypass the checks of pod templates. Pure.

The rule in crds/sparksinks.yaml refuses the same keys; a test compares the two. Below `spark.kubernetes.` only the listed keys are
allowed, because each release of Spark adds keys there and most of them change pods. Keys that load code into the driver or the executors
(`spark.jars`, `spark.plugins`, class paths, Java options) are allowed: the user chooses the image, and so the code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from persist_operator.api.pod_template import PodRefused

#: Keys that set timing and number of executor pods, not their contents.
KUBERNETES_ALLOWED = (
    r"allocation\.(batch\.(size|delay)|executor\.timeout|maxPendingPods(PerRp)?|driver\.readinessTimeout|maximum)"
    r"|executor\.((limit|request)\.cores|deleteOnTermination|apiPollingInterval|eventProcessingInterval|missingPodDetectDelta"
    r"|checkAllContainers|enablePollingWithResourceVersion|deletedExecutorsCacheTimeout|terminationGracePeriodSeconds"
    r"|rollPolicy|rollInterval|minTasksPerExecutorBeforeRolling)"
    r"|(driver|submission)\.(requestTimeout|connectionTimeout)|local\.dirs\.tmpfs|memoryOverheadFactor"
)
REFUSED = (
    r"spark\.("
    r"master|remote|api\.mode|submit\..*|app\.(name|id)|home|blockManager\.port|dynamicAllocation\.enabled"
    r"|driver\.(host|port|bindAddress|blockManager\.port|memory|memoryOverhead)"
    r"|executor\.(instances|cores|memory|memoryOverhead)"
    r"|(authenticate|network\.crypto|network\.sasl|ssl)(\..*)?|ui\.(port|proxy.*|reverseProxy.*)"
    r"|executorEnv\.(_?SPARK_.*|HOME|AWS_SHARED_CREDENTIALS_FILE)"
    r")"
)
#: The form of a key. In a properties file, the key `spark.master=x` would set spark.master.
KEY = r"spark\.[-A-Za-z0-9._$/]+"
_KEY, _REFUSED = re.compile(KEY), re.compile(REFUSED)
_KUBERNETES, _KUBERNETES_ALLOWED = "spark.kubernetes.", re.compile(KUBERNETES_ALLOWED)
#: A Java option can set any key of Spark, including refused keys. So can a file of options.
_JAVA_OPTIONS = re.compile(r"spark\..*[jJ]avaOptions")
_SPARK_PROPERTY = re.compile(r"-Dspark\.|(^|\s)@|-XX:(Flags|VMOptionsFile)")
_QUOTES = str.maketrans("", "", "\"'\\")


def check_conf(conf: Mapping[str, str], *, where: str) -> None:
    """Raises PodRefused (InvalidConf) with every refused key of `conf`."""
    problems = [
        (f"{where}[{key!r}]", text) for key, value in conf.items() if (text := _problem(key, value)) is not None
    ]
    if problems:
        raise PodRefused("InvalidConf", problems)


def is_refused(key: str) -> bool:
    """Whether the key is refused for every value."""
    if _KEY.fullmatch(key) is None:
        return True
    if key.startswith(_KUBERNETES):
        return _KUBERNETES_ALLOWED.fullmatch(key.removeprefix(_KUBERNETES)) is None
    return _REFUSED.fullmatch(key) is not None


def _problem(key: str, value: str) -> str | None:
    if _KEY.fullmatch(key) is None:
        return "is not a key of Spark: write spark., then letters, digits and -._$/"
    if is_refused(key):
        return "is set by the operator; use driver, executor, image and their templates instead"
    if _JAVA_OPTIONS.fullmatch(key) and _SPARK_PROPERTY.search(value.translate(_QUOTES)):
        return "must not set Spark's own properties: write them as keys of conf"
    return None
