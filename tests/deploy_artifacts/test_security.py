"""Every pod and every container of compose.yaml runs with the least that it needs."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy_artifacts.conftest import VALUE_SETS, Render
from tests.deploy_artifacts.manifests import containers, of_kind, pod_templates
from tests.deploy_artifacts.toolbox import ROOT

COMPOSE = yaml.safe_load((ROOT / "deploy" / "docker" / "compose.yaml").read_text())
RAY_MANIFEST = list(yaml.safe_load_all((ROOT / "deploy" / "ray" / "raycluster.yaml").read_text()))
SECRET_WORDS = re.compile(r"(password|token|secret|api_?key)", re.IGNORECASE)


def violations(template: dict[str, Any]) -> list[str]:
    """What a pod template is allowed and must not be."""
    pod = template["spec"]
    faults = [f"{name} is on" for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name)]
    if "hostPath" in str(pod.get("volumes")):
        faults.append("hostPath volume")
    for container in containers(template):
        faults += [f"{container['name']}: {fault}" for fault in container_violations(pod, container)]
    return faults


def container_violations(pod: dict[str, Any], container: dict[str, Any]) -> list[str]:
    security = {**pod.get("securityContext", {}), **container.get("securityContext", {})}
    required = {
        "runAsNonRoot": security.get("runAsNonRoot") is True,
        "numeric user": security.get("runAsUser", 0) >= 10000,
        "readOnlyRootFilesystem": security.get("readOnlyRootFilesystem") is True,
        "no privilege escalation": security.get("allowPrivilegeEscalation") is False,
        "not privileged": not security.get("privileged"),
        "all capabilities dropped": security.get("capabilities", {}) == {"drop": ["ALL"]},
        "seccomp": security.get("seccompProfile") == {"type": "RuntimeDefault"},
        "limits": {"cpu", "memory"} <= set(container.get("resources", {}).get("limits", {})),
        "requests": {"cpu", "memory"} <= set(container.get("resources", {}).get("requests", {})),
        "pinned image": bool(re.search(r"(:[^:/@]*\d[^:/@]*|@sha256:[0-9a-f]{64})$", container["image"])),
        "writable /tmp": "/tmp" in [mount["mountPath"] for mount in container["volumeMounts"]],
    }
    return [f"not: {name}" for name, holds in required.items() if not holds]


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_pods_of_the_chart_run_with_least_privilege(render: Render, value_set: str) -> None:
    found = {component: violations(template) for component, template in pod_templates(render(value_set))}
    assert set(found) >= {"router", "prefill", "decode", "ray-head"}
    assert not any(found.values()), found


def test_pods_of_the_plain_manifest_run_with_least_privilege() -> None:
    found = {component: violations(template) for component, template in pod_templates(RAY_MANIFEST)}
    assert set(found) == {"prefill", "decode", "ray-head"}
    assert not any(found.values()), found


def test_the_lint_finds_a_container_that_may_do_everything() -> None:
    bare = {"spec": {"hostNetwork": True, "containers": [{"name": "x", "image": "y:latest", "volumeMounts": []}]}}
    assert len(violations(bare)) >= 9


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_only_the_head_has_a_token_of_the_kubernetes_api_and_only_to_autoscale(render: Render, value_set: str) -> None:
    manifests = render(value_set)
    autoscales = of_kind(manifests, "RayCluster")[0]["spec"]["enableInTreeAutoscaling"]
    with_token = {c for c, template in pod_templates(manifests) if template["spec"]["automountServiceAccountToken"]}
    assert with_token == ({"ray-head"} if autoscales else set())


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_secrets_are_only_referenced(render: Render, value_set: str) -> None:
    """No Secret is rendered, and nothing named like one has a value of its own."""
    manifests = render(value_set)
    assert not of_kind(manifests, "Secret")
    for _, template in pod_templates(manifests):
        for container in containers(template):
            plain = {
                env["name"] for env in container.get("env", []) if SECRET_WORDS.search(env["name"]) and "value" in env
            }
            assert plain <= {"PASSWORD_FILE"}
            assert not [argument for argument in container.get("args", []) if SECRET_WORDS.search(argument)]


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_no_service_but_the_front_may_be_a_load_balancer(render: Render, value_set: str) -> None:
    for service in of_kind(render(value_set), "Service"):
        front = service["metadata"]["labels"]["app.kubernetes.io/component"] == "router"
        assert service["spec"]["type"] == "ClusterIP" or (front and service["spec"]["type"] == "LoadBalancer")
        if front:
            assert "metrics" not in {port["name"] for port in service["spec"]["ports"]}


@pytest.mark.parametrize("manifests", [pytest.param(None, id="chart"), pytest.param(RAY_MANIFEST, id="plain")])
def test_rays_control_plane_is_closed(render: Render, manifests: list[dict[str, Any]] | None) -> None:
    """Token authentication on, the dashboard inside the pod only, a version that has both."""
    (cluster,) = of_kind(manifests or render("default"), "RayCluster")
    spec = cluster["spec"]
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["headGroupSpec"]["rayStartParams"]["dashboard-host"] == "127.0.0.1"
    assert spec["headGroupSpec"].get("serviceType", "ClusterIP") == "ClusterIP"
    assert tuple(int(part) for part in spec["rayVersion"].split(".")) >= (2, 54, 0)


def test_rays_version_is_the_pinned_one_everywhere(render: Render) -> None:
    pin = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pin is not None
    for manifests in (render("default"), RAY_MANIFEST):
        assert of_kind(manifests, "RayCluster")[0]["spec"]["rayVersion"] == pin.group(1)


@pytest.mark.parametrize("name", sorted(COMPOSE["services"]))
def test_services_of_compose_run_with_least_privilege(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert int(service["user"].split(":")[0]) >= 10000
    assert service["mem_limit"]
    assert service["pids_limit"]
    assert not {"privileged", "network_mode", "pid", "ipc", "cap_add"} & set(service)
    assert service["tmpfs"]


def version_tuple(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


FLOORS = {"torch": "2.6", "ray": "2.54", "h11": "0.16.0", "starlette": "0.49.1", "redis": "4.5.4"}


@pytest.mark.parametrize("package", sorted(FLOORS))
def test_pinned_packages_are_past_their_known_holes(package: str) -> None:
    """torch.load, Ray's open job API, request smuggling, Range parsing, mixed-up connections: fixed by then."""
    pin = re.search(rf"^{package}==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE | re.IGNORECASE)
    assert pin is not None
    assert version_tuple(pin.group(1)) >= version_tuple(FLOORS[package])


def test_valkey_is_past_the_lua_holes_of_2025(render: Render) -> None:
    """CVE-2025-49844 and its kin are fixed in 8.1.4."""
    images = [COMPOSE["services"]["valkey"]["image"]]
    images += [c["image"] for name, t in pod_templates(render("default")) if name == "valkey" for c in containers(t)]
    assert len(images) == 2
    for image in images:
        assert version_tuple(image.rsplit(":", 1)[1]) >= (8, 1, 4)


def test_no_artefact_holds_a_credential() -> None:
    """Long random strings, private keys and URLs with a password, in any file of deploy/."""
    pattern = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY|://[^/\s:$]*:[A-Za-z0-9]{6,}@|\bhf_[A-Za-z0-9]{20,}")
    paths = [path for path in Path(ROOT / "deploy").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert [path for path in paths if pattern.search(path.read_text(errors="replace"))] == []
