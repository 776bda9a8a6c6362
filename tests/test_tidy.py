"""House rules as tests: sizes, room READMEs, banned names, no clocks or randomness in the pure core."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import tomllib
from collections.abc import Iterable, Iterator
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
    "engine/persist_engine/cli/exit_codes.py": "value",
    "engine/persist_engine/client/expiring.py": "port",
    "engine/persist_engine/shard/opening.py": "entry point",
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


def named(path: Path) -> str:
    """How a message names a file."""
    return str(path.relative_to(ROOT))


@functools.cache
def lines_of(path: Path) -> list[str]:
    """Its lines. Several rules read each file."""
    return path.read_text().splitlines()


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The tree of a module."""
    return ast.parse(path.read_text())


def nodes_of(path: Path) -> Iterator[ast.AST]:
    """The nodes of a module."""
    return ast.walk(parsed(path))


@pytest.fixture(scope="module", autouse=True)
def forgotten() -> Iterator[None]:
    """The trees of all modules are large, and the tests of other files have no use for them."""
    yield
    lines_of.cache_clear()
    parsed.cache_clear()


def test_there_is_something_to_check() -> None:
    """The rules below see the code: an empty listing would make them pass for nothing."""
    assert len(product_files()) > 30
    assert len(sized_files()) > len(product_files())
    assert len(rooms()) > 10
    assert len(documents()) > 30


def sized_files() -> list[Path]:
    """All modules but those of tests."""
    tests, kit = ROOT / "tests", ROOT / "tests" / "kit"
    return [path for path in python_files() if not path.is_relative_to(tests) or path.is_relative_to(kit)]


def test_a_file_is_not_two_things() -> None:
    """500 lines a file."""
    assert not [f"{named(path)}: split it" for path in sized_files() if len(lines_of(path)) > FILE_LINES_MAX]


@pytest.mark.slow
def test_a_function_is_not_too_long() -> None:
    """70 lines a function."""
    bad = []
    for path in sized_files():
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                length = node.end_lineno - node.lineno + 1
                bad += [f"{named(path)}: {node.name} has {length} lines"] if length > FUNCTION_LINES_MAX else []
    assert not bad


@pytest.mark.slow
def test_a_module_head_says_what_it_owns() -> None:
    """Every module begins with a docstring."""
    assert not [named(path) for path in product_files() if not ast.get_docstring(parsed(path))]


def test_each_room_has_a_readme() -> None:
    """It says in about 20 lines what the room owns, what it must not know, where to start."""
    bad = []
    for room in rooms():
        readme = room / "README.md"
        lines = lines_of(readme) if readme.is_file() else []
        if not 5 <= len(lines) <= 40 or sum(line.startswith("# ") for line in lines) != 1:
            bad.append(f"{named(readme)}: must have 5 to 40 lines and one heading, has {len(lines)} lines")
    assert not bad


def test_a_shelf_is_not_too_long() -> None:
    """A reader sees what a room holds at one look."""
    shelves = {room: [path for path in room.glob("*.py") if path.name != "__init__.py"] for room in rooms()}
    assert not [f"{named(room)}: make a sub-room" for room, held in shelves.items() if len(held) > MODULES_MAX]


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


def test_named_paths_exist() -> None:
    """From the document's own folder, from its package or from the root."""
    missing = []
    readmes = [room / "README.md" for room in rooms()]
    for document in [ROOT / "ARCHITECTURE.md", *tracked("docs/adr/*.md"), *filter(Path.is_file, readmes)]:
        places = [document.parent, ROOT, *[ROOT / folder / name for folder, name in PACKAGES.items()]]
        for name in sorted(paths_named(document)):
            missing += [] if any((place / name).exists() for place in places) else [f"{named(document)}: {name}"]
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
            for node in nodes_of(path):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and node.func.attr == "new"
                    and not node.args
                ):
                    bad.append(f"{named(path)}:{node.lineno}")
    assert not bad


@pytest.mark.slow
def test_the_core_imports_no_clock_and_no_randomness() -> None:
    """Beside import-linter: not even inside a function."""
    banned = {"os", "time", "random", "secrets", "uuid", "socket", "threading", "asyncio", "datetime.now"}
    bad = []
    for room in PURE_ROOMS:
        for path in (ROOT / "engine" / "persist_engine" / room).rglob("*.py"):
            for node in nodes_of(path):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                bad += [f"{named(path)} imports {name}" for name in names if name.split(".")[0] in banned]
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
    for node in nodes_of(path):
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


def naming_persons(paths: Iterable[Path]) -> list[str]:
    """The lines with a word that stands for a person."""
    return [f"{named(path)}:{n}" for path in paths for n, line in enumerate(lines_of(path), 1) if PERSONS.search(line)]


def test_prose_says_which_component_acts() -> None:
    """A component acts in a sentence, not a person: such words hide which one."""
    texts = [*tracked("*.py"), *tracked("*.md")]
    held = {room: [path for path in texts if path.is_relative_to(ROOT / room)] for room in PLAIN_ROOMS}
    assert all(held.values()), held
    assert not naming_persons(sorted({path for paths in held.values() for path in paths}))


def documents() -> list[Path]:
    """Documents, and the files that people read around the code. READMEs of rooms are held by `PLAIN_ROOMS`."""
    patterns = ("*.md", "docs/*", ".ci/*", ".github/*", "Makefile", "tests/e2e/*")
    patterns += tuple(
        f"*.{kind}" for kind in ("yaml", "yml", "toml", "sh", "proto", "tpl", "html", "css", "java", "go", "lua")
    )
    found, held = {path for pattern in patterns for path in tracked(pattern)}, set(rooms())
    texts = {path for path in found if path.suffix != ".png" and path.name != "uv.lock"}
    return sorted(path for path in texts if path.parent not in held and "fixtures" not in path.parts)


def test_documents_say_which_component_acts() -> None:
    """As in `PLAIN_ROOMS`."""
    assert not naming_persons(documents())


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
        bad += [f"{named(path)}:{n}" for n, line in enumerate(lines_of(path), 1) if pattern.search(line)]
    assert not bad


def wishes_of(function: ast.FunctionDef) -> set[int]:
    """The numbers in its marks `pytest.mark.wish(N)`."""
    calls = [one for one in function.decorator_list if isinstance(one, ast.Call)]
    marks = [one for one in calls if ast.unparse(one.func) == "pytest.mark.wish"]
    return {value for one in marks for value in map(ast.literal_eval, one.args)}


def test_each_wish_has_a_test_on_the_cluster() -> None:
    """The table in tests/e2e/README.md names the tests that bear the mark, and there is one for each of the fifteen wishes."""
    folder = ROOT / "tests" / "e2e"
    marked: dict[int, set[str]] = {}
    for path in folder.glob("test_*.py"):
        for node in parsed(path).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                numbers = wishes_of(node)
                assert bool(numbers) == node.name.startswith("test_wish_"), f"{named(path)}: {node.name}"
                for number in numbers:
                    marked.setdefault(number, set()).add(f"{path.name}::{node.name}")
    rows = re.findall(r"^\| (\d+) \|.*\| (`test_.*) \|$", (folder / "README.md").read_text(), re.MULTILINE)
    assert {int(number): set(re.findall(r"`([^`]+)`", tests)) for number, tests in rows} == marked
    assert set(marked) == set(range(1, 16))
