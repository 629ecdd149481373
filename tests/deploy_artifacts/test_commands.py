"""What manifests, compose file, notes and guides tell people and machines to run exists, with its options."""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.deploy_artifacts.toolbox import ROOT

SOURCES = [
    *(ROOT / "deploy" / "helm").rglob("*.yaml"),
    ROOT / "deploy" / "helm" / "pdserve" / "templates" / "NOTES.txt",
    *(ROOT / "deploy" / "docker").glob("*"),
    *(ROOT / "deploy" / "ray").glob("*.yaml"),
    *(ROOT / "docs" / "deploy").glob("*.md"),
]
# A command at the start of a line or argument list, after `exec`, or in backquotes.
_COMMAND = re.compile(
    r"(?:^\s*(?:\$ )?|exec |`|-- |/bin/)pdserve ([a-z][a-z-]*(?: (?:show|new|list))?)((?: [^\n`]*)?)", re.MULTILINE
)
# Arguments of a container whose entry point is pdserve.
_CONTAINER = re.compile(r"(?:args|command): ?(?:\[|\n\s*- )(router|worker)\b((?:[^\]]*?--[\w-]+)*)")


def commands() -> set[tuple[str, str, frozenset[str]]]:
    """(file, command, options) of everything that is to be run."""
    found = set()
    for path in SOURCES:
        if not path.is_file():
            continue
        text = path.read_text().replace("\\\n", " ").replace("\n      --", " --")
        for match in [*_COMMAND.finditer(text), *_CONTAINER.finditer(text)]:
            options = frozenset(re.findall(r"(?<=\s)--[a-z][\w-]*", match.group(2)))
            found.add((str(path.relative_to(ROOT)), match.group(1), options))
    return found


COMMANDS = sorted(commands(), key=str)


@cache
def help_of(command: str) -> "subprocess.CompletedProcess[str]":
    arguments = [sys.executable, "-m", "deploy.cli", *command.split(), "--help"]
    return subprocess.run(arguments, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)


def case(found: tuple[str, str, frozenset[str]]) -> object:
    return pytest.param(*found, id=f"{Path(found[0]).name}: {found[1]} {' '.join(sorted(found[2]))}")


@pytest.mark.parametrize(("where", "command", "options"), [case(found) for found in COMMANDS])
def test_the_command_exists_with_its_options(where: str, command: str, options: frozenset[str]) -> None:
    done = help_of(command)
    assert done.returncode == 0, f"{where}: pdserve {command}: {done.stderr}"
    known = set(re.findall(r"--[a-z][\w-]*", done.stdout))
    assert options <= known, f"{where}: pdserve {command} has no {options - known}"


def test_the_search_finds_what_is_there() -> None:
    """Routers and workers are run by the chart, compose and Dockerfiles; guides show the tools."""
    names = {(where.split("/")[1], command) for where, command, _ in COMMANDS}
    assert {("docker", "worker"), ("docker", "router"), ("helm", "deploy"), ("ray", "deploy")} <= names
    assert {command for where, command in names if where == "deploy"} >= {"status", "scale", "drain"}
