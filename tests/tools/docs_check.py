"""`make docs-check`: run what README and docs tell people to run, in a fresh clone, and print what came of it.

    python -m tests.tools.docs_check [PAGE ...] [--long] [--keep DIR]

The clone is of the last commit, with a virtual environment of its own. A server keeps running until its page is done;
where a page speaks of one that runs already, the plain `pdserve up` is started.
Commands that need what one machine lacks are printed as "not run" with the reason; --long runs those of many minutes
too. Exit code 1 when a command failed.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tests.paths import ROOT
from tests.tools.docs_commands import NEEDS_SERVER, Command, How, commands_of, filled_in, rule_of

LIMIT_S = 600.0
LONG_LIMIT_S = 5400.0
READY_LIMIT_S = 240.0
STOP_LIMIT_S = 60.0
READY_URL = "http://127.0.0.1:8000/ready"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a command; `is_failure` where it should have succeeded."""

    command: Command
    text: str
    is_failure: bool = False


def pages(root: Path) -> list[Path]:
    """README, CONTRIBUTING and docs; decisions have no commands to run."""
    docs = [path for path in sorted((root / "docs").rglob("*.md")) if "adr" not in path.parts]
    return [root / "README.md", root / "CONTRIBUTING.md", *docs]


class Shell:
    """Runs the commands of one page in a clone. Owns the servers that it started."""

    def __init__(self, clone: Path, *, has_long: bool) -> None:
        self._clone = clone
        self._has_long = has_long
        self._servers: list[subprocess.Popen[bytes]] = []
        self._environment = {**os.environ, "PATH": f"{clone / '.venv' / 'bin'}:{os.environ['PATH']}"}

    def try_out(self, command: Command) -> Outcome:
        rule = rule_of(command)
        if rule is None:
            return Outcome(command, "no rule of tests/tools/docs_commands.py fits", is_failure=True)
        if rule.how is How.NOT_RUN:
            return Outcome(command, f"not run: {rule.why}")
        if rule.how is How.LONG and not self._has_long:
            return Outcome(command, f"not run: {rule.why or 'takes many minutes'} (--long)")
        if rule.how is How.MENTION:
            return self._run(replace(command, text=f"{command.text} --help"), rule.how)
        if rule.how is How.SERVE:
            return self._serve(command)
        if NEEDS_SERVER.search(command.text) and not self._servers:
            served = self._serve(replace(command, text="pdserve up"))
            if served.is_failure:
                return replace(served, command=command, text=f"pdserve up: {served.text}")
        if "pdserve explain" in command.text:
            self._run(replace(command, text="pdserve generate Hello"), rule.how)  # so that there is one to explain
        return self._run(command, rule.how)

    def close(self) -> None:
        """End the page's servers as Ctrl-C would."""
        for server in self._servers:
            with suppress(ProcessLookupError):  # it may have ended by itself
                os.killpg(server.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                server.wait(STOP_LIMIT_S)
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()
        self._servers.clear()

    def _run(self, command: Command, how: How) -> Outcome:
        started_s = time.monotonic()
        limit_s = LONG_LIMIT_S if how is How.LONG else LIMIT_S
        process = self._start(command, subprocess.PIPE)
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return Outcome(command, f"still running after {limit_s:.0f} s", is_failure=True)
        if process.returncode:
            last = output.decode(errors="replace").strip().splitlines()[-3:]
            return Outcome(command, f"exit code {process.returncode}: {' / '.join(last)}", is_failure=True)
        return Outcome(command, f"ok, {time.monotonic() - started_s:.0f} s")

    def _serve(self, command: Command) -> Outcome:
        """One server at a time: the next one of a page takes the ports of the one before."""
        self.close()
        server = self._start(command, subprocess.DEVNULL)
        self._servers.append(server)
        deadline_s = time.monotonic() + READY_LIMIT_S
        while time.monotonic() < deadline_s and server.poll() is None:
            with suppress(OSError), urllib.request.urlopen(READY_URL, timeout=5):
                return Outcome(command, "ok, serves")
            time.sleep(0.5)
        state = f"ended with {server.returncode}" if server.poll() is not None else "never ready"
        return Outcome(command, state, is_failure=True)

    def _start(self, command: Command, output: int) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            ["bash", "-ec", filled_in(command)],
            cwd=self._clone, env=self._environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip


@contextmanager
def fresh_clone(keep: str | None) -> Iterator[Path]:
    """The last commit in a new folder, installed."""
    folder = Path(keep or tempfile.mkdtemp(prefix="docs-check-"))
    clone = folder / "pdserve"
    try:
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        subprocess.run(["make", "install"], cwd=clone, check=True)
        yield clone
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def check(clone: Path, names: Sequence[str], *, has_long: bool) -> Iterator[Outcome]:
    """Every command of every page whose name has one of `names` in it; all pages without."""
    for page in pages(clone):
        name = str(page.relative_to(clone))
        if names and not any(wanted in name for wanted in names):
            continue
        shell = Shell(clone, has_long=has_long)
        try:
            seen: set[str] = set()
            for command in commands_of(name, page.read_text()):
                if command.text not in seen:
                    seen.add(command.text)
                    yield shell.try_out(command)
        finally:
            shell.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", help="parts of page names; default: all")
    parser.add_argument("--long", action="store_true", help="also what takes many minutes")
    parser.add_argument("--keep", metavar="DIR", help="clone into DIR and keep it")
    options = parser.parse_args()
    num_failures = 0
    with fresh_clone(options.keep) as clone:
        for outcome in check(clone, options.pages, has_long=options.long):
            first = outcome.command.text.splitlines()[0]
            print(f"{outcome.command.page}:{outcome.command.line}  {first[:90]}\n    {outcome.text}", flush=True)
            num_failures += outcome.is_failure
    print(f"{num_failures} failed")
    return 1 if num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
