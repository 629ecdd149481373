"""Environments of other people's suites: each of its own under build/suites, versions pinned, made once."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from tests.paths import ROOT

HOME = ROOT / "build" / "suites"
INSTALL_LIMIT_S = 1800
PINS = {
    "openai": ("openai==3.57.0",),
    "langchain": (
        "langchain-openai==1.7.4",
        "langchain-tests==1.1.9",
    ),
    "lm_eval": ("lm-eval[api]==0.4.13", "transformers==5.24.0"),
    "guidellm": ("guidellm==0.8.1",),
}
COMPAT_CANARY = "compatcanary@0.2.2"


def python_of(name: str) -> Path:
    """The interpreter of an environment, which is made first where it is not there. Raises CalledProcessError."""
    home, mark = HOME / name, HOME / name / f"installed-{hash_of(PINS[name])}"
    if not mark.exists():
        shutil.rmtree(home, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        pip = [str(home / "bin" / "pip"), "install", "--quiet", *PINS[name]]
        subprocess.run(pip, check=True, timeout=INSTALL_LIMIT_S, capture_output=True)
        mark.touch()
    return home / "bin" / "python"


def hash_of(pins: tuple[str, ...]) -> str:
    """Equal for equal pins, in every process."""
    return hashlib.sha256(" ".join(pins).encode()).hexdigest()[:16]
