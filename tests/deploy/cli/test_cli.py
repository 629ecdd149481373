"""The command line: what it loads, its exit codes and what it prints."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from common.values.config import ClusterConfig, ModelConfig
from deploy.cli import main
from deploy.cli.commands import with_model
from deploy.cli.exit_codes import _CODES
from tests.tiny_model import write_tiny_model


def run(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-m", "deploy.cli", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **(env or {})},
        timeout=120,
        check=False,
    )


def test_help_loads_nothing_heavy() -> None:
    """Help must come at once: no engine, no server and no client library is imported for it (typer loads pydantic)."""
    heavy = ["torch", "ray", "grpc", "fastapi", "redis", "yaml", "numpy", "tokenizers", "gguf"]
    code = (
        "import sys\n"
        "sys.argv = ['pdserve', 'up', '--help']\n"
        "from deploy.cli.main import main\n"
        "try:\n    main()\n"
        "except SystemExit:\n    pass\n"
        f"print('LOADED', [name for name in {heavy!r} if name in sys.modules])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "LOADED []" in result.stdout
    assert "--http-port" in result.stdout


def test_up_has_the_promised_options() -> None:
    text = run("up", "--help").stdout
    for option in (
        "--model", "--prefill", "--decode", "--http-port", "--grpc-port", "--dtype", "--attention",
        "--local-prefill-max-tokens", "--redis-url", "--config",
    ):  # fmt: skip
        assert option in text


def test_speculation_is_turned_on_by_a_flag_of_up(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[ClusterConfig] = []

    def run_up(config: ClusterConfig, *, as_json: bool) -> int:
        started.append(config)
        return 0

    monkeypatch.setattr("deploy.cli.commands.run_up", run_up)
    for arguments in ([], ["--speculation", "ngram"]):
        assert CliRunner().invoke(main.app, ["up", *arguments]).exit_code == 0
    assert [config.decode_worker.speculation for config in started] == ["off", "ngram"]


def test_commands_are_listed() -> None:
    text = run("--help").stdout
    for command in ("up", "generate", "status", "scale", "drain", "router", "worker", "config", "demo", "fetch-model",
        "explain", "top", "doctor", "bench",
    ):  # fmt: skip
        assert f"\n  {command} " in text


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nonsense"], 2, "No such command"),
        (["up", "--dtype", "float8"], 2, "float8"),
        (["scale", "prefill=two"], 2, "expected prefill=N or decode=N"),
        (["scale", "router=2"], 2, "expected prefill=N or decode=N"),
        (["scale"], 2, "expected prefill=N, decode=N or both"),
        (["up", "--config", "/nonexistent.yaml"], 2, "/nonexistent.yaml: No such file"),
        (["router", "--model", "/nonexistent"], 2, "redis_url is not set"),
        (["up", "--model", "/nonexistent"], 1, "no model at /nonexistent"),
        (["up", "--redis-url", "http://:secret@127.0.0.1:9"], 1, "expected redis://HOST:PORT/0, rediss:// or unix"),
        (["up", "--redis-url", "redis://127.0.0.1:x"], 1, "expected redis://HOST:PORT/0, rediss:// or unix"),
        (["status", "--url", "http://127.0.0.1:9"], 1, "is pdserve up running"),
        (["generate", "hi", "--server", "127.0.0.1:9"], 1, "is pdserve up running"),
        (["explain"], 2, "give the id of a request, or --last"),
        (["status", "--url", "http://127.0.0.1:99999"], 2, "expected http://HOST:PORT of a router"),
        (["generate", "hi", "--server", "127.0.0.1"], 2, "expected HOST:PORT of a router's gRPC API"),
        (["explain", "x", "--url", "http://127.0.0.1:9"], 1, "is pdserve up running"),
        (["top", "--once", "--url", "http://127.0.0.1:9"], 1, "is pdserve up running"),
        (["doctor", "--for", "nothing"], 2, "nothing"),
        (["bench", "--url", "http://127.0.0.1:9"], 1, "no connection to 127.0.0.1:9"),
        (
            ["bench", "--url", "http://127.0.0.1:x"],
            1,
            "http://127.0.0.1:x: not an HTTP address (Port could not be cast",
        ),
        (["bench", "--dataset", "mooncake"], 2, "needs --trace"),
        (["bench", "--dataset", "mooncake", "--trace", "/nonexistent"], 2, "/nonexistent"),
        (["bench", "--dataset", "shared-prefix", "--input-len", "9"], 2, "longer than --input-len"),
        (["bench", "--goodput", "speed:1"], 2, "NAME:MILLISECONDS"),
    ],
)
def test_failures_are_one_line_and_an_exit_code(arguments: list[str], code: int, message: str) -> None:
    result = run(*arguments)
    assert (result.returncode, message in result.stderr) == (code, True), result.stderr
    assert "Traceback" not in result.stderr


def test_config_show_names_value_and_origin_and_hides_passwords(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("pools: {decode: 5}")
    env = {"PDSERVE_REDIS_URL": "redis://:hunter2@127.0.0.1:1/0"}
    result = run("config", "show", "--config", str(file), "--json", env=env)
    rows = {row["name"]: row for row in json.loads(result.stdout)}
    assert (rows["pools.decode"]["value"], rows["pools.decode"]["origin"]) == (5, str(file))
    assert (rows["redis_url"]["origin"], "hunter2" in result.stdout) == ("PDSERVE_REDIS_URL", False)
    readable = run("config", "show", env=env).stdout
    assert "router.http_port" in readable
    assert "hunter2" not in readable


def test_every_command_is_described_on_one_whole_line() -> None:
    lines = run("--help").stdout.partition("Commands:")[2].splitlines()
    assert [line for line in lines if line.endswith("...")] == []


def test_every_option_of_every_command_says_what_it_is() -> None:
    from typer.main import get_command

    group = get_command(main.app)
    commands = {**group.commands, **{f"keys {name}": each for name, each in group.commands["keys"].commands.items()}}  # type: ignore[attr-defined]
    unsaid = [
        f"{name} {option.opts[0]}"
        for name, command in commands.items()
        for option in command.params
        if option.name != "help" and not getattr(option, "help", "")
    ]
    assert unsaid == []


@pytest.mark.parametrize("argument", ["version", "--version"])
def test_version_is_the_installed_one(argument: str) -> None:
    from importlib.metadata import version

    assert run(argument).stdout.strip() == version("pdserve")


@pytest.mark.parametrize("command", ["status", "up", "fetch-model"])
def test_a_misspelt_variable_is_refused_by_every_command(command: str) -> None:
    result = run(command, env={"PDSERVE_ROUTER_API_KEY_FILE": "keys.yaml"})
    message = "there is no variable PDSERVE_ROUTER_API_KEY_FILE; did you mean 'PDSERVE_ROUTER_API_KEYS_FILE'?"
    assert (result.returncode, result.stderr) == (2, f"pdserve: {message}\n")


@pytest.mark.parametrize(("module", "name"), _CODES)
def test_every_explained_error_is_where_it_is_looked_for(module: str, name: str) -> None:
    assert issubclass(getattr(importlib.import_module(module), name), Exception)


@pytest.mark.parametrize("name", ["API_KEYS_FILE", "ADMIN_KEY_FILE"])
def test_a_file_of_keys_that_is_away_is_named_before_anything_is_started(name: str) -> None:
    result = run("up", env={f"PDSERVE_ROUTER_{name}": "/nonexistent/keys"})
    assert (result.returncode, result.stderr) == (2, "pdserve: /nonexistent/keys: No such file or directory\n")


@pytest.mark.parametrize("command", ["up", "fetch-model"])
def test_a_cache_that_cannot_be_written_is_one_sentence_with_a_way_out(command: str) -> None:
    result = run(command, env={"PDSERVE_CACHE": "/dev/null/cache"})
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        "pdserve: the demo model cannot be kept in /dev/null/cache: Not a directory; "
        "name a directory in $PDSERVE_CACHE, or a model with --model"
    ]


def test_a_linked_model_keeps_the_name_of_its_link(tmp_path: Path) -> None:
    from common.checkpoint import open_checkpoint

    write_tiny_model(tmp_path / "models--org--name" / "snapshots" / "0123abcd")
    link = tmp_path / "my-model"
    link.symlink_to(tmp_path / "models--org--name" / "snapshots" / "0123abcd")
    config = with_model(ClusterConfig(model=ModelConfig(path=str(link))))
    assert open_checkpoint(config.model.path).served_name == "my-model"


def test_a_model_with_a_broken_template_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny")
    (path / "chat_template.jinja").write_text("{% if %}")
    result = run("up", "--model", str(path))
    assert result.returncode == 1
    assert "the chat template cannot be compiled" in result.stderr
    assert "Traceback" not in result.stderr
