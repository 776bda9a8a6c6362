"""Pages of the documentation site that are not in docs/: pages generated from the code, and the documents at the root.

mkdocs calls the functions `on_*`. Nothing is written into docs/, so no generated page can be stale.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import persist_engine
import typer.main
import yaml
from mkdocs.structure.files import File, Files
from persist_engine.cli.main import application as persist_application
from persist_operator.kubectl.main import app as kubectl_app
from persist_operator.local.commands import app as local_app
from typer.cli import get_docs_for_click

ROOT = Path(__file__).resolve().parent.parent
#: Pages of the site that are documents at the root.
FROM_ROOT = {
    "index.md": "README.md",
    "architecture.md": "ARCHITECTURE.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
}
SPECIFICATION = "spec.md"
#: The members of a module under a heading of the page.
WHOLE_MODULE = "    options: {show_root_heading: false, show_root_toc_entry: false}\n"
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")


def on_config(config: Any) -> Any:
    """Add the specification to the navigation if it exists."""
    if (ROOT / "docs" / SPECIFICATION).is_file():
        (reference,) = (part["Reference"] for part in config.nav if "Reference" in part)
        reference.insert(0, {"Specification": SPECIFICATION})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    pages = {page: (ROOT / document).read_text() for page, document in FROM_ROOT.items()}
    pages |= {
        "adr/index.md": decisions(),
        "reference/resources.md": resources(),
        "reference/cli.md": command_line(),
        "reference/python.md": public_names(),
        "reference/errors.md": "# Errors\n\n::: persist_engine.base.errors\n" + WHOLE_MODULE,
        "reference/settings.md": settings(),
    }
    for page, content in pages.items():
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links between documents of the repository into links between pages; links to files outside the site become text."""
    source = page.file.src_uri
    document = FROM_ROOT.get(source, f"docs/{source}")
    pages = {name: page for page, name in FROM_ROOT.items()}

    def linked(match: re.Match[str]) -> str:
        text, target = match.groups()
        if "://" in target or target.startswith(("#", "mailto:")):
            return match[0]
        path, _, anchor = target.partition("#")
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(document), path))
        wanted = "docs/adr/index.md" if wanted == "docs/adr" else wanted
        shown = pages.get(wanted) or (wanted.removeprefix("docs/") if wanted.startswith("docs/") else None)
        if shown is None:
            return text
        relative = posixpath.relpath(shown, posixpath.dirname(source) or ".")
        return f"[{text}]({relative}{'#' + anchor if anchor else ''})"

    blocks = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(block if block.startswith("```") else LINK.sub(linked, block) for block in blocks)


def decisions() -> str:
    """The list of decisions, by title."""
    lines = [
        "# Decisions",
        "",
        "Each decision has the problem, the choice, the alternatives, and reasons to reconsider.",
        "",
    ]
    for path in sorted((ROOT / "docs" / "adr").glob("*.md")):
        title = path.read_text().partition("\n")[0].removeprefix("# ")
        lines.append(f"- [{title}]({path.name})")
    return "\n".join(lines) + "\n"


def resources() -> str:
    """The fields of all resources, from the definitions that the API server uses for validation."""
    lines = ["# Resources", "", "Generated from `crds/`. Times in a status are UTC."]
    for path in sorted((ROOT / "crds").glob("*.yaml")):
        definition = yaml.safe_load(path.read_text())["spec"]
        for version in definition["versions"]:
            schema = version["schema"]["openAPIV3Schema"]
            lines += [
                "",
                f"## {definition['names']['kind']}",
                "",
                f"`{definition['group']}/{version['name']}`. {text_of(schema)}",
            ]
            for part in ("spec", "status"):
                lines += [
                    "",
                    f"### {definition['names']['kind']} {part}",
                    "",
                    "| field | type | default | meaning |",
                    "|---|---|---|---|",
                ]
                lines += rows_of(schema["properties"][part], "")
    return "\n".join(lines) + "\n"


def rows_of(schema: dict[str, Any], prefix: str) -> list[str]:
    """One line per field of an object, each followed by the lines of its own fields."""
    rows = []
    for name, field in schema.get("properties", {}).items():
        path = f"{prefix}{name}"
        kind = (
            "/".join(f"`{value}`" for value in field["enum"]) if "enum" in field else field.get("type", "int or string")
        )
        required = ", required" if name in schema.get("required", []) else ""
        default = (
            f"`{yaml.safe_dump(field['default'], default_flow_style=True).splitlines()[0]}`"
            if "default" in field
            else ""
        )
        rows.append(f"| `{path}` | {kind}{required} | {default} | {text_of(field)} |")
        rows += rows_of(field, f"{path}.")
        rows += rows_of(field.get("items", {}), f"{path}[].")
    return rows


def text_of(schema: dict[str, Any]) -> str:
    """A description as one line of a table."""
    return " ".join(str(schema.get("description", "")).split()).replace("|", "\\|").replace("<", "&lt;")


def command_line() -> str:
    """The help of every command."""
    texts = []
    for app, name in (
        (persist_application(), "persist"),
        (local_app, "persist local"),
        (kubectl_app, "kubectl persist"),
    ):
        command = typer.main.get_command(app)
        context = typer.Context(command, info_name=name)
        texts.append(get_docs_for_click(obj=command, ctx=context, name=name, indent=1))
    return "# Command line\n\n" + re.sub(r"^#", "##", "\n".join(texts), flags=re.MULTILINE)


def public_names() -> str:
    """The exports of `persist_engine`, each with its contract."""
    lines = [
        "# Python",
        "",
        "Every name that `persist_engine` exports. All other names may change with any release.",
    ]
    for name in persist_engine.__all__:
        lines += ["", f"::: {persist_engine.__name__}.{persist_engine.MODULES[name]}.{name}"]
    return "\n".join(lines) + "\n"


def settings() -> str:
    """The dataclasses of the settings."""
    return (
        "# Settings\n\nEach setting has its unit, its default, and what grows with it. "
        "Set them with `PersistClient.open(..., settings=Settings(...))`.\n\n"
        f"## Engine\n\n::: persist_engine.base.settings\n{WHOLE_MODULE}\n## Operator\n\nThe chart derives them from its values.\n\n"
        f"::: persist_operator.settings\n{WHOLE_MODULE}"
    )
