"""`pdserve up` as a process: it ends with its parent, it ends when killed, and nothing of it is left in any case."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest

from deploy.process.reaper import SESSION_VARIABLE
from tests.ports import free_port
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.cluster

START_LIMIT_S = 180.0
END_LIMIT_S = 60.0

# Starts `pdserve up` and waits, as a shell or a supervisor would.
PARENT = (
    "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-m', 'deploy.cli', *sys.argv[1:]]).returncode)"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


class Started:
    """A `pdserve up --json` below a parent process, ready."""

    def __init__(
        self, model: Path, directory: Path, python: str = sys.executable, env: Mapping[str, str] | None = None
    ) -> None:
        self.log_path = directory / "up.log"
        ports = [str(free_port()), str(free_port())]
        self.options = ["--model", str(model), "--http-port", ports[0], "--grpc-port", ports[1], "--dtype", "float32"]
        with self.log_path.open("wb") as log:
            self.parent = subprocess.Popen(
                [python, "-c", PARENT, "up", "--json", *self.options],
                env={**os.environ, **(env or {})},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.parent.stdout is not None
        line = self.parent.stdout.readline()
        assert line, self.log_path.read_text()
        self.description = json.loads(line)
        (self.up,) = psutil.Process(self.parent.pid).children()
        self.below = self.up.children(recursive=True)
        self.session = next(child.environ()[SESSION_VARIABLE] for child in self.below if "gcs" in child.name())

    def assert_nothing_is_left(self) -> None:
        """Neither a process that was seen, nor any other of the session."""
        _, alive = psutil.wait_procs([self.up, *self.below], timeout=END_LIMIT_S)
        assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
        _until(lambda: not _of_session(self.session))

    def close(self) -> None:
        for process in (self.up, *self.below):
            if process.is_running():
                process.kill()
        self.parent.kill()
        self.parent.wait()
        assert self.parent.stdout is not None
        self.parent.stdout.close()


def test_up_ends_with_its_parent_and_refuses_a_second_start_on_its_ports(model: Path, tmp_path: Path) -> None:
    """On a machine with a space in the interpreter's path, a proxy that is not there, and a locale that is not either.

    1. ready, with what to do next; 2. a second start fails before it starts anything; 3. the parent is killed.
    """
    (tmp_path / "a b").symlink_to(sys.prefix)
    proxy = f"http://127.0.0.1:{free_port()}"
    environment = {**dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), proxy), "LC_ALL": "xx_YY.UTF-8"}
    started = Started(model, tmp_path, str(tmp_path / "a b" / "bin" / "python"), environment)
    try:
        assert [worker["state"] for worker in started.description["workers"]] == ["ready", "ready"]
        assert started.description["model"] == "tiny"
        second = subprocess.run(
            [sys.executable, "-m", "deploy.cli", "up", *started.options], capture_output=True, text=True, check=False
        )
        assert second.returncode == 1
        assert "is another pdserve up running? Choose another with --http-port" in second.stderr
        assert "==> redis" not in second.stderr
        started.parent.kill()
        started.assert_nothing_is_left()
        assert "stopping (the parent process ended)" in started.log_path.read_text()
    finally:
        started.close()


def test_nothing_is_left_of_an_up_that_was_killed(model: Path, tmp_path: Path) -> None:
    started = Started(model, tmp_path)
    try:
        os.kill(started.up.pid, signal.SIGKILL)
        started.assert_nothing_is_left()
    finally:
        started.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_ray_starts_ends_up_cleanly(model: Path, number: signal.Signals) -> None:
    ports = [str(free_port()), str(free_port())]
    options = ["--model", str(model), "--http-port", ports[0], "--grpc-port", ports[1]]
    command = [sys.executable, "-m", "deploy.cli", "up", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as up:
        assert up.stderr is not None
        lines = iter(up.stderr.readline, "")
        runtime_dir = next(line.split()[5] for line in lines if "logs are below" in line)
        assert any("ray: starting" in line for line in lines)
        _until(lambda: bool(psutil.Process(up.pid).children(recursive=True)[2:]))
        up.send_signal(number)
        rest = list(lines)
        assert up.wait(END_LIMIT_S) == 0
    assert rest == [f"==> pdserve: stopped ({number.name}) while starting\n"]
    assert not Path(runtime_dir).exists()


def test_a_worker_that_cannot_start_ends_up_with_its_reason(model: Path, tmp_path: Path) -> None:
    """More blocks than memory: the actors fail, and the command says why instead of trying forever."""
    config = tmp_path / "config.yaml"
    config.write_text(f"decode_worker: {{num_blocks: {1 << 40}}}\n")
    ports = [str(free_port()), str(free_port())]
    options = ["--model", str(model), "--http-port", ports[0], "--grpc-port", ports[1], "--config", str(config)]
    result = subprocess.run(
        [sys.executable, "-m", "deploy.cli", "up", *options],
        capture_output=True,
        text=True,
        timeout=START_LIMIT_S,
        check=False,
    )
    assert result.returncode == 1
    assert "no decode worker gets ready. decode-0:" in result.stderr
    assert "Traceback" not in result.stderr


def _of_session(session: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(SESSION_VARIABLE) == session:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def _until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + END_LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
