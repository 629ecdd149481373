"""The commands that README and docs show, and how each can be tried on one machine. Pure: no IO.

A command stands in an indented or fenced block that begins with a program of PROGRAMS, or whole in backquotes. Where a
fence has lines with `$ `, it is a transcript, and those are its only commands. Continued lines, open quotes and
here-documents belong to a command.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile

PROGRAMS = (
    "make",
    "pdserve",
    ".venv/bin/pdserve",
    "curl",
    "helm",
    "kubectl",
    "docker",
    "ray",
    "python",
    "export",
    "git",
)
_INLINE = re.compile(r"`((?:make|pdserve|\.venv/bin/pdserve|python -m|curl|helm|kubectl) [^`]*)`")


class How(StrEnum):
    """What becomes of a command."""

    RUN = "run"  # to its end, which must be a success
    MENTION = "mention"  # spoken of, without what it needs: that there is such a command
    SERVE = "serve"  # until the page's other commands are done
    LONG = "long"  # as RUN, where long ones are asked for
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class Command:
    page: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Rule:
    """What fits `pattern` is tried so; `why` says what is missing where it is not."""

    pattern: str
    how: How
    why: str = ""


NO_CLUSTER = "needs a Kubernetes cluster"
RULES = (
    Rule(r"^(kubectl|helm (install|upgrade|uninstall|rollback|repo))\b", How.NOT_RUN, NO_CLUSTER),
    Rule(r"^(docker|export REGISTRY)\b", How.NOT_RUN, "needs Docker and a registry"),
    Rule(r"^make gpu\b", How.NOT_RUN, "needs a GPU"),
    Rule(r"^make docs-check\b", How.NOT_RUN, "is this command"),
    Rule(r"^make mutation\b", How.LONG),
    Rule(r"^pdserve (drain|explain|scale|top)$", How.MENTION),
    Rule(r"^pdserve up --model ~", How.NOT_RUN, "needs a model whose terms the reader must accept"),
    Rule(r"^make bench-peers\b|--peers\b", How.LONG, "installs other servers"),
    Rule(r"^make suites\b", How.LONG, "installs other people's suites"),
    Rule(r"^make (test|sim|explore|chaos|soak|bench|aot)\b", How.LONG),
    Rule(r"^python -m tests\.(bench|chaos|simkit)\b", How.LONG),
    Rule(r"^python -m tests\.tools\.robustness_doc --write", How.NOT_RUN, "writes into the checkout"),
    Rule(
        r"^(ray start|pdserve deploy|pdserve worker|export PDSERVE_REDIS_URL|pdserve router)\b",
        How.NOT_RUN,
        "needs machines of a Ray cluster",
    ),
    Rule(r"^pdserve roll --release\b", How.NOT_RUN, NO_CLUSTER),
    Rule(r"(^|\s)(\.venv/bin/)?pdserve up\b", How.SERVE),
    Rule(r"^git clone\b", How.NOT_RUN, "is what docs-check itself begins with"),
    Rule(r"^(make|curl|python -m|(\.venv/bin/)?pdserve)\b", How.RUN),
)
NEEDS_SERVER = re.compile(r"^(curl|(\.venv/bin/)?pdserve (audit|bench|drain|explain|generate|roll|scale|status|top))\b")
# What stands for a value of the reader's.
PLACEHOLDERS = {
    "PROMPT": "'The capital of France is'", "WORKER": "decode-0", "ID": "--last",
    "DIR": "build/docs-check", "NAME": "acme", "[--chat]": "--chat", "SEED": "7",
}  # fmt: skip


def commands_of(page: str, text: str) -> Iterator[Command]:
    """The commands of a page, in its order."""
    lines = text.splitlines()
    is_fenced = is_transcript = False
    idx = 0
    while idx < len(lines):
        line = lines[idx]
        is_fence = line.startswith("```")
        if is_fence:
            is_fenced = not is_fenced
            is_transcript = is_fenced and _is_transcript(lines[idx + 1 :])
        shown = line.strip() if is_fenced or line.startswith("    ") else ""
        if is_transcript:
            shown = line if line.startswith("$ ") else " "
        shown = shown.removeprefix("$ ")
        if (not is_fence and shown.split(" ")[0] in PROGRAMS) or re.match(r"[A-Z_]+=\S+ pdserve ", shown):
            whole, used = _whole(lines[idx:])
            yield Command(page, idx + 1, whole)
            idx += used
            continue
        if not shown:
            yield from (Command(page, idx + 1, found) for found in _INLINE.findall(line))
        idx += 1


def _is_transcript(lines: Sequence[str]) -> bool:
    """Of the lines after the one that opens a fence."""
    inside = takewhile(lambda line: not line.startswith("```"), lines)
    return any(line.startswith("$ ") for line in inside)


def _whole(lines: Sequence[str]) -> tuple[str, int]:
    """A command with all its lines, without its comment; how many lines it takes."""
    text = lines[0].strip().removeprefix("$ ")
    end = re.search(r"<<'?(\w+)'?", text)
    used = 1
    while used < len(lines):
        is_open = not any(line.strip() == end[1] for line in text.splitlines()[1:]) if end else not _is_complete(text)
        if not is_open:
            break
        text += "\n" + lines[used].strip()
        used += 1
    return re.sub(r"\s{2,}#.*$|\s&$", "", text, flags=re.M), used


def _is_complete(text: str) -> bool:
    if text.endswith("\\"):
        return False
    try:
        shlex.split(text)
    except ValueError:
        return False
    return True


def rule_of(command: Command) -> Rule | None:
    """The first that fits; None is a fault of RULES or of the page."""
    return next((rule for rule in RULES if re.search(rule.pattern, command.text)), None)


def filled_in(command: Command) -> str:
    """The command with the reader's values in it."""
    words = re.split(r"(\s+)", command.text)
    return "".join(PLACEHOLDERS.get(word, word) for word in words)
