"""compose.yaml: everything on one box, reachable from that box only."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.values.config import ClusterConfig
from tests.deploy_artifacts.toolbox import ROOT

DOCKER_DIR = ROOT / "deploy" / "docker"
COMPOSE = yaml.safe_load((DOCKER_DIR / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SERVICE_KEYS = set(
    [
        "image",
        "build",
        "user",
        "command",
        "entrypoint",
        "environment",
        "volumes",
        "tmpfs",
        "mem_limit",
        "pids_limit",
        "shm_size",
        "read_only",
        "cap_drop",
        "security_opt",
        "restart",
        "ports",
        "networks",
        "depends_on",
        "profiles",
        "secrets",
        "healthcheck",
        "stop_grace_period",
        "deploy",
    ]
)
each_service = pytest.mark.parametrize("name", sorted(SERVICES))


@each_service
def test_services_use_only_known_keys(name: str) -> None:
    assert set(SERVICES[name]) <= SERVICE_KEYS


@each_service
def test_ports_are_published_on_loopback(name: str) -> None:
    for port in SERVICES[name].get("ports", []):
        assert re.fullmatch(r"127\.0\.0\.1:(\d+):\1", port)


@each_service
def test_mounted_files_exist_and_are_read_only(name: str) -> None:
    for volume in SERVICES[name].get("volumes", []):
        source, _, mode = volume.split(":")
        assert (DOCKER_DIR / source).is_file(), source
        assert mode == "ro"


@each_service
def test_images_are_pinned_or_built_here(name: str) -> None:
    service = SERVICES[name]
    if "build" in service:
        context = (DOCKER_DIR / service["build"]["context"]).resolve()
        assert context == ROOT
        assert (context / service["build"]["dockerfile"]).is_file()
    else:
        assert re.search(r":v?\d+\.\d+\.\d+", service["image"])


@each_service
def test_networks_dependencies_and_secrets_are_defined(name: str) -> None:
    service = SERVICES[name]
    assert set(service["networks"]) <= set(COMPOSE["networks"])
    for other, condition in _dependencies(service).items():
        assert other in SERVICES
        if condition == "service_healthy":
            assert "healthcheck" in SERVICES[other]
    assert {secret["source"] for secret in service.get("secrets", [])} <= set(COMPOSE["secrets"])


def _dependencies(service: dict[str, Any]) -> dict[str, str]:
    wanted = service.get("depends_on", {})
    if isinstance(wanted, list):
        return dict.fromkeys(wanted, "service_started")
    return {name: each["condition"] for name, each in wanted.items()}


def test_every_profile_has_both_pools_under_the_same_names() -> None:
    default = re.search(r"^COMPOSE_PROFILES=(\w+)$", (DOCKER_DIR / ".env").read_text(), re.MULTILINE)
    assert default is not None
    profiles = {"cpu", "gpu"}
    assert default.group(1) == "cpu"
    for profile in profiles:
        members = [service for service in SERVICES.values() if profile in service.get("profiles", [])]
        aliases = {alias for service in members for alias in service["networks"]["back"]["aliases"]}
        assert aliases == {"prefill", "decode"}
        assert {service["build"]["args"]["VARIANT"] for service in members} == {{"cpu": "cpu", "gpu": "cuda"}[profile]}


def test_valkey_and_the_workers_reach_nothing_outside() -> None:
    assert COMPOSE["networks"]["back"] == {"internal": True}
    for name in ("valkey", "prefill", "decode", "prefill-gpu", "decode-gpu"):
        assert set(SERVICES[name]["networks"]) == {"back"}
        assert "ports" not in SERVICES[name]


def test_the_password_is_asked_for_and_stored_nowhere() -> None:
    text = (DOCKER_DIR / "compose.yaml").read_text()
    assert "${PDSERVE_VALKEY_PASSWORD:?" in text
    assert COMPOSE["secrets"]["valkey_password"] == {"environment": "PDSERVE_VALKEY_PASSWORD"}


def test_the_configuration_is_accepted() -> None:
    config = ClusterConfig.model_validate(yaml.safe_load((DOCKER_DIR / "pdserve.yaml").read_text()))
    published = [port for port in SERVICES["router"]["ports"]]
    assert published == [f"127.0.0.1:{port}:{port}" for port in (config.router.http_port, config.router.grpc_port)]


def test_prometheus_scrapes_every_process_and_has_the_rules() -> None:
    config = yaml.safe_load((DOCKER_DIR / "prometheus" / "prometheus.yml").read_text())
    (discovery,) = config["scrape_configs"][0]["dns_sd_configs"]
    assert set(discovery["names"]) == {"router", "prefill", "decode"}
    pdserve = ClusterConfig.model_validate(yaml.safe_load((DOCKER_DIR / "pdserve.yaml").read_text()))
    ports = {pdserve.router.metrics_port, pdserve.prefill_worker.metrics_port, pdserve.decode_worker.metrics_port}
    assert ports == {discovery["port"]}
    mounts = {volume.split(":")[1] for volume in SERVICES["prometheus"]["volumes"]}
    assert set(config["rule_files"]) <= mounts


def test_grafana_has_every_dashboard_and_the_data_source() -> None:
    mounts = [volume.split(":")[:2] for volume in SERVICES["grafana"]["volumes"]]
    mounted = {Path(source).name for source, _ in mounts}
    assert {path.name for path in (ROOT / "deploy" / "grafana").glob("*.json")} <= mounted
    provider = yaml.safe_load((DOCKER_DIR / "grafana" / "dashboards.yaml").read_text())["providers"][0]
    folders = {str(Path(target).parent) for source, target in mounts if source.endswith(".json")}
    assert folders == {provider["options"]["path"]}
    source = yaml.safe_load((DOCKER_DIR / "grafana" / "datasources.yaml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090"


def test_valkey_of_compose_and_of_the_chart_run_on_the_same_settings(render: Any) -> None:
    from tests.deploy_artifacts.manifests import named

    chart = named(render("default"), "ConfigMap", "-valkey")["data"]["valkey.conf"]
    compose = (DOCKER_DIR / "valkey.conf").read_text()
    assert chart.replace("pd-pdserve:*", "pdserve:*").strip() == compose.strip()


def test_kernels_that_a_worker_compiles_can_be_loaded() -> None:
    """Triton keeps them below the home, on a tmpfs, which Docker mounts noexec unless told otherwise."""
    for name, service in COMPOSE["services"].items():
        if name.startswith(("prefill", "decode")):
            (home,) = [each for each in service["tmpfs"] if each.startswith("/home/pdserve:")]
            assert "exec" in home.partition(":")[2].split(",")
