"""`pdserve keys`, and the keys that commands bring: shown once, kept as hashes, taken from files or the environment."""

from pathlib import Path

import pytest

from common.values.config import ClusterConfig, RouterSettings
from deploy.cli.keys import hash_line, run_list, run_new
from deploy.cli.main import app
from deploy.client.credentials import admin_key_of, admin_key_of_environment, with_admin_key
from deploy.config.variables import InvalidSettings
from router.tenants.key_file import parse_key_file


def test_a_new_key_goes_to_stdout_alone_and_its_hash_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    run_new("acme", None)
    shown = capsys.readouterr()
    key = shown.out.strip()
    assert shown.out == f"{key}\n"
    assert hash_line(key) in shown.err
    assert "tenants.acme.keys" in shown.err
    assert key not in shown.err


def test_keys_are_added_to_a_file_that_keeps_what_it_had(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.yaml"
    run_new("acme", path)
    secret = parse_key_file(path.read_bytes()).cache_salt_secret
    path.write_text(path.read_text().replace("  acme:\n", "  acme:\n    limits: {max_concurrent: 3}\n"))
    run_new("acme", path)
    run_new("beta", path)
    keys = capsys.readouterr().out.split()
    file = parse_key_file(path.read_bytes())
    assert [line for _, line in file.key_hashes()] == [hash_line(key) for key in keys]
    assert file.tenants["acme"].limits.max_concurrent == 3
    assert file.cache_salt_secret == secret
    assert [path.name for path in tmp_path.iterdir()] == ["keys.yaml"]


@pytest.mark.parametrize("content", ["tenants: [", "tenants: {}\n", "just text"])
def test_a_file_that_is_no_file_of_keys_is_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(content)
    with pytest.raises(InvalidSettings, match=str(path)):
        run_new("acme", path)
    assert path.read_text() == content


def test_a_name_that_no_tenant_can_have_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidSettings):
        run_new("a/b", tmp_path / "keys.yaml")
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""  # no key that opens nothing


def test_the_list_shows_no_whole_hash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.yaml"
    run_new("acme", path)
    key = capsys.readouterr().out.strip()
    run_list(path)
    shown = capsys.readouterr().out
    assert "acme: 1 keys" in shown
    assert hash_line(key)[:19] in shown
    assert hash_line(key) not in shown


def test_no_option_of_any_command_takes_a_key() -> None:
    """A command line is there for every user of the machine to read; bench's is for keys of others' servers."""
    import typer

    group = typer.main.get_command(app)
    commands = dict(group.commands)  # type: ignore[attr-defined]
    names = {option for name, command in commands.items() if name != "bench" for option in _options(command)}
    assert not {name for name in names if "key" in name or "secret" in name or "password" in name}


def test_the_admin_key_of_the_environment_comes_from_a_file_first(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("of-file\n")
    both = {"PDSERVE_ROUTER_ADMIN_KEY": "plain", "PDSERVE_ROUTER_ADMIN_KEY_FILE": str(tmp_path / "key")}
    assert admin_key_of_environment(both) == "of-file"
    assert admin_key_of_environment({"PDSERVE_ROUTER_ADMIN_KEY": "plain"}) == "plain"
    assert admin_key_of_environment({}) == ""
    assert admin_key_of(RouterSettings(admin_key_file=str(tmp_path / "key"))) == "of-file"
    with pytest.raises(InvalidSettings, match="none"):
        admin_key_of(RouterSettings(admin_key_file=str(tmp_path / "none")))


def test_a_cluster_with_api_keys_always_has_an_admin_key_of_its_own() -> None:
    assert with_admin_key(ClusterConfig()) == ClusterConfig()
    keyed = ClusterConfig(router=RouterSettings(api_keys_file="keys.yaml"))
    first, second = (with_admin_key(keyed).router.admin_key for _ in range(2))
    assert len(first) >= 40
    assert first != second
    stated = ClusterConfig(router=RouterSettings(api_keys_file="keys.yaml", admin_key="mine"))
    assert with_admin_key(stated) == stated


def _options(command: object) -> list[str]:
    nested = [option for each in getattr(command, "commands", {}).values() for option in _options(each)]
    return [option for parameter in command.params for option in parameter.opts] + nested  # type: ignore[attr-defined]
