"""Every distribution builds from its own source distribution, with all that it needs inside."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CRDS = {f"persist_operator/crds/{path.name}" for path in (ROOT / "crds").glob("*.yaml")}


def direct_packages(names) -> set[str]:
    """Top folders of a wheel with code in them."""
    return {name.partition("/")[0] for name in names if name.endswith(".py")}


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["engine", "operator", "spark-images"])
def test_a_wheel_built_from_the_sdist_is_the_one_built_from_the_checkout(tmp_path, folder):
    """With what `make setup` has fetched: nothing is asked of a network."""
    if folder == "spark-images":
        subprocess.run([sys.executable, ROOT / "spark-images/catalog/build_catalog.py"], check=True, timeout=240)
    build = ["uv", "build", "--quiet", "--offline", str(ROOT / folder)]
    subprocess.run([*build, "--out-dir", tmp_path / "by-sdist"], check=True, timeout=240)
    subprocess.run([*build, "--wheel", "--out-dir", tmp_path / "direct"], check=True, timeout=240)
    (sdist,) = (tmp_path / "by-sdist").glob("*.tar.gz")
    wheels = [zipfile.ZipFile(path) for path in tmp_path.glob("*/*.whl")]
    by_sdist, direct = ({info.filename: info.CRC for info in wheel.infolist()} for wheel in wheels)
    assert by_sdist == direct
    assert any(name.endswith(".py") for name in direct)
    assert {f"{package}/py.typed" for package in direct_packages(direct)} <= set(direct)
    (licence,) = (name for name in direct if name.endswith("/licenses/LICENSE"))
    assert wheels[0].read(licence) == (ROOT / "LICENSE").read_bytes()
    if folder == "operator":
        with tarfile.open(sdist) as archive:
            members = {member.name.partition("/")[2]: member for member in archive}
        assert all(members[name].isfile() for name in CRDS)
        assert set(direct) >= CRDS
        assert all(wheels[0].read(name) == (ROOT / "crds" / Path(name).name).read_bytes() for name in CRDS)
    if folder == "spark-images":
        jar = "persist_spark/catalog/persist-catalog.jar"
        assert wheels[0].read(jar) == (ROOT / folder / jar).read_bytes()
        assert "pyspark_persist_catalog/__init__.py" in direct
