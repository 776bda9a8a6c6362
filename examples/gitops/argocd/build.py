"""Writes argocd-cm.yaml from the Lua beside it: `python examples/gitops/argocd/build.py`, or with --check compares.

Argo CD reads its customizations from one ConfigMap, in which Lua is text.
"""

import sys
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent
TARGET = HERE / "argocd-cm.yaml"
GROUP = "persistshard.io"
#: Kind -> the actions that are requests. `approve` has a script of its own.
REQUESTS = {
    "PersistShard": ("compact", "gc", "rollup", "verify", "orphan-scan"),
    "SparkSink": ("restart", "promote"),
}
HEAD = "# Made by build.py from the Lua in this folder. Merge `data` into the ConfigMap argocd-cm of your Argo CD.\n"


class Text(str):
    """A text that stands in YAML as a block."""


def lua(name: str) -> Text:
    """The script, without its comments."""
    lines = (HERE / name).read_text(encoding="utf-8").splitlines(keepends=True)
    return Text("".join(line for line in lines if not line.lstrip().startswith("--")))


def customizations() -> str:
    """The ConfigMap."""
    yaml.SafeDumper.add_representer(
        Text, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|")
    )
    data = {}
    for kind, verbs in REQUESTS.items():
        request = lua("actions/request.lua")
        definitions = [{"name": verb, "action.lua": Text(request.replace("VERB", verb))} for verb in verbs]
        if kind == "PersistShard":
            definitions.append({"name": "approve", "action.lua": lua("actions/approve.lua")})
        actions = {"discovery.lua": lua(f"actions/{kind.lower()}.lua"), "definitions": definitions}
        data[f"resource.customizations.health.{GROUP}_{kind}"] = lua("health.lua")
        data[f"resource.customizations.actions.{GROUP}_{kind}"] = Text(yaml.safe_dump(actions, sort_keys=False))
    metadata = {
        "name": "argocd-cm",
        "namespace": "argocd",
        "labels": {"app.kubernetes.io/name": "argocd-cm", "app.kubernetes.io/part-of": "argocd"},
    }
    document = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
    return HEAD + yaml.safe_dump(document, sort_keys=False, width=140)


def main() -> int:
    text = customizations()
    if "--check" in sys.argv[1:]:
        if TARGET.read_text(encoding="utf-8") == text:
            return 0
        print(f"{TARGET.name} is not what build.py makes: run it")
        return 1
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
