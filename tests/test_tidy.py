"""House rules as tests: sizes, room READMEs, banned names, no clocks or randomness in the pure core."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "engine": "persist_engine",
    "operator": "persist_operator",
    "spark-images": "persist_spark",
    "tests/kit": "persist_kit",
}
FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
MODULES_MAX = 18
MODULE_LINES_MIN = 40
#: Modules that are short because of what they are.
SHORT_MODULES = {
    "engine/persist_engine/cli/__main__.py": "entry point",
    "engine/persist_engine/cli/exit_codes.py": "value",
    "engine/persist_engine/client/expiring.py": "port",
    "engine/persist_engine/shard/opening.py": "entry point",
    "engine/persist_engine/work/rollup.py": "entry point",
    "operator/persist_operator/api/quantity.py": "value",
    "operator/persist_operator/api/redact.py": "value",
    "operator/persist_operator/api/times.py": "value",
    "operator/persist_operator/local/hints.py": "value",
    "operator/persist_operator/manifests/strategic_merge.py": "entry point",
    "tests/kit/persist_kit/depth.py": "value",
    "tests/kit/persist_kit/neighbours.py": "entry point",
    "tests/kit/persist_kit/staged.py": "value",
}
#: Packages whose modules lie in a wheel. `persist_engine.testing` is shipped for tests of adapters.
WHEELS = {folder: name for folder, name in PACKAGES.items() if name != "persist_kit"}
SHIPPED_FOR_TESTS = "persist_engine.testing"
#: Modules that users import and that no README's table lists.
IMPORTED_BY_USERS = {
    "persist_spark.datasource": "the Spark data source `persist`",
    "persist_spark.catalog.source": "the format of the SQL catalog, which Spark finds through pyspark_persist_catalog",
}
BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "types", "manager", "managers"}
PURE_ROOMS = ("model", "rows", "codec", "flow")
#: Rooms whose prose says which component does what.
PLAIN_ROOMS = (
    "crds",
    "charts",
    "examples",
    "operator",
    "spark-images",
    *(f"engine/persist_engine/{room}" for room in ("base", "client", "codec", "dataflow", "flow", "model", "parts")),
    *(f"engine/persist_engine/{room}" for room in ("cli", "rows", "shard", "storage", "table", "testing", "work")),
    "spark-images/persist_spark",
    *(
        f"tests/{room}"
        for room in ("badinput", "charts", "conformance", "datadriven", "e2e", "engine", "examples", "fault", "fuzz")
    ),
    *(f"tests/{room}" for room in ("golden", "kit", "linearizability", "operator", "properties", "regressions", "sim")),
    *(f"tests/{room}" for room in ("spark", "spec", "stateful")),
    "bench",
)
PERSONS = re.compile(r"\b(who|whom|whoever|nobody|anybody|somebody|everybody|told|tells)\b", re.IGNORECASE)
#: Spelled apart, so that this list does not find itself.
MARKERS = ("TO" + "DO", "FIX" + "ME", "X" + "XX")


@functools.cache
def tracked(pattern: str) -> list[Path]:
    """Files git knows or would add, by glob. Forty rooms ask for the same ones."""
    out = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return [ROOT / line for line in out.splitlines() if (ROOT / line).is_file()]


def python_files() -> list[Path]:
    """Product code: every module but the generated ones."""
    return [path for path in tracked("*.py") if "/pb/" not in str(path)]


def product_files() -> list[Path]:
    """Modules of the three packages."""
    return [
        path for path in python_files() if any(f"{folder}/{name}/" in str(path) for folder, name in PACKAGES.items())
    ]


def rooms() -> list[Path]:
    """Folders with code in the three packages, their own included."""
    return sorted({path.parent for path in product_files()})


def test_there_is_something_to_check() -> None:
    """The rules below see the code: an empty listing would make them pass for nothing."""
    assert len(product_files()) > 30


@pytest.mark.slow
@pytest.mark.parametrize("path", python_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_file_and_function_size(path: Path) -> None:
    """500 lines a file, 70 a function; test functions and files are exempt."""
    text = path.read_text()
    if path.is_relative_to(ROOT / "tests") and not path.is_relative_to(ROOT / "tests" / "kit"):
        return
    assert len(text.splitlines()) <= FILE_LINES_MAX, "split it: two things in one file"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            assert length <= FUNCTION_LINES_MAX, f"{node.name} has {length} lines"


@pytest.mark.slow
@pytest.mark.parametrize("path", product_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_module_head_says_what_it_owns(path: Path) -> None:
    """Every module begins with a docstring."""
    assert ast.get_docstring(ast.parse(path.read_text())), "a module head says what it owns"


@pytest.mark.parametrize("room", rooms(), ids=lambda p: str(p.relative_to(ROOT)))
def test_room_has_readme(room: Path) -> None:
    """Each room says in about 20 lines what it owns, what it must not know, where to start."""
    readme = room / "README.md"
    assert readme.is_file()
    lines = readme.read_text().splitlines()
    assert 5 <= len(lines) <= 40
    assert sum(line.startswith("# ") for line in lines) == 1


@pytest.mark.parametrize("room", rooms(), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_shelf_is_not_too_long(room: Path) -> None:
    """A reader sees what a room holds at one look."""
    modules = [path for path in room.glob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= MODULES_MAX, "make a sub-room"


def test_no_module_is_too_short() -> None:
    """A few lines belong into the module that they serve, unless they are a port, a value or an entry point."""
    short = {
        str(path.relative_to(ROOT))
        for path in product_files()
        if path.name != "__init__.py" and len(path.read_text().splitlines()) < MODULE_LINES_MIN
    }
    assert short == set(SHORT_MODULES)


def paths_named(document: Path) -> set[str]:
    """What stands in backquotes and looks like a file or a folder of the tree."""
    return set(re.findall(r"`([\w./-]+\.(?:py|md|lua|proto|sh|yaml|toml))`", document.read_text()))


@pytest.mark.parametrize(
    "document",
    [ROOT / "ARCHITECTURE.md", *tracked("docs/adr/*.md"), *[room / "README.md" for room in rooms()]],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_named_paths_exist(document: Path) -> None:
    """From the document's own folder, from its package or from the root."""
    places = [document.parent, ROOT, *[ROOT / folder / name for folder, name in PACKAGES.items()]]
    missing = {name for name in paths_named(document) if not any((place / name).exists() for place in places)}
    assert not missing


