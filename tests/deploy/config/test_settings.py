"""Defaults < file < environment < flags, each value with its origin."""

from pathlib import Path

import pytest

from common.values.config import ClusterConfig
from deploy.config.settings import describe, load_settings, redact_url
from deploy.config.variables import InvalidSettings, check_variables, env_name, setting_paths


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pdserve.yaml"
    path.write_text("router:\n  http_port: 9001\n  grpc_port: 9002\nprefill_worker: {block_size: 32}\n")
    return path


def test_each_layer_wins_over_the_one_below_and_is_named(file: Path) -> None:
    environ = {"PDSERVE_ROUTER_GRPC_PORT": "9003", "PDSERVE_POOLS_DECODE": "3"}
    settings = load_settings({"pools.decode": 4, "pools.prefill": None}, file, environ)
    config = settings.config
    assert (config.router.http_port, settings.origin("router.http_port")) == (9001, str(file))
    assert (config.router.grpc_port, settings.origin("router.grpc_port")) == (9003, "PDSERVE_ROUTER_GRPC_PORT")
    assert (config.pools.decode, settings.origin("pools.decode")) == (4, "--decode")
    assert (config.pools.prefill, settings.origin("pools.prefill")) == (1, "default")
    assert config.prefill_worker.block_size == 32
    assert config.decode_worker.block_size == 16


def test_without_any_source_everything_is_default() -> None:
    settings = load_settings({}, None, {})
    assert settings.config == ClusterConfig()
    assert {setting.origin for setting in settings.values} == {"default"}


def test_no_two_settings_share_an_environment_variable() -> None:
    names = [env_name(setting.path) for setting in load_settings({}, None, {}).values]
    assert len(names) == len(set(names))
    assert env_name("router.router_id") == "PDSERVE_ROUTER_ID"
    assert env_name("redis_url") == "PDSERVE_REDIS_URL"


def test_variables_of_kubernetes_service_links_are_left_alone() -> None:
    """As Kubernetes sets them for services called pdserve and pdserve-router."""
    links = {
        "PDSERVE_PORT": "tcp://10.0.0.1:8000",
        "PDSERVE_SERVICE_HOST": "10.0.0.1",
        "PDSERVE_SERVICE_PORT": "8000",
        "PDSERVE_ROUTER_SERVICE_PORT_HTTP": "8000",
        "PDSERVE_ROUTER_PORT": "tcp://10.0.0.1:8000",
        "PDSERVE_ROUTER_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "PDSERVE_ROUTER_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    assert load_settings({}, None, links).config == ClusterConfig()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("PDSERVE_ROUTER_API_KEY_FILE", "PDSERVE_ROUTER_API_KEYS_FILE"),
        ("PDSERVE_ROUTER_GPRC_PORT", "PDSERVE_ROUTER_GRPC_PORT"),
        ("PDSERVE_ROUTER_ROUTER_ID", "PDSERVE_ROUTER_ID"),
        ("PDSERVE_REDIS", "PDSERVE_REDIS_URL"),
        ("PDSERVE_APIKEY", "PDSERVE_API_KEY"),
        ("PDSERVE_zzz", ""),
    ],
)
def test_a_misspelt_variable_is_refused_with_a_suggestion(name: str, meant: str) -> None:
    with pytest.raises(InvalidSettings) as caught:
        load_settings({}, None, {name: "8000"})
    expected = f"did you mean '{meant}'" if meant else "pdserve config show lists them"
    assert str(caught.value) == f"there is no variable {name}; {expected}{'?' if meant else ''}"


def test_every_setting_may_come_from_its_variable() -> None:
    paths = [setting.path for setting in load_settings({}, None, {}).values]
    assert list(setting_paths()) == paths
    check_variables(dict.fromkeys(map(env_name, paths), "x"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("router: {http_prot: 1}", "there is no setting 'router.http_prot'; did you mean 'router.http_port'?"),
        ("routers: {}\nxyz: 1", "there is no setting 'xyz'"),
        ("- 1", "expected settings by name, got list"),
        ("a: [", "is not YAML"),
        ("router: {http_port: abc}", "router.http_port (from"),
        ("router: {http_port: 70000}", "less than or equal to 65535"),
        ("router: 7", "there is no setting 'router'"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    with pytest.raises(InvalidSettings) as caught:
        load_settings({}, path, {})
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(InvalidSettings, match="No such file"):
        load_settings({}, Path("/nonexistent/pdserve.yaml"), {})


def test_a_bad_environment_variable_is_named_without_its_value() -> None:
    with pytest.raises(InvalidSettings, match="PDSERVE_ROUTER_HTTP_PORT") as caught:
        load_settings({}, None, {"PDSERVE_ROUTER_HTTP_PORT": "secret"})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:secret@127.0.0.1:6390/0", "redis://:(hidden)@127.0.0.1:6390/0"),
        ("rediss://user:se@cret@host/0", "rediss://user:(hidden)@host/0"),
        ("redis://host/0?password=se%40cret&ssl_ca_certs=ca", "redis://host/0?password=(hidden)&ssl_ca_certs=ca"),
        ("redis://u@host/0?db=1&password=secret", "redis://u:(hidden)@host/0?db=1&password=(hidden)"),
        ("redis://host/0?password_file=/run/key", "redis://host/0?password_file=/run/key"),
        ("redis://127.0.0.1:6390", "redis://127.0.0.1:6390"),
        ("", ""),
    ],
)
def test_passwords_are_not_shown(url: str, shown: str) -> None:
    assert redact_url(url) == shown
    settings = load_settings({"redis_url": url}, None, {})
    assert next(setting.shown for setting in settings.values if setting.path == "redis_url") == shown


def test_processes_get_their_part_of_the_tree() -> None:
    flags = {"model.path": "/m", "redis_url": "redis://x", "decode_worker.block_size": 32, "router.http_port": 1234}
    config = load_settings(flags, None, {}).config
    decode = config.worker_config("decode", "decode-0")
    assert (decode.role, decode.block_size, decode.model.path, decode.redis_url) == ("decode", 32, "/m", "redis://x")
    assert config.worker_config("prefill", "p").block_size == 16
    assert (config.router_config().http_port, config.router_config().namespace) == (1234, "pdserve")


def test_every_setting_can_be_described() -> None:
    for setting in load_settings({}, None, {}).values:
        assert isinstance(describe(setting.path), str)


def test_kv_that_would_leave_a_tls_cluster_unencrypted_is_refused_unless_that_is_wanted(tmp_path: Path) -> None:
    path = tmp_path / "pdserve.yaml"
    tls = "tls: {cert_file: c, key_file: k, ca_file: a}\n"
    path.write_text(tls + "decode_worker: {transport: nccl}\n")
    with pytest.raises(InvalidSettings, match="decode_worker: transport nccl does not encrypt KV"):
        load_settings({}, path, {})
    path.write_text(tls + "decode_worker: {transport: nccl, plain_nccl: true}\n")
    assert load_settings({}, path, {}).config.decode_worker.plain_nccl
    path.write_text("decode_worker: {transport: nccl}\n")
    load_settings({}, path, {})
