"""Every metric that a rule, a dashboard or a page names is one that the engine or the operator exports."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from persist_engine.base.metric_names import CATALOGUE
from persist_operator.steps.metrics import OperatorMetrics
from prometheus_client import CollectorRegistry, ProcessCollector

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "charts/persist-operator/files/monitoring"
NAME = re.compile(r"\b((?:persist|spark_sink|process)_[a-z_0-9]+)\b")
#: Words in pages that look like metrics.
NO_METRICS = re.compile(r"^persist_(engine|operator|spark|kit|shard|sink)$|^process_$")


def exported() -> set[str]:
    """Names of all samples that the engine and the operator can export."""
    registry = CollectorRegistry()
    OperatorMetrics(registry)
    names = {metric.full_name for metric in CATALOGUE.values()}
    names |= {f"{metric.full_name}_{end}" for metric in CATALOGUE.values() for end in ("bucket", "sum", "count")}
    for source in (registry, ProcessCollector(registry=CollectorRegistry())):
        for family in source.collect():
            ends = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count", "")}.get(family.type, ("",))
            names |= {f"{family.name}{end}" for end in ends}
    return names


def expressions(path: Path) -> list[str]:
    if path.suffix == ".yaml":
        return [rule["expr"] for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]
    return re.findall(r'"expr": "((?:[^"\\]|\\.)*)"', path.read_text())


SOURCES = [MONITORING / "alerts.yaml", *sorted(MONITORING.glob("dashboards/*.json"))]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_rules_and_dashboards_name_metrics_that_exist(path: Path) -> None:
    found = {name for text in expressions(path) for name in NAME.findall(text)}
    assert found
    assert found - exported() == set()


def pages() -> list[Path]:
    found = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "charts/persist-operator/README.md"]
    return [page for page in found if page.name not in {"metrics.md", "operator-metrics.md"}]


def test_pages_name_metrics_that_exist() -> None:
    """In backquotes, where pages name them; a name that ends in an underscore stands for all that begin so."""
    known, bad = exported(), []
    for page in pages():
        for name in re.findall(
            r"`((?:persist_(?:shard|operator|maintenance|resource|consensus|blob)|spark_sink)_\w+)", page.read_text()
        ):
            if name not in known and not any(one.startswith(name) for one in known if name.endswith("_")):
                bad.append(f"{page.relative_to(ROOT)}: {name}")
    assert not bad
