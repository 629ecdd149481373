"""Validators and rendered manifests, shared by the tests of deploy/."""

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy_artifacts import toolbox

VALUES_DIR = Path(__file__).with_name("values")
VALUE_SETS = sorted(path.stem for path in VALUES_DIR.glob("*.yaml"))

Helm = Callable[..., "subprocess.CompletedProcess[str]"]
Render = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="session")
def tools() -> Path:
    """The directory with the validators; the tests that need it are skipped where it cannot be installed."""
    try:
        site = toolbox.install()
    except toolbox.ToolsMissing as missing:
        pytest.skip(str(missing))
    if str(site) not in sys.path:
        sys.path.append(str(site))
    return site


@pytest.fixture(scope="session")
def bare_helm(tools: Path) -> Helm:
    """Helm as a user has it."""

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [str(tools / "bin" / "helm"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    return run


@pytest.fixture(scope="session")
def helm(bare_helm: Helm) -> Helm:
    """Helm with a registry for the images, which the chart has no default for."""
    return lambda command, *arguments: bare_helm(command, *arguments, *toolbox.IMAGES)


@pytest.fixture(scope="session")
def render(helm: Helm) -> Render:
    """The chart's manifests under one of the value sets."""

    @cache
    def manifests(value_set: str) -> list[dict[str, Any]]:
        values = str(VALUES_DIR / f"{value_set}.yaml")
        done = helm("template", "pd", str(toolbox.CHART), "--namespace", "serving", "--values", values)
        assert done.returncode == 0, done.stderr
        return [document for document in yaml.load_all(done.stdout, yaml.CSafeLoader) if document]

    return manifests
