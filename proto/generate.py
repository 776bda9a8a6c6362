"""Write engine/persist_engine/pb from the .proto files here; with --check, compare instead and fail on a difference.

Needs grpcio-tools (in the dev group). Output depends only on the sources and on the version of the generator that
uv.lock pins.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent
TARGET = ROOT.parent / "engine"
PACKAGE = Path("persist_engine/pb")


def generate(out: Path) -> list[Path]:
    """Generate all messages below `out`; the paths written, relative to `out`."""
    sources = sorted((ROOT / PACKAGE).glob("*.proto"))
    well_known = resources.files("grpc_tools") / "_proto"
    arguments = [f"-I{ROOT}", f"-I{well_known}", f"--python_out={out}", f"--pyi_out={out}"]
    if protoc.main(["protoc", *arguments, *(str(source) for source in sources)]) != 0:
        sys.exit("error: protoc refused the sources, see above")
    return sorted(PACKAGE / f"{source.stem}_pb2{end}" for source in sources for end in (".py", ".pyi"))


def differences() -> list[str]:
    """What checked-in code would change: one line for each file that is missing, stale or left over."""
    with tempfile.TemporaryDirectory() as scratch:
        paths = generate(Path(scratch))
        lines = [
            f"{path}: differs from its .proto"
            for path in paths
            if not (TARGET / path).exists() or (TARGET / path).read_bytes() != (Path(scratch) / path).read_bytes()
        ]
    present = {path.relative_to(TARGET) for path in (TARGET / PACKAGE).glob("*_pb2.py*")}
    return lines + [f"{path}: has no .proto" for path in sorted(present - set(paths))]


def main() -> int:
    """0 when everything is (or now is) up to date, 1 when --check found differences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail on differences")
    if not parser.parse_args().check:
        generate(TARGET)
        return 0
    found = differences()
    for line in found:
        sys.stderr.write(f"error: {line}; run `make proto`\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
