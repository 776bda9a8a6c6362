"""A release in a registry, signed with a key: charts, images and their bills of materials, verified as a user does, without any service.

`make signing` builds cosign and the registry, which takes minutes, and runs this.
"""

import base64
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from persist_kit.servers import Server, certificates

ROOT = Path(__file__).resolve().parents[1]
SEARCHED = f"{os.environ['PATH']}:{Path.home()}/.cache/persist-operator/bin"
COSIGN, REGISTRY, HELM = (shutil.which(name, path=SEARCHED) for name in ("cosign", "persist-registry", "helm"))
ENGINE = shutil.which("docker") or shutil.which("podman")
CHARTS = ("persist-operator", "persist-operator-crds")
IMAGES = ("engine", "operator", "spark")

pytestmark = [
    pytest.mark.release,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not (COSIGN and REGISTRY and HELM), reason="`make signing` builds cosign and a registry first"),
]
of_images = pytest.mark.skipif(ENGINE is None, reason="neither docker nor podman is here to build images with")


@dataclass(frozen=True)
class Release:
    """What `make release` wrote into a folder and pushed, and the keys: the one that signed, and another."""

    out: Path
    pushed: str
    version: str
    key: Path
    other: Path
    environ: dict[str, str]

    def run(self, *command, **options):
        return subprocess.run(
            command, env=self.environ, capture_output=True, text=True, timeout=300, check=False, **options
        )

    def chart(self, name):
        return f"{self.pushed}/charts/{name}:{self.version}"

    def image(self, name):
        return f"{self.pushed}/persist-{name}:{self.version}"

    def verify(self, reference, *, key=None, verb="verify", words=()):
        return self.run(COSIGN, verb, "--key", key or self.key, "--insecure-ignore-tlog=true", *words, reference)


def authorities(folder):
    """The certificates that this machine trusts, and that of the registry."""
    known = [Path(os.environ.get("SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt")), certificates(folder)]
    bundle = folder / "authorities.pem"
    bundle.write_bytes(b"\n".join(path.read_bytes() for path in known if path.exists()))
    return bundle


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    folder = tmp_path_factory.mktemp("signing")
    environ = {**os.environ, "PATH": SEARCHED, "SSL_CERT_FILE": str(authorities(folder)), "COSIGN_PASSWORD": "secret"}
    keys = []
    for name in ("mine", "other"):
        (folder / name).mkdir()
        subprocess.run([COSIGN, "generate-key-pair"], cwd=folder / name, env=environ, check=True, timeout=60)
        keys.append(folder / name / "cosign.pub")
    (folder / "blobs").mkdir()
    served = [str(folder / name) for name in ("blobs", "server.crt", "server.key")]

    def answers(port):
        url = f"https://127.0.0.1:{port}/v2/"
        return (
            subprocess.run(["curl", "-fs", "--cacert", folder / "ca.pem", url], check=False, timeout=10).returncode == 0
        )

    registry = Server(lambda port: [REGISTRY, f"127.0.0.1:{port}", *served], answers, folder)
    try:
        pushed, out = f"{registry.address}/persist", folder / "out"
        asked = {"REGISTRY": pushed, "OUT": str(out), "UV_OFFLINE": "1", "SIGN": str(folder / "mine" / "cosign.key")}
        asked |= {} if ENGINE else {"IMAGES": "no"}
        made = subprocess.run(
            ["bash", ROOT / ".ci" / "release.sh"],
            env={**environ, **asked},
            capture_output=True,
            text=True,
            timeout=3000,
            check=False,
        )
        assert made.returncode == 0, made.stdout[-3000:] + made.stderr[-6000:]
        version = (
            (out / "charts").glob("persist-operator-crds-*.tgz").__next__().stem.removeprefix("persist-operator-crds-")
        )
        yield Release(out, pushed, version, *keys, environ)
    finally:
        registry.stop()
        # Gigabytes: the archives of the images, what the registry has, and the names of this registry for the images.
        for left in (folder / "blobs", folder / "out" / "images"):
            shutil.rmtree(left, ignore_errors=True)
        if ENGINE:
            names = [f"{registry.address}/persist/persist-{name}" for name in IMAGES]
            listed = subprocess.run(
                [ENGINE, "images", "--format", "{{.Repository}}:{{.Tag}}"], capture_output=True, text=True, check=False
            )
            mine = [one for one in listed.stdout.split() if one.rpartition(":")[0] in names]
            subprocess.run([ENGINE, "rmi", *mine], capture_output=True, check=False, timeout=120)


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_verifies_with_the_key_and_with_no_other(release, name):
    good = release.verify(release.chart(name))
    assert good.returncode == 0, good.stderr
    (signed,) = json.loads(good.stdout)
    pulled = release.run(
        HELM, "pull", f"oci://{release.pushed}/charts/{name}", "--version", release.version, cwd=release.out
    )
    assert signed["critical"]["image"]["docker-manifest-digest"] in pulled.stdout + pulled.stderr
    assert (release.out / f"{name}-{release.version}.tgz").read_bytes() == (
        release.out / f"charts/{name}-{release.version}.tgz"
    ).read_bytes()
    bad = release.verify(release.chart(name), key=release.other)
    assert bad.returncode != 0
    assert "signature" in bad.stderr


@of_images
@pytest.mark.parametrize("name", IMAGES)
def test_an_image_verifies_and_so_does_its_bill_of_materials(release, name):
    good = release.verify(release.image(name))
    assert good.returncode == 0, good.stderr
    assert release.verify(release.image(name), key=release.other).returncode != 0
    of_bill = {"verb": "verify-attestation", "words": ("--type", "cyclonedx")}
    attested = release.verify(release.image(name), **of_bill)
    assert attested.returncode == 0, attested.stderr
    statement = json.loads(base64.b64decode(json.loads(attested.stdout)["payload"]))
    bill = json.loads((release.out / f"sbom/persist-{name}-{release.version}.cdx.json").read_text())
    assert statement["predicate"] == bill
    assert release.verify(release.image(name), key=release.other, **of_bill).returncode != 0


def test_another_chart_under_the_same_version_does_not_verify(release, tmp_path):
    """The last of the tests: it moves the tag."""
    shutil.copytree(ROOT / "charts" / CHARTS[1], tmp_path / "chart")
    (tmp_path / "chart" / "README.md").write_text("changed")
    version = ["--version", release.version, "--app-version", release.version]
    packed = release.run(HELM, "package", tmp_path / "chart", *version, "--destination", tmp_path)
    assert packed.returncode == 0, packed.stderr
    archive = tmp_path / f"{CHARTS[1]}-{release.version}.tgz"
    pushed = release.run(HELM, "push", archive, f"oci://{release.pushed}/charts")
    assert pushed.returncode == 0, pushed.stderr
    bad = release.verify(release.chart(CHARTS[1]))
    assert bad.returncode != 0
    assert "no signatures found" in bad.stderr


def test_the_checksums_verify_and_other_ones_do_not(release, tmp_path):
    sums = release.out / "SHA256SUMS"
    bundle = ("--bundle", f"{sums}.sigstore.json")
    assert release.verify(str(sums), verb="verify-blob", words=bundle).returncode == 0
    (tmp_path / "SHA256SUMS").write_text(sums.read_text().replace("a", "b"))
    assert release.verify(str(tmp_path / "SHA256SUMS"), verb="verify-blob", words=bundle).returncode != 0
