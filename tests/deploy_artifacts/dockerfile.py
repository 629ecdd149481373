"""The little that the tests need to know about Dockerfiles: instructions, and the shell commands in RUN."""

import re
from pathlib import Path


def instructions(path: Path) -> list[tuple[str, str]]:
    """(keyword, arguments) of each instruction, continuation lines joined, comments dropped."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    found = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [(keyword.upper(), rest) for keyword, rest in found]


def final_stage(path: Path) -> list[tuple[str, str]]:
    """The instructions of the last stage: what the image is."""
    every = instructions(path)
    last = max(idx for idx, (keyword, _) in enumerate(every) if keyword == "FROM")
    return every[last:]


def run_commands(path: Path) -> list[str]:
    """The simple commands of all RUN instructions, split at `&&`."""
    runs = [rest for keyword, rest in instructions(path) if keyword == "RUN"]
    return [command.strip() for run in runs for command in run.split("&&")]


def build_argument(path: Path, name: str) -> str:
    """The default of an ARG."""
    defaults = [rest.partition("=")[2] for keyword, rest in instructions(path) if rest.startswith(f"{name}=")]
    return defaults[0]
