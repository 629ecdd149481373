"""The images: Dockerfiles that lint, run as no particular user, and whose install steps work."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
import yaml

from tests.deploy_artifacts.dockerfile import build_argument, final_stage, instructions, run_commands
from tests.deploy_artifacts.toolbox import CHART, ROOT

DOCKER_DIR = ROOT / "deploy" / "docker"
DOCKERFILES = [DOCKER_DIR / "Dockerfile.router", DOCKER_DIR / "Dockerfile.worker"]
each_dockerfile = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.suffix[1:])
INSTALL_LIMIT_S = 240


@each_dockerfile
def test_hadolint_finds_nothing(tools: Path, path: Path) -> None:
    command = [str(tools / "bin" / "hadolint"), "--failure-threshold", "style", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@each_dockerfile
def test_the_image_runs_as_a_numeric_user_without_root(path: Path) -> None:
    """A numeric user is what lets Kubernetes check runAsNonRoot; nothing after it may need root."""
    stage = final_stage(path)
    users = [idx for idx, (keyword, rest) in enumerate(stage) if keyword == "USER"]
    assert [stage[idx][1] for idx in users] == ["10001:10001"]
    assert not [keyword for keyword, _ in stage[users[0] :] if keyword in ("RUN", "COPY", "ADD")]


@each_dockerfile
def test_the_image_says_what_it_is_and_how_it_is(path: Path) -> None:
    stage = dict(final_stage(path))
    for label in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{label}=" in stage["LABEL"]
    assert "CMD" in stage["HEALTHCHECK"]
    assert json.loads(stage["ENTRYPOINT"]) == ["pdserve"]


@each_dockerfile
def test_base_images_and_packages_are_pinned(path: Path) -> None:
    image = build_argument(path, "PYTHON_IMAGE")
    assert re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+", image)
    bases = {rest.split()[0] for keyword, rest in instructions(path) if keyword == "FROM"}
    assert bases <= {"${PYTHON_IMAGE}", "${VARIANT}"}
    (install,) = [command for command in run_commands(path) if "pip install" in command]
    assert "-c constraints.txt" in install


@each_dockerfile
def test_the_health_check_is_python_that_compiles(path: Path) -> None:
    command = json.loads(dict(final_stage(path))["HEALTHCHECK"].partition("CMD")[2])
    assert command[:2] == ["python", "-c"]
    compile(command[2], str(path), "exec")


def test_the_demo_model_lies_where_chart_compose_and_manifest_look_for_it() -> None:
    from common.checkpoint.demo_model import FILE_NAME

    expected = f"/opt/pdserve/models/{FILE_NAME}"
    assert all("PDSERVE_CACHE=/opt/pdserve/models" in path.read_text() for path in DOCKERFILES)
    assert yaml.safe_load((CHART / "values.yaml").read_text())["model"]["path"] == expected
    assert yaml.safe_load((DOCKER_DIR / "pdserve.yaml").read_text())["model"]["path"] == expected
    assert f"path: {expected}" in (ROOT / "deploy" / "ray" / "raycluster.yaml").read_text()


def test_the_build_context_has_what_is_built_and_no_more() -> None:
    for path in DOCKERFILES:
        lines = Path(f"{path}.dockerignore").read_text().splitlines()
        assert "*" in lines
        kept = {line[1:] for line in lines if line.startswith("!")}
        build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
        assert set(build["targets"]["wheel"]["packages"]) | {"pyproject.toml", "constraints.txt", "README.md"} <= kept
        assert all((ROOT / name).exists() for name in kept)


def test_constraints_of_ray_agree_with_the_others() -> None:
    """Two files constrain the worker image: no package may be in both."""

    def pins(path: Path) -> set[str]:
        lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
        assert all("==" in line for line in lines)
        return {line.partition("==")[0].lower().replace("_", "-") for line in lines}

    assert not pins(ROOT / "constraints.txt") & pins(DOCKER_DIR / "constraints-ray.txt")


@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_the_routers_install_steps_give_a_router_without_torch_and_ray(tmp_path: Path) -> None:
    """1. The Dockerfile's own steps in a clean environment; 2. the command answers; 3. the router imports alone."""
    environment = tmp_path / "pdserve"
    steps = [step for step in run_commands(DOCKER_DIR / "Dockerfile.router") if "/opt/pdserve/bin/pip" in step]
    assert len(steps) == 1
    venv.create(environment, with_pip=True)
    command = shlex.split(steps[0].replace("/opt/pdserve", str(environment)).replace("--no-cache-dir", ""))
    assert command[-1] == "."
    done = subprocess.run(
        [*command[:-1], str(ROOT)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=INSTALL_LIMIT_S,
        env={**os.environ, "PYTHONPATH": ""},
        check=False,
    )
    if done.returncode and "No matching distribution found for hatchling" in done.stderr:
        pytest.skip("no package registry can be reached")
    assert done.returncode == 0, done.stderr[-3000:]
    program = (
        "import sys, router.app, deploy.cli.main;"
        "print(router.app.__file__);"
        "print(sorted({'torch', 'ray', 'triton'} & set(sys.modules)))"
    )
    python = environment / "bin" / "python"
    output = subprocess.run([python, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    module, heavy = output.splitlines()
    assert module.startswith(str(environment))
    assert heavy == "[]"
    listed = subprocess.run([python, "-m", "pip", "list"], capture_output=True, text=True, check=True).stdout
    assert not re.search(r"^(torch|ray|triton) ", listed, re.MULTILINE)
    helped = subprocess.run(
        [environment / "bin" / "pdserve", "router", "--help"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert helped.returncode == 0, helped.stderr


def test_every_supported_python_is_that_of_the_image() -> None:
    """The image's Python satisfies requires-python."""
    version = re.search(r"python:(\d+)\.(\d+)", build_argument(DOCKERFILES[0], "PYTHON_IMAGE"))
    floor = re.search(r'requires-python = ">=(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert version is not None
    assert floor is not None
    assert tuple(map(int, version.groups())) >= tuple(map(int, floor.groups())) <= sys.version_info[:2]
