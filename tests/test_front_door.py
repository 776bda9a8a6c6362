"""Files that tools and strangers read first: they name only what there is, and CI runs only what a laptop runs."""

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import tarfile
from itertools import takewhile
from pathlib import Path

import pytest
import typer.core
import typer.main
import yaml
from persist_engine.cli.main import application
from persist_operator.console.commands import app as ui_app
from persist_operator.kubectl.main import app as kubectl_app
from persist_operator.local.commands import app as local_app

ROOT = Path(__file__).resolve().parents[1]
TARGETS = set(re.findall(r"^([a-z0-9-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yaml"))
MANUAL = sorted(f"docs/{path.relative_to(ROOT / 'docs')}" for path in (ROOT / "docs").glob("howto/*.md"))
MANUAL += ["docs/tutorial.md", "docs/faq.md", "docs/concepts.md", "docs/comparison.md"]
#: Programs that the engine's own command line does not contain.
APPS = {("persist", "local"): local_app, ("persist", "ui"): ui_app, ("kubectl", "persist"): kubectl_app}
PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "CHANGELOG.md", "ARCHITECTURE.md"]


def made(command: str) -> set[str]:
    """Targets of a call of make, without what it sets."""
    program, *words = shlex.split(command)
    assert program == "make", command
    return {word for word in words if "=" not in word}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_make_alone(path):
    (job,) = yaml.safe_load(path.read_text())["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands
    for command in commands:
        assert made(command) <= TARGETS


def test_the_four_workflows():
    assert {path.stem for path in WORKFLOWS} == {"check", "test", "e2e", "release"}


def test_hooks_call_make_alone():
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert local["repo"] == "local"
    for hook in local["hooks"]:
        assert made(hook["entry"]) <= TARGETS


@pytest.mark.parametrize(
    "name",
    [
        ".github/dependabot.yml",
        *sorted(f".github/ISSUE_TEMPLATE/{n}" for n in ("bug.yaml", "feature.yaml", "config.yml")),
    ],
)
def test_forms_are_yaml(name):
    assert yaml.safe_load((ROOT / name).read_text())


def test_folders_that_are_kept_up_to_date_exist():
    for update in yaml.safe_load((ROOT / ".github/dependabot.yml").read_text())["updates"]:
        for folder in update.get("directories", [update.get("directory")]):
            assert (ROOT / folder.lstrip("/")).is_dir()


@pytest.mark.parametrize("page", PAGES)
def test_links_of_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", (ROOT / page).read_text()):
        assert target.startswith("https://") or (ROOT / target).exists(), target


@pytest.mark.parametrize("page", PAGES)
def test_targets_named_in_pages_exist(page):
    for line in re.findall(r"^(?:make .*)|`make [^`]*`", (ROOT / page).read_text(), re.MULTILINE):
        assert made(line.strip("`").partition("#")[0]) <= TARGETS, line


def commands(page: str) -> list[list[str]]:
    """Calls of `persist` and of `kubectl persist` in the code blocks of a page, in words; of several in a line the first."""
    blocks = re.findall(r"^```[a-z ]*\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines() if re.match("(kubectl )?persist ", line)]
    lines += re.findall(r"`((?:kubectl )?persist [^`]*)`", (ROOT / page).read_text())
    words = [shlex.split(line, comments=True) for line in lines if "..." not in line]
    return [list(takewhile(lambda word: word not in {";", "|", ">"}, line)) for line in words]


@pytest.mark.slow
@pytest.mark.parametrize("page", [*PAGES, *MANUAL])
def test_commands_in_pages_exist_with_their_options(page):
    """Those that are alternatives in one (`holds|usage`) are not looked at."""
    for words in commands(page):
        if words[1].startswith("-") or any("|" in word for word in words[:3]):
            continue
        app = APPS.get(tuple(words[:2]), application())
        command, rest = typer.main.get_command(app), words[1:] if app is application() else words[2:]
        while rest and isinstance(command, typer.core.TyperGroup) and rest[0] in command.commands:
            command, rest = command.commands[rest[0]], rest[1:]
        if command.context_settings.get(
            "ignore_unknown_options"
        ):  # passed on to a command of the engine, which stands in pages by itself
            continue
        known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
        assert not isinstance(command, typer.core.TyperGroup) or not rest, words
        assert {word for word in rest if re.match("-[^0-9]", word)} <= known | {"--help"}, words


def test_the_changelog_is_in_sections():
    text = (ROOT / "CHANGELOG.md").read_text()
    sections = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    assert sections
    assert sections <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


@pytest.mark.slow
def test_a_release_without_images(tmp_path):
    out = tmp_path / "out"
    command = ["bash", str(ROOT / ".ci" / "release.sh")]
    key, signed = signing(tmp_path)
    env = {**os.environ, "IMAGES": "no", "OUT": str(out), "REGISTRY": "", "UV_OFFLINE": "1", "SIGN": str(key), **OF_KEY}
    env["PATH"] = f"{tmp_path}/signing:{env['PATH']}"
    subprocess.run(command, env=env, check=True, capture_output=True, timeout=240)
    signed(out)
    version = subprocess.run(
        ["python3", ROOT / ".ci" / "version.py"], check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()
    names = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()} - {"SHA256SUMS.sigstore.json"}
    stems = [f"persist_{name}-{version}" for name in ("engine", "operator", "spark")]
    expected = {f"python/{stem}{end}" for stem in stems for end in ("-py3-none-any.whl", ".tar.gz")}
    expected |= {f"sbom/persist-{name}-{version}.cdx.json" for name in ("engine", "operator", "spark")}
    expected |= {f"krew/kubectl-persist-{version}.tar.gz", "krew/persist.yaml"}
    expected |= {f"charts/{name}-{version}.tgz" for name in ("persist-operator", "persist-operator-crds")}
    assert names == expected | {"SHA256SUMS"}
    sums = dict(reversed(line.split()) for line in (out / "SHA256SUMS").read_text().splitlines())
    assert sums == {name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in names - {"SHA256SUMS"}}
    bill = json.loads((out / f"sbom/persist-operator-{version}.cdx.json").read_text())
    assert bill["bomFormat"] == "CycloneDX"
    assert {"kopf", "boto3", "redis", "pyarrow"} <= {part["name"] for part in bill["components"]}
    with tarfile.open(out / f"charts/persist-operator-{version}.tgz") as chart:
        assert yaml.safe_load(chart.extractfile("persist-operator/Chart.yaml"))["appVersion"] == version
    (platform,) = yaml.safe_load((out / "krew/persist.yaml").read_text())["spec"]["platforms"]
    archive = out / f"krew/{platform['uri']}"
    assert platform["sha256"] == sums[f"krew/{platform['uri']}"]
    with tarfile.open(archive) as plugin:
        plugin.extractall(tmp_path / "plugin", filter="data")
    assert run_plugin(tmp_path / "plugin" / platform["bin"], tmp_path) == [
        *("tool", "run", "--quiet"),
        *("--from", str(tmp_path / f"plugin/persist_operator-{version}-py3-none-any.whl")),
        *("--with", str(tmp_path / f"plugin/persist_engine-{version}-py3-none-any.whl")),
        *("kubectl-persist", "status", "a b"),
    ]


OF_KEY = {"COSIGN_PASSWORD": "secret"}
STAND_IN = """#!/bin/bash
printf '%s\\n' "$@" >"$(dirname "$0")/arguments"
while (($#)); do [ "$1" != --bundle ] || echo '{}' >"$2"; shift; done
"""


def signing(folder):
    """A key, and the check of what was signed with it: by cosign, or on machines without it only the arguments that cosign would get."""
    (folder / "signing").mkdir()
    key, sums, environ = folder / "signing/cosign.key", "SHA256SUMS", {**os.environ, **OF_KEY}
    program = shutil.which("cosign")
    if program is None:
        key.write_text("no key")
        (folder / "signing/cosign").write_text(STAND_IN)
        (folder / "signing/cosign").chmod(0o755)

        def asked(out):
            assert (folder / "signing/arguments").read_text().split() == [
                *("sign-blob", "--yes", "--key", str(key), "--use-signing-config=false", "--tlog-upload=false"),
                *("--bundle", f"{out}/{sums}.sigstore.json", f"{out}/{sums}"),
            ]

        return key, asked
    subprocess.run(
        [program, "generate-key-pair"], cwd=key.parent, env=environ, check=True, capture_output=True, timeout=60
    )

    def verified(out):
        bundle = ["--bundle", f"{out}/{sums}.sigstore.json", "--insecure-ignore-tlog=true"]
        command = [program, "verify-blob", "--key", str(key.with_suffix(".pub")), *bundle]
        subprocess.run([*command, f"{out}/{sums}"], check=True, capture_output=True, timeout=60)
        (folder / "other").write_text("other")
        changed = subprocess.run([*command, str(folder / "other")], check=False, capture_output=True, timeout=60)
        assert changed.returncode != 0

    return key, verified


def run_plugin(program, folder):
    """The arguments with which the plugin's launcher, called through a link as krew makes one, runs uv."""
    (folder / "bin").mkdir()
    (folder / "bin/uv").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (folder / "bin/uv").chmod(0o755)
    (folder / "bin/kubectl-persist").symlink_to(program)
    env = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    command = [str(folder / "bin/kubectl-persist"), "status", "a b"]
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=60)
    return done.stdout.splitlines()
