"""Reaches into the processes of a cluster that was started so: orders to `tests.chaos.inside`, and a clock to shift."""

import json
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.chaos.inside.sitecustomize import FOLDER_VARIABLE
from tests.tools.named_tests import ROOT

INSIDE = Path(__file__).with_name("inside")


class PlantFailed(AssertionError):
    """The process did not do what was asked; the message is its error."""


class Instruments:
    """Owns the folder in which instrumented processes listen."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock: Path | None = None
        if compiler := shutil.which("cc"):
            self.clock = folder / "clock.so"
            command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(self.clock), str(INSIDE / "clock.c"), "-ldl"]
            subprocess.run(command, check=True)

    @contextmanager
    def in_environment(self) -> Iterator[None]:
        """Processes that are started in this block, and their children, are instrumented."""
        before = dict(os.environ)
        paths = [str(INSIDE), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ |= {"PYTHONPATH": os.pathsep.join(paths), FOLDER_VARIABLE: str(self.folder)}
        if self.clock is not None:
            os.environ["LD_PRELOAD"] = str(self.clock)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)

    def order(self, pid: int, plant: str, **arguments: object) -> Any:
        """Run a function of `tests.chaos.inside.plants` in a process; returns what it returned."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(60)
            try:
                connection.connect(str(self.folder / str(pid)))
            except OSError as error:
                raise PlantFailed(f"process {pid} takes no orders: {error}") from error
            connection.sendall(json.dumps({"plant": plant, "arguments": arguments}).encode() + b"\n")
            with connection.makefile() as answers:
                answer = json.loads(answers.readline())
        if "error" in answer:
            raise PlantFailed(f"{plant} in {pid}: {answer['error']}")
        return answer["answer"]

    def moment_of_death(self, pid: int) -> str:
        """Empty unless the process has killed itself."""
        note = self.folder / f"{pid}.died"
        return note.read_text() if note.exists() else ""


@contextmanager
def instruments() -> Iterator[Instruments]:
    with tempfile.TemporaryDirectory(prefix="pdserve-chaos-") as folder:
        yield Instruments(Path(folder))
