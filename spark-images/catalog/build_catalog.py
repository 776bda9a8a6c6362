"""Builds the jar of the SQL catalog into the package persist_spark: `make catalog`. `--check` only says whether it is up to date.

The compiler is javac, 17 or newer, and the classpath the jars of pyspark; there is no build tool. Equal sources give equal bytes with one
compiler. The jar carries a digest of the sources, by which a build sees that there is nothing to do.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
JAR = FOLDER.parent / "persist_spark" / "catalog" / "persist-catalog.jar"
#: The entry of the jar with the digest of its sources.
DIGEST = "META-INF/sources.sha256"
_RELEASE = "17"
#: The earliest time that a zip file can hold.
_NO_TIME = (1980, 1, 1, 0, 0, 0)


def sources() -> list[Path]:
    """The files of the catalog."""
    return sorted(FOLDER.glob("io/**/*.java"))


def digest() -> str:
    """A digest of the names and contents of the sources, and of this file."""
    found = hashlib.sha256()
    for path in [*sources(), Path(__file__)]:
        found.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def is_built(jar: Path = JAR) -> bool:
    """Whether the jar was built from the sources at hand."""
    if not jar.exists():
        return False
    with zipfile.ZipFile(jar) as archive:
        return DIGEST in archive.namelist() and archive.read(DIGEST).decode() == digest()


def build(jar: Path = JAR) -> None:
    """Compiles the sources. CalledProcessError with the messages of the compiler."""
    found = importlib.util.find_spec("pyspark")
    assert found is not None
    assert found.origin is not None
    classpath = Path(found.origin).parent / "jars" / "*"
    with tempfile.TemporaryDirectory() as folder:
        options = ["--release", _RELEASE, "-Xlint:all,-classfile,-path", "-Werror", "-proc:none"]
        subprocess.run(["javac", *options, "-cp", classpath, "-d", folder, *sources()], check=True)
        classes = {path.relative_to(folder).as_posix(): path.read_bytes() for path in Path(folder).rglob("*.class")}
    entries = {"META-INF/MANIFEST.MF": b"Manifest-Version: 1.0\r\n\r\n", DIGEST: digest().encode(), **classes}
    new = jar.with_suffix(".new")
    with zipfile.ZipFile(new, "w") as archive:
        for name in [*list(entries)[:2], *sorted(classes)]:
            archive.writestr(zipfile.ZipInfo(name, _NO_TIME), entries[name], zipfile.ZIP_DEFLATED)
    new.replace(jar)


def main() -> int:
    """Builds the jar unless it is up to date. With --check the exit code is 1 if it is not."""
    if is_built():
        return 0
    if "--check" in sys.argv[1:]:
        sys.stderr.write(f"{JAR.name} was not built from the sources at hand: make catalog\n")
        return 1
    build()
    return 0


if __name__ == "__main__":
    sys.exit(main())
