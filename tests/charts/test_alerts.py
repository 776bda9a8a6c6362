"""The alert rules as promtool and Grafana would take them, and when each of them fires."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "persist-operator"
RUNBOOKS = ROOT / "docs" / "runbooks"
Manifest = dict[str, Any]
PAGE = "https://docs.example.com/{alert}.html"
ON: Manifest = {
    "prometheusRule": {"enabled": True, "runbookUrl": PAGE, "labels": {"release": "prometheus"}},
    "grafana": {"alerts": {"enabled": True}},
}
CASES = yaml.load((Path(__file__).parent / "alert_cases.yaml").read_text(), yaml.CSafeLoader)
LABELS = {
    "operator": {"namespace": "sys", "job": "persist-metrics"},
    "shard": {"namespace": "red", "name": "flights"},
    "sink": {"namespace": "red", "name": "load"},
}
WELL_MIN = 60


def prometheus_rules(manifests: list[Manifest]) -> list[Manifest]:
    (found,) = [one for one in manifests if one["kind"] == "PrometheusRule"]
    return [rule for group in found["spec"]["groups"] for rule in group["rules"]]


def grafana_rules(manifests: list[Manifest]) -> list[Manifest]:
    (found,) = [one for one in manifests if one["metadata"]["name"].endswith("-grafana-alerts")]
    assert found["metadata"]["labels"]["grafana_alert"] == "1"
    file = yaml.safe_load(found["data"]["persist-alerts.yaml"])
    assert file["apiVersion"] == 1
    return [rule for group in file["groups"] for rule in group["rules"]]


@pytest.fixture
def rules(template: Callable[..., list[Manifest]]) -> dict[str, Manifest]:
    return {rule["alert"]: rule for rule in prometheus_rules(template(ON))}


def minutes(text: str) -> int:
    return int(text[:-1]) * {"s": 0, "m": 1, "h": 60}[text[-1]]


def phases(values: list[Any], lengths: list[int]) -> str:
    """A series of promtool: well, not well, well; one sample a minute."""
    out, at_min, last = [], 0, 0.0
    for value, length in zip((values[0], values[1], values[0]), lengths, strict=True):
        kind, _, amount = str(value).partition(" ")
        start, step = last, 0.0
        if kind == "absent":
            out.append(f"_x{length}")
        elif kind == "rate":
            start, step = last + float(amount), float(amount)
        elif kind == "now":
            start, step = 60.0 * at_min + float(amount), 60.0
        elif kind != "held":
            start = float(value)
        if kind != "absent":
            # A sequence of n has n + 1 samples.
            out.append(f"{start:.0f}+{step:.0f}x{length - 1}")
            last = start + step * (length - 1)
        at_min += length
    return " ".join(out)


def series(name: str, labels: Manifest) -> str:
    name, _, own = name.partition("{")
    text = ",".join(f'{key}="{value}"' for key, value in labels.items() if f"{key}=" not in own)
    return f"{name}{{{text}{',' + own.removesuffix('}') if own else ''}}}"


def shown(rule: Manifest, labels: Manifest) -> Manifest:
    """The alert that is expected of a rule for these labels."""
    texts = {
        name: re.sub(r"{{ \$labels\.(\w+) }}", lambda match: str(labels.get(match[1], "")), text)
        for name, text in rule["annotations"].items()
    }
    return {"exp_labels": {**labels, **rule["labels"]}, "exp_annotations": texts}


def promtool_test(case: Manifest, rule: Manifest) -> Manifest:
    bad = case.get("minutes", minutes(rule["for"]) + 10)
    lengths = [WELL_MIN, bad, case.get("after", 120)]
    common = {**LABELS[case["of"]], "instance": "10.0.0.1:8080", "pod": "persist-0"}
    kept = LABELS[case["of"]] if "keeps" not in case else {}
    expected = [] if case.get("never") else [shown(rule, {**kept, **case.get("labels", {})})]
    return {
        "name": case["alert"],
        "interval": "1m",
        "input_series": [
            {"series": series(name, common), "values": phases(values, lengths)}
            for name, values in case["series"].items()
        ],
        "alert_rule_test": [
            {"eval_time": f"{WELL_MIN - 1}m", "alertname": case["alert"], "exp_alerts": []},
            {"eval_time": f"{WELL_MIN + bad - 1}m", "alertname": case["alert"], "exp_alerts": expected},
            {"eval_time": f"{sum(lengths) - 1}m", "alertname": case["alert"], "exp_alerts": []},
        ],
    }


@pytest.fixture
def run_promtool(promtool: str, rules: dict[str, Manifest], tmp_path: Path) -> Callable[..., str]:
    """Run tests on the rules. Returns what promtool says when a test fails, the empty text otherwise."""

    def run(tests: list[Manifest]) -> str:
        files = []
        for at, test in enumerate(tests):
            # Only the rules that the test is about: promtool evaluates every rule of the file at every minute.
            about = {check["alertname"] for check in test["alert_rule_test"]}
            groups = {"groups": [{"name": name, "rules": [rules[name]]} for name in sorted(about)]}
            (tmp_path / f"rules-{at}.yaml").write_text(json.dumps(groups))
            file = {"rule_files": [f"rules-{at}.yaml"], "evaluation_interval": "1m", "tests": [test]}
            (tmp_path / f"test-{at}.yaml").write_text(json.dumps(file))
            files.append(f"test-{at}.yaml")
        done = subprocess.run(
            [promtool, "test", "rules", *files],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return "" if done.returncode == 0 else done.stdout + done.stderr

    return run


def test_promtool_accepts_the_rules(promtool: str, rules: dict[str, Manifest], tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": list(rules.values())}]}))
    check = [promtool, "check", "rules", str(tmp_path / "rules.yaml")]
    done = subprocess.run(check, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_each_alert_fires_when_it_is_to_and_resolves(rules: dict[str, Manifest], run_promtool: Any) -> None:
    assert {case["alert"] for case in CASES if not case.get("never")} == rules.keys()
    assert run_promtool([promtool_test(case, rules[case["alert"]]) for case in CASES]) == ""


def test_promtool_finds_a_rule_that_does_not_fire(rules: dict[str, Manifest], run_promtool: Any) -> None:
    """The test above can fail."""
    case = next(case for case in CASES if case["alert"] == "PersistShardStorageUnreachable")
    quiet = {**case, "series": {"persist_shard_storage_reachable": [1, 1]}}
    assert "PersistShardStorageUnreachable" in run_promtool([promtool_test(quiet, rules[case["alert"]])])


def test_without_series_only_the_missing_operator_is_an_alert(rules: dict[str, Manifest], run_promtool: Any) -> None:
    down = shown(rules["PersistOperatorDown"], {})
    checks = [
        {"eval_time": "12h", "alertname": name, "exp_alerts": [down] if name == "PersistOperatorDown" else []}
        for name in rules
    ]
    assert run_promtool([{"interval": "1m", "input_series": [], "alert_rule_test": checks}]) == ""


def not_ready(instance: str, values: str) -> Manifest:
    labels = {**LABELS["shard"], "instance": instance, "pod": instance}
    return {"series": series("persist_shard_ready", labels), "values": values}


def test_an_alert_outlives_a_change_of_the_leader(rules: dict[str, Manifest], run_promtool: Any) -> None:
    """The new leader exports the series of the resource within the scrape in which the old one stops."""
    fired = shown(rules["PersistShardNotReady"], LABELS["shard"])
    test = {
        "interval": "1m",
        "input_series": [not_ready("a", "0x29 stale"), not_ready("b", "_x29 0x60")],
        "alert_rule_test": [
            {"eval_time": f"{at}m", "alertname": "PersistShardNotReady", "exp_alerts": [fired]} for at in (29, 31, 60)
        ],
    }
    assert run_promtool([test]) == ""


def test_a_standby_fires_nothing_and_two_leaders_do(rules: dict[str, Manifest], run_promtool: Any) -> None:
    def leaders(*values: int) -> list[Manifest]:
        of = LABELS["operator"]
        return [
            {"series": series("persist_operator_leader", {**of, "instance": str(at)}), "values": f"{value}x60"}
            for at, value in enumerate(values)
        ]

    both = shown(rules["PersistOperatorNoLeader"], LABELS["operator"])
    tests = [
        {
            "interval": "1m",
            "input_series": leaders(*values),
            "alert_rule_test": [{"eval_time": "30m", "alertname": "PersistOperatorNoLeader", "exp_alerts": expected}],
        }
        for values, expected in (((1, 0), []), ((0, 1), []), ((1, 1), [both]), ((0, 0), [both]))
    ]
    assert run_promtool(tests) == ""


def test_an_alert_ends_with_its_resource(rules: dict[str, Manifest], run_promtool: Any) -> None:
    fired = shown(rules["PersistShardNotReady"], LABELS["shard"])
    test = {
        "interval": "1m",
        "input_series": [not_ready("a", "0x30 stale")],
        "alert_rule_test": [
            {"eval_time": "30m", "alertname": "PersistShardNotReady", "exp_alerts": [fired]},
            {"eval_time": "32m", "alertname": "PersistShardNotReady", "exp_alerts": []},
        ],
    }
    assert run_promtool([test]) == ""


def test_both_forms_have_the_same_rules(template: Callable[..., list[Manifest]]) -> None:
    manifests = template(ON)
    prometheus, grafana = prometheus_rules(manifests), grafana_rules(manifests)
    assert [rule["alert"] for rule in prometheus] == [rule["title"] for rule in grafana]
    for one, other in zip(prometheus, grafana, strict=True):
        query, threshold = other["data"]
        assert query["model"]["expr"] == f"group without () ({one['expr']})"
        assert (query["datasourceUid"], threshold["datasourceUid"]) == ("prometheus", "__expr__")
        assert threshold["model"]["expression"] == query["refId"]
        assert other["condition"] == threshold["refId"]
        assert (other["noDataState"], other["execErrState"]) == ("OK", "Error")
        for same in ("for", "labels", "annotations"):
            assert one[same] == other[same]
    assert len({rule["uid"] for rule in grafana}) == len(grafana)
    assert all(len(rule["uid"]) <= 40 for rule in grafana)


def test_each_alert_is_described(rules: dict[str, Manifest]) -> None:
    for name, rule in rules.items():
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
        assert rule["annotations"]["summary"] != rule["annotations"]["description"]
        of_resource = re.search("persist_shard_|persist_resource_|spark_sink_", rule["expr"])
        # A process that met a forked log names its shard and no resource.
        if of_resource and name not in {"PersistOperatorQueueStuck", "PersistShardLogForked"}:
            assert "{{ $labels.namespace }}/{{ $labels.name }}" in rule["annotations"]["summary"], name
        assert "@" not in rule["expr"], f"{name} has a threshold without a value"


def test_each_threshold_is_used() -> None:
    source = (CHART / "files/monitoring/alerts.yaml").read_text()
    thresholds = yaml.safe_load((CHART / "values.yaml").read_text())["prometheusRule"]["thresholds"]
    assert set(re.findall(r"@(\w+)@", source)) - {"name"} == thresholds.keys()
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]["prometheusRule"]["properties"]
    assert schema["thresholds"]["properties"].keys() == thresholds.keys()


def test_values_change_the_rules(template: Callable[..., list[Manifest]]) -> None:
    asked = {
        "enabled": True,
        "disabled": ["SparkSinkFenced", *(rule["alert"] for rule in _group("persist-stores"))],
        "for": {"PersistShardNotReady": "30m"},
        "thresholds": {"debtBytes": 5e9, "deadlineNearRatio": 0.5},
    }
    made = {rule["alert"]: rule for rule in prometheus_rules(template({"prometheusRule": asked}))}
    assert not set(asked["disabled"]) & made.keys()
    assert made["PersistShardNotReady"]["for"] == "30m"
    assert "> 5e+09" in made["PersistShardCompactionDebtGrowing"]["expr"]
    assert "> 0.5 *" in made["PersistShardDeletionDeadlineNear"]["expr"]
    assert "runbook_url" not in made["PersistShardNotReady"]["annotations"]


def _group(name: str) -> list[Manifest]:
    source = yaml.safe_load((CHART / "files/monitoring/alerts.yaml").read_text())
    return next(group["rules"] for group in source["groups"] if group["name"] == name)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"prometheusRule": {"enabled": True, "disabled": ["NoSuchAlert"]}}, "there is no alert NoSuchAlert"),
        ({"prometheusRule": {"enabled": True, "for": {"NoSuchAlert": "5m"}}}, "there is no alert NoSuchAlert"),
        ({"prometheusRule": {"for": {"PersistShardNotReady": "soon"}}}, "PersistShardNotReady"),
        ({"prometheusRule": {"thresholds": {"debt": 1}}}, "debt"),
        ({"prometheusRule": {"thresholds": {"debtBytes": "much"}}}, "debtBytes"),
        ({"prometheusRule": {"runbookUrl": "https://docs.example.com/"}}, "runbookUrl"),
        ({"grafana": {"alert": {}}}, "alert"),
    ],
)
def test_wrong_values_are_refused_by_name(
    run_helm: Callable[..., subprocess.CompletedProcess[str]], values: Manifest, says: str
) -> None:
    done = run_helm("template", "persist", str(CHART), "--kube-version", "1.34.0", values=values)
    assert done.returncode != 0
    assert says in done.stderr


def test_nothing_of_it_is_rendered_unless_asked_for(template: Callable[..., list[Manifest]]) -> None:
    kinds = [one["kind"] for one in template({})]
    assert "PrometheusRule" not in kinds
    assert kinds.count("ConfigMap") == 1


def test_series_keep_their_own_namespace_when_they_are_scraped(template: Callable[..., list[Manifest]]) -> None:
    """Otherwise the namespace of a resource becomes exported_namespace, and every alert names the operator's own."""
    values = {"metrics": {"serviceMonitor": {"enabled": True}}}
    (monitor,) = [one for one in template(values) if one["kind"] == "ServiceMonitor"]
    assert [one["honorLabels"] for one in monitor["spec"]["endpoints"]] == [True]