def test_no_banned_names() -> None:
    """No room or module is called by a name that says nothing."""
    bad = [
        str(p.relative_to(ROOT))
        for p in product_files()
        if p.stem in BANNED_NAMES or BANNED_NAMES & set(p.parent.parts[len(ROOT.parts) :])
    ]
    assert not bad


def test_no_init_where_it_would_shadow_the_standard_library() -> None:
    """A package called `operator` at the root breaks `import collections`; equal test names need namespace folders."""
    bad = [
        folder for folder in ("engine", "operator", "proto", "spark-images") if (ROOT / folder / "__init__.py").exists()
    ]
    tests = [path for path in (ROOT / "tests").rglob("__init__.py") if not path.is_relative_to(ROOT / "tests" / "kit")]
    bad += [str(path.relative_to(ROOT)) for path in tests]
    assert not bad


@pytest.mark.slow
def test_the_core_draws_no_fresh_ids() -> None:
    """`Id.new()` is for users and command lines: rooms draw from their Env, so that simulations repeat."""
    bad = []
    for room in (*PURE_ROOMS, "shard", "parts", "work", "storage"):
        for path in (ROOT / "engine" / "persist_engine" / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and node.func.attr == "new"
                    and not node.args
                ):
                    bad.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not bad


@pytest.mark.slow
def test_the_core_imports_no_clock_and_no_randomness() -> None:
    """Beside import-linter: not even inside a function."""
    banned = {"os", "time", "random", "secrets", "uuid", "socket", "threading", "asyncio", "datetime.now"}
    bad = []
    for room in PURE_ROOMS:
        for path in (ROOT / "engine" / "persist_engine" / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                bad += [f"{path.relative_to(ROOT)} imports {name}" for name in names if name.split(".")[0] in banned]
    assert not bad


def wheel_modules() -> dict[str, Path]:
    """Modules and packages of the three wheels by dotted name."""
    found = {}
    for folder, name in WHEELS.items():
        for path in (ROOT / folder / name).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def entry_points() -> set[str]:
    """Where use begins: packages, console scripts, plug-ins, modules that run by themselves, public modules of the engine."""
    found = {*WHEELS.values(), *IMPORTED_BY_USERS}
    for folder in WHEELS:
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        declared = [project.get("scripts", {}), *project.get("entry-points", {}).values()]
        found |= {target.partition(":")[0] for group in declared for target in group.values()}
    engine = ROOT / "engine/persist_engine"
    rows = [line for line in (engine / "README.md").read_text().splitlines() if line.startswith("| `")]
    public = {path for name in re.findall(r"`([\w/*]+\.py|[\w/]+/\*)`", "\n".join(rows)) for path in engine.glob(name)}
    for name, path in wheel_modules().items():
        if path in public or 'if __name__ == "__main__":' in path.read_text():
            found.add(name)
    return found


def imported_by(path: Path) -> set[str]:
    """Dotted names that a module imports anywhere, with each name of a `from` import as if it were a module."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.slow
def test_no_wheel_holds_a_module_for_tests_only() -> None:
    """Every module of a wheel is reached by imports from an entry point; `persist_engine.testing` is one room of its own."""
    modules, reached = wheel_modules(), set[str]()
    waiting = entry_points()
    assert waiting <= set(modules)
    while waiting:
        name = waiting.pop()
        reached.add(name)
        packages = {name.rsplit(".", n)[0] for n in range(1, name.count(".") + 1)}
        waiting |= ((imported_by(modules[name]) | packages) & set(modules)) - reached
    left = {name for name in set(modules) - reached if not f"{name}.".startswith(f"{SHIPPED_FOR_TESTS}.")}
    assert not left


@pytest.mark.parametrize("room", PLAIN_ROOMS)
def test_prose_says_which_component_acts(room: str) -> None:
    """A component acts in a sentence, not a person: such words hide which one."""
    paths = [path for path in [*tracked("*.py"), *tracked("*.md")] if path.is_relative_to(ROOT / room)]
    assert paths
    bad = [
        f"{path.relative_to(ROOT)}:{n}"
        for path in paths
        for n, line in enumerate(path.read_text().splitlines(), 1)
        if PERSONS.search(line)
    ]
    assert not bad


def documents() -> list[Path]:
    """Documents, and the files that people read around the code. READMEs of rooms are held by `PLAIN_ROOMS`."""
    patterns = ("*.md", "docs/*", ".ci/*", ".github/*", "Makefile", "tests/e2e/*")
    patterns += tuple(
        f"*.{kind}" for kind in ("yaml", "yml", "toml", "sh", "proto", "tpl", "html", "css", "java", "go", "lua")
    )
    found, held = {path for pattern in patterns for path in tracked(pattern)}, set(rooms())
    texts = {path for path in found if path.suffix != ".png" and path.name != "uv.lock"}
    return sorted(path for path in texts if path.parent not in held and "fixtures" not in path.parts)


@pytest.mark.parametrize("path", documents(), ids=lambda p: str(p.relative_to(ROOT)))
def test_documents_say_which_component_acts(path: Path) -> None:
    """As in `PLAIN_ROOMS`."""
    bad = [n for n, line in enumerate(path.read_text().splitlines(), 1) if PERSONS.search(line)]
    assert not bad, f"lines {bad}"


@pytest.mark.slow
def test_no_markers_and_no_machine_paths() -> None:
    """No unfinished work, no path of one machine, no registry host in what users read."""
    pattern = re.compile(
        "|".join(
            [rf"\b{marker}\b" for marker in MARKERS]
            + [r"/work/(main|shared|wt)", r"/root/\.", r"proxy\.golang\.org", r"files\.pythonhosted"]
        )
    )
    bad = []
    for path in [
        *tracked("*.py"),
        *tracked("*.md"),
        *tracked("*.sh"),
        *tracked("*.yaml"),
        *tracked("Makefile"),
        *tracked("*Dockerfile*"),
        *tracked(".ci/*"),
    ]:
        if path == Path(__file__).resolve():
            continue
        bad += [
            f"{path.relative_to(ROOT)}:{n}"
            for n, line in enumerate(path.read_text().splitlines(), 1)
            if pattern.search(line)
        ]
    assert not bad
