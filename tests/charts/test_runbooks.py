"""Each alert has a page, and each command and field on it exists."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from persist_engine.cli.main import application
from persist_operator.kubectl.report import report

ROOT = Path(__file__).resolve().parents[2]
RUNBOOKS = ROOT / "docs" / "runbooks"
ALERTS = ROOT / "charts/persist-operator/files/monitoring/alerts.yaml"
PAGES = sorted(RUNBOOKS.glob("*.md"))
SECTIONS = [
    "## What it means",
    "## What users notice",
    "## First look",
    "## Causes, and what to do",
    "## When it is over",
    "## When to call for help",
]
CRDS = [yaml.load(path.read_text(), yaml.CSafeLoader)["spec"] for path in sorted((ROOT / "crds").glob("*.yaml"))]
OUR_NAMES = {name for crd in CRDS for name in (crd["names"]["plural"], *crd["names"]["shortNames"], "persist")}
KINDS = {"pods", "job", "jobs", "deployment", "lease", "events", "crd", "flowschemas", *OUR_NAMES}
VERBS = {"get", "describe", "logs", "annotate", "top", "wait"}
LABELS = {
    "persistshard.io/member-of",
    "persistshard.io/sink",
    "persistshard.io/shard",
    "persistshard.io/role",
    "app.kubernetes.io/component",
    "app.kubernetes.io/managed-by",
    "persistshard.io/owner-uid",
    "persistshard.io/attempt",
    "app.kubernetes.io/name",
}
REQUESTS = {"compact", "rollup", "gc", "verify", "orphan-scan", "restart", "promote", "approve"}


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def commands(page: Path) -> list[str]:
    text = page.read_text()
    blocks = "\n".join(re.findall(r"^```\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)).splitlines()
    inline = re.findall(r"`((?:kubectl|persist) [^`]+)`", text)
    plain = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL).splitlines()
    assert not [
        line for line in plain if re.search(r"\b(kubectl|persist) (get|annotate|describe|admin|inspect)\b", line)
    ]
    return [*blocks, *inline]


def has_field(path: str) -> bool:
    """Whether a resource of one of the kinds has `spec.a.b` or `status.a.b`."""
    for crd in CRDS:
        schema: Any = crd["versions"][0]["schema"]["openAPIV3Schema"]
        for name in path.split("."):
            inner = schema.get("items", schema)
            schema = inner.get("properties", {}).get(name) or inner.get("additionalProperties")
            if not isinstance(schema, dict):
                break
        else:
            return True
    return False


def check_kubectl(words: list[str]) -> None:
    verb, *rest = words
    assert verb in VERBS, verb
    if "--raw" in rest:
        return
    plain, options, waiting = [], [], None
    for word in rest:
        if waiting:
            options.append((waiting, word))
            waiting = None
        elif word in {"-n", "-l", "-L", "-o", "--field-selector"}:
            waiting = word
        elif word.startswith("-"):
            name, _, value = word.partition("=")
            options.append((name, value))
            if name in {"--field-selector", "--sort-by", "--for", "--tail", "--cascade"}:
                assert value, word
        else:
            plain.append(word)
    assert waiting is None
    if verb not in {"logs"}:
        assert {*plain[0].partition("/")[0].split(",")} <= KINDS, plain
    for name, value in options:
        if name in {"-l", "-L"}:
            assert {one.partition("=")[0] for one in value.split(",")} <= LABELS
        if name == "-o" and value.startswith("jsonpath="):
            path = value.removeprefix("jsonpath={.").removesuffix("}")
            assert path.startswith("metadata.") or has_field(path), path
    if verb == "annotate":
        (asked,) = [word for word in plain if "=" in word]
        # A value that a person gave before asks for nothing.
        request = re.fullmatch(r"persistshard\.io/request-(?:([a-z-]+)=FRESH|(approve)=ID)", asked)
        assert request, asked
        assert ("--overwrite", "") in options, "the annotation of an earlier request stands"
        asked = request[1] or request[2]
        assert asked in REQUESTS
        assert (plain[0] == "ssink") == (asked in {"restart", "promote"})


def check_persist(words: list[str]) -> None:
    """The parser takes it. The command itself does not run."""
    command: Any = typer.main.get_command(application())
    context = typer.Context(command, info_name="persist")
    while hasattr(command, "get_command"):
        name, *words = words
        found = command.get_command(context, name)
        assert found is not None, name
        command, context = found, typer.Context(found, info_name=name, parent=context)
    _, left, _ = command.make_parser(context).parse_args([word.replace("SHARD", "s0") for word in words])
    assert not left, left
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known


def test_each_alert_has_a_page_and_each_page_an_alert() -> None:
    wanted = {rule.get("runbook", rule["alert"]) for rule in alerts()}
    assert wanted == {page.stem for page in PAGES} - {"index"}
    index = (RUNBOOKS / "index.md").read_text()
    listed = re.findall(r"^\| \[(\w+)\]\((\w+)\.md\) \| (\w+) \|", index, flags=re.MULTILINE)
    assert listed == [(rule["alert"], rule.get("runbook", rule["alert"]), rule["severity"]) for rule in alerts()]


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "index"], ids=lambda page: page.stem)
def test_a_page_can_be_followed(page: Path) -> None:
    text = page.read_text()
    assert re.findall(r"^## .*$", text, flags=re.MULTILINE) == SECTIONS
    found = commands(page)
    assert found
    for command in found:
        program, *words = shlex.split(command.replace("$(date +%s)", "FRESH"))
        assert program in {"kubectl", "persist"}, command
        (check_kubectl if program == "kubectl" else check_persist)(words)
    for path in re.findall(r"\b((?:spec|status)(?:\.[a-zA-Z]+)+)", text):
        assert has_field(path), path


@pytest.mark.parametrize(
    "command",
    [
        "kubectl frobnicate pshard NAME",
        "kubectl get shards NAME",
        "kubectl get pshard NAME -o jsonpath='{.status.nothing}'",
        "kubectl annotate pshard NAME persistshard.io/request-restart=FRESH --overwrite",
        "kubectl annotate pshard NAME persistshard.io/request-compact=now --overwrite",
        "kubectl get pods -l persistshard.io/sinks=NAME",
        "persist admin forget SHARD",
        "kubectl annotate pshard NAME persistshard.io/request-compact=FRESH",
        "persist admin holds SHARD --loud",
        "persist admin restore SHARD where the store keeps versions",
    ],
)
def test_a_command_that_does_not_exist_is_found(command: str) -> None:
    program, *words = shlex.split(command)
    with pytest.raises(Exception, match=r"\w"):
        (check_kubectl if program == "kubectl" else check_persist)(words)


def test_pages_install_the_operator_where_runbooks_and_the_plugin_look_for_it():
    """A command that is pasted from one page finds what a command of another page installed."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "charts/persist-operator/README.md"]
    commands = [
        line for page in pages for line in page.read_text().splitlines() if re.match(r"\s*(helm|kubectl) ", line)
    ]
    found = [re.search(r"(?:-n|--namespace) (\S*persist\S*)", line) for line in commands]
    installs = [line for line in commands if line.strip().startswith("helm install persist")]
    assert len(installs) >= 3
    assert {match[1] for match in found if match} == {"persist-system"}
    assert {line.split()[2] for line in installs} == {"persist-operator"}
    assert inspect.signature(report).parameters["operator_namespace"].default == "persist-system"
