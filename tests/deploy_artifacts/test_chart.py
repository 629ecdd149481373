"""The Helm chart: it renders, what it renders is valid, and it refuses what it does not know."""

import copy
import json
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from common.values.config import ClusterConfig
from tests.deploy_artifacts.conftest import VALUE_SETS, VALUES_DIR, Helm, Render
from tests.deploy_artifacts.manifests import containers, named, of_kind, pod_templates
from tests.deploy_artifacts.toolbox import CHART, RAY
from tests.tools import chart_schema

KUBERNETES_VERSIONS = [f"1.{minor}" for minor in range(29, 38)]
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
RAYCLUSTER_SCHEMA = json.loads(Path(__file__).with_name("raycluster.schema.json").read_text())
MONITORING_SCHEMA = json.loads(Path(__file__).with_name("monitoring.schema.json").read_text())


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_lint_has_no_warning(helm: Helm, value_set: str) -> None:
    done = helm("lint", "--strict", str(CHART), "--values", str(VALUES_DIR / f"{value_set}.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_manifests_are_strictly_valid_for_every_kubernetes_version(render: Render, value_set: str) -> None:
    """Pod templates inside the RayCluster are checked as pod templates; the rest of it has its own test."""
    core = [manifest for manifest in render(value_set) if "." not in manifest["apiVersion"].partition("/")[0]]
    core += [manifest for manifest in render(value_set) if manifest["apiVersion"].startswith("networking.k8s.io")]
    core += [
        {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": component}, "template": template}
        for component, template in pod_templates(of_kind(render(value_set), "RayCluster"))
    ]
    for manifest in core:
        validate_strictly(json.dumps(manifest))


@cache
def validate_strictly(manifest_json: str) -> None:
    """Raise when a version would not take the manifest. Most manifests are the same in several value sets."""
    from kubernetes_validate import validate

    for version in KUBERNETES_VERSIONS:
        validate(json.loads(manifest_json), version, strict=True)


def test_the_newest_kubernetes_version_is_among_those_checked(tools: Path) -> None:
    from kubernetes_validate import latest_version

    assert latest_version().startswith(KUBERNETES_VERSIONS[-1])


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_the_raycluster_is_strictly_valid(render: Render, value_set: str) -> None:
    (cluster,) = of_kind(render(value_set), "RayCluster")
    jsonschema.validate(cluster, RAYCLUSTER_SCHEMA)


def test_monitoring_objects_are_strictly_valid(render: Render) -> None:
    kinds = {"ServiceMonitor", "PodMonitor", "PrometheusRule"}
    found = [manifest for manifest in render("monitoring") if manifest["kind"] in kinds]
    assert {manifest["kind"] for manifest in found} == kinds
    for manifest in found:
        jsonschema.validate(manifest, MONITORING_SCHEMA[manifest["kind"]])


def test_monitoring_selects_what_it_is_meant_to(render: Render) -> None:
    manifests = render("monitoring")
    service = named(manifests, "Service", "-metrics")
    monitor = of_kind(manifests, "ServiceMonitor")[0]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["spec"]["endpoints"][0]["port"] in {port["name"] for port in service["spec"]["ports"]}
    port = of_kind(manifests, "PodMonitor")[0]["spec"]["podMetricsEndpoints"][0]["port"]
    for component, template in pod_templates(manifests):
        if component in ("prefill", "decode"):
            assert port in {each["name"] for each in containers(template)[0]["ports"]}


def test_the_defaults_satisfy_the_schema() -> None:
    jsonschema.validate(VALUES, SCHEMA)


def key_paths(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key)
            yield from key_paths(inner, (*path, key))


# Maps whose keys are the user's: labels, annotations, selectors.
FREE_MAPS = {"annotations", "labels", "nodeSelector", "podAnnotations", "podLabels", "matchLabels"}
CHECKED_PATHS = [path for path in key_paths(VALUES) if not FREE_MAPS & set(path[:-1])]


@pytest.mark.parametrize("path", CHECKED_PATHS, ids=".".join)
def test_a_typo_in_any_key_is_refused(path: tuple[str, ...]) -> None:
    values = copy.deepcopy(VALUES)
    inner = values
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1] + "x"] = inner.pop(path[-1])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values, SCHEMA)


@pytest.mark.parametrize(
    "setting",
    [
        "router.replica=3",
        "config.router.max_num_queue=1",
        "config.decode_worker.host=0.0.0.0",
        "valkey.port=6379",
        "image.worker.tag=latest",
        "router.service.type=NodePort",
        "externalRedis.url=redis://:secret@host:6380/0",
        "prefill.resources.limits.gpu=1",
        "decode.replicas=-1",
    ],
)
def test_helm_refuses(helm: Helm, setting: str) -> None:
    done = helm("template", "pd", str(CHART), "--set", setting)
    assert done.returncode != 0
    assert "values don't meet the specifications of the schema" in done.stderr


def test_no_registry_is_refused_with_what_to_do(bare_helm: Helm) -> None:
    for missing, other in (("router", "worker"), ("worker", "router")):
        done = bare_helm("template", "pd", str(CHART), "--set", f"image.{other}.registry=registry.example.com")
        assert done.returncode != 0
        assert f"image.{missing}.registry is not set: no image is published" in done.stderr


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("sizes", [(3, 4, 2), (1, 0, 4), (2, 5, 4)], ids=str)
def test_a_size_outside_its_range_is_refused(helm: Helm, role: str, sizes: tuple[int, int, int]) -> None:
    names = zip(("minReplicas", "replicas", "maxReplicas"), sizes, strict=True)
    done = helm("template", "pd", str(CHART), "--set", ",".join(f"{role}.{name}={size}" for name, size in names))
    assert done.returncode != 0
    assert (
        f"{role}: expected minReplicas <= replicas <= maxReplicas, got {sizes[0]}, {sizes[1]}, {sizes[2]}"
        in done.stderr
    )


def test_pools_take_settings_and_keep_their_sizes(helm: Helm) -> None:
    settings = "config.pools.drain_grace_s=77,config.pools.change_roles=false,decode.replicas=2"
    done = helm("template", "pd", str(CHART), "--set", settings, "--show-only", "templates/configmap.yaml")
    data = yaml.safe_load(done.stdout)["data"]["pdserve.yaml"]
    pools = ClusterConfig.model_validate(yaml.safe_load(data)).pools
    assert (pools.decode, pools.drain_grace_s, pools.change_roles, pools.start_limit_s) == (2, 77, False, 3600)


def test_gpus_have_their_values_file_and_pods_may_have_a_runtime(helm: Helm) -> None:
    files = ("--values", str(CHART / "values-gpu.yaml"), "--set", "decode.runtimeClassName=nvidia")
    done = helm("template", "pd", str(CHART), *files)
    pods = {
        template["metadata"]["labels"]["app.kubernetes.io/component"]: template["spec"]
        for _, template in pod_templates([each for each in yaml.safe_load_all(done.stdout) if each])
    }
    assert [pods[role].get("runtimeClassName") for role in ("prefill", "decode", "router")] == [None, "nvidia", None]
    limits = [pods[role]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for role in ("prefill", "decode")]
    assert limits == [1, 1]


@pytest.mark.parametrize(
    ("settings", "there", "not_there"),
    [
        ("router.replicas=1", ["WARNING: /admin/v1 is open"], ["authorization", "PDSERVE_ROUTER_ADMIN_KEY"]),
        ("router.adminKey.existingSecret=admin", ["export PDSERVE_ROUTER_ADMIN_KEY=$("], ["WARNING", "authorization"]),
        (
            "router.adminKey.existingSecret=admin,router.apiKeys.existingSecret=keys",
            ['-H "authorization: Bearer $KEY"', '{{index .data "admin-key" | base64decode}}'],
            ["WARNING"],
        ),
    ],
)
def test_notes_tell_of_keys(helm: Helm, settings: str, there: list[str], not_there: list[str]) -> None:
    notes = helm("install", "pd", str(CHART), "--dry-run=client", "--set", settings).stdout.partition("NOTES:")[2]
    assert [text for text in there if text not in notes] == [], notes
    assert [text for text in not_there if text in notes] == []


def test_no_redis_at_all_is_refused_with_what_to_set(helm: Helm) -> None:
    done = helm("template", "pd", str(CHART), "--set", "valkey.enabled=false")
    assert done.returncode != 0
    assert "set externalRedis.url or externalRedis.existingSecret" in done.stderr


def test_api_keys_without_an_admin_key_are_refused(helm: Helm) -> None:
    done = helm("template", "pd", str(CHART), "--set", "router.apiKeys.existingSecret=keys")
    assert done.returncode != 0
    assert "router.apiKeys needs router.adminKey.existingSecret" in done.stderr


def test_the_schema_offers_exactly_the_settings_of_the_configuration() -> None:
    """When this fails: `python -m tests.tools.chart_schema --write`."""
    assert (CHART / "values.schema.json").read_text() == chart_schema.expected()


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_pdserve_accepts_the_rendered_configuration(render: Render, value_set: str) -> None:
    data = named(render(value_set), "ConfigMap", "-config")["data"]
    config = ClusterConfig.model_validate(yaml.safe_load(data["pdserve.yaml"]))
    assert config.autoscale.decode_min <= config.pools.decode <= config.autoscale.decode_max
    (router,) = [each for each in of_kind(render(value_set), "Service") if each["metadata"]["name"] == config.namespace]
    assert config.autoscale.router_url == f"http://{router['metadata']['name']}:{config.router.http_port}"


@pytest.mark.parametrize(("memory", "may_change"), [("4Gi", "true"), ("8Gi", "false")])
def test_workers_change_roles_only_where_the_pods_are_alike(helm: Helm, memory: str, may_change: str) -> None:
    """A KV cache that fits the pods of one pool need not fit those of the other."""
    setting = f"decode.resources.limits.memory={memory}"
    done = helm("template", "pd", str(CHART), "--set", setting, "--show-only", "templates/configmap.yaml")
    assert done.returncode == 0, done.stderr
    assert f"change_roles: {may_change}" in done.stdout


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_every_reference_has_its_target(render: Render, value_set: str) -> None:
    """Mounts have volumes, volumes have ConfigMaps, probes and Services have ports."""
    manifests = render(value_set)
    config_maps = {manifest["metadata"]["name"] for manifest in of_kind(manifests, "ConfigMap")}
    for _, template in pod_templates(manifests):
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        assert {v["configMap"]["name"] for v in volumes.values() if "configMap" in v} <= config_maps
        for container in containers(template):
            assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)
            ports = {port["name"] for port in container.get("ports", [])}
            probes = [container.get(f"{kind}Probe", {}) for kind in ("startup", "liveness", "readiness")]
            named_ports = {probe["httpGet"]["port"] for probe in probes if "httpGet" in probe}
            assert {port for port in named_ports if isinstance(port, str)} <= ports


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_services_budgets_and_policies_select_pods_that_exist(render: Render, value_set: str) -> None:
    manifests = render(value_set)
    pods = [template["metadata"]["labels"] for _, template in pod_templates(manifests)]
    for manifest in of_kind(manifests, "Service"):
        assert any(manifest["spec"]["selector"].items() <= labels.items() for labels in pods), manifest["metadata"]
    for manifest in of_kind(manifests, "PodDisruptionBudget"):
        wanted = manifest["spec"]["selector"]["matchLabels"]
        assert any(wanted.items() <= labels.items() for labels in pods), manifest["metadata"]


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_pools_have_their_own_range_and_resource(render: Render, value_set: str) -> None:
    (cluster,) = of_kind(render(value_set), "RayCluster")
    groups = {group["groupName"]: group for group in cluster["spec"]["workerGroupSpecs"]}
    assert set(groups) == {"prefill", "decode"}
    for role, group in groups.items():
        assert group["resources"] == {f"pd_{role}": "1"}
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        labels = group["template"]["metadata"]["labels"]
        assert labels["llm-d.ai/role"] == role
        assert labels["llm-d.ai/inference-serving"] == "true"


def test_ray_knows_every_start_parameter(render: Render) -> None:
    """KubeRay turns them into options of `ray start`."""
    helped = subprocess.run([RAY, "start", "--help"], capture_output=True, text=True, timeout=60, check=True)
    options = set(re.findall(r"--[a-z][a-z-]*", helped.stdout))
    spec = of_kind(render("default"), "RayCluster")[0]["spec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        assert {f"--{name}" for name in group["rayStartParams"]} <= options


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_nothing_but_ray_uses_ports_of_ray(render: Render, value_set: str) -> None:
    """GCS, dashboard, client, agents and the pinned range belong to Ray."""
    manifests = render(value_set)
    ours = [port["port"] for service in of_kind(manifests, "Service") for port in service["spec"]["ports"]]
    for component, template in pod_templates(manifests):
        if component != "ray-head":
            ours += [port["containerPort"] for each in containers(template) for port in each["ports"]]
    assert not [port for port in ours if port in (6379, 8265, 10001, 52365, 8080) or 20000 <= port <= 20999]


@pytest.mark.parametrize("value_set", VALUE_SETS)
def test_pods_end_within_their_grace(render: Render, value_set: str) -> None:
    """The preStop hook is inside the grace and leaves time for the process itself."""
    for component, template in pod_templates(render(value_set)):
        grace_s = template["spec"]["terminationGracePeriodSeconds"]
        for container in template["spec"]["containers"]:
            hook = container.get("lifecycle", {}).get("preStop", {})
            if component == "router":
                assert hook["sleep"]["seconds"] + 30 <= grace_s
            if component in ("prefill", "decode"):
                assert int(hook["exec"]["command"][-1]) < grace_s


def test_a_changed_configuration_restarts_the_routers(render: Render) -> None:
    checksums = {
        template["metadata"]["annotations"]["checksum/config"]
        for value_set in ("default", "gpu")
        for component, template in pod_templates(render(value_set))
        if component == "router"
    }
    assert len(checksums) == 2


@pytest.mark.parametrize(("value_set", "num_containers"), [("default", 0), ("gpu", 4)])
def test_the_admin_key_reaches_routers_and_who_asks_them_as_a_file(
    render: Render, value_set: str, num_containers: int
) -> None:
    """Four containers: router, pool controller, and the workers of both pools, whose hook drains them."""
    found = 0
    for _, template in pod_templates(render(value_set)):
        secrets = {volume["name"]: volume["secret"] for volume in template["spec"]["volumes"] if "secret" in volume}
        for container in containers(template):
            variables = {variable["name"]: variable.get("value") for variable in container.get("env", ())}
            mounts = {mount["name"]: mount for mount in container.get("volumeMounts", ())}
            assert "PDSERVE_ROUTER_ADMIN_KEY" not in variables  # an environment is shown by too many tools
            assert ("admin-key" in mounts) == ("PDSERVE_ROUTER_ADMIN_KEY_FILE" in variables)
            if "admin-key" in mounts:
                found += 1
                assert variables["PDSERVE_ROUTER_ADMIN_KEY_FILE"] == mounts["admin-key"]["mountPath"] + "/admin-key"
                assert secrets["admin-key"] == {"secretName": "pdserve-admin", "defaultMode": 0o440}
                assert mounts["admin-key"]["readOnly"]
    assert found == num_containers


def test_api_keys_reach_routers_alone_as_a_file_by_reference(render: Render) -> None:
    holders = []
    for component, template in pod_templates(render("gpu")):
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        if "api-keys" in volumes:
            holders.append(component)
            assert volumes["api-keys"]["secret"] == {"secretName": "pdserve-api-keys", "defaultMode": 0o440}
            (mount,) = [m for c in containers(template) for m in c["volumeMounts"] if m["name"] == "api-keys"]
            assert (mount["mountPath"], mount["readOnly"]) == ("/etc/pdserve-keys", True)
            assert "subPath" not in mount  # or a changed Secret would never arrive
    assert holders == ["router"]
    (config,) = [m for m in render("gpu") if m["kind"] == "ConfigMap" and "pdserve.yaml" in m["data"]]
    assert "api_keys_file: /etc/pdserve-keys/keys.yaml" in config["data"]["pdserve.yaml"]


def test_a_digest_wins_over_a_tag(render: Render) -> None:
    images = {c["image"] for _, template in pod_templates(render("gpu")) for c in containers(template)}
    assert any("@sha256:" in image and ":" not in image.split("@")[0] for image in images)


def test_notes_print_the_next_three_commands(helm: Helm) -> None:
    done = helm("install", "pd", str(CHART), "--dry-run=client", "--namespace", "serving")
    notes = done.stdout.partition("NOTES:")[2]
    for command in ("rollout status deployment/pd-pdserve-router", "port-forward service/pd-pdserve", "curl -N"):
        assert command in notes, done.stdout[-2000:] + done.stderr


def test_every_value_has_a_comment_or_a_commented_parent() -> None:
    """Each top-level section of values.yaml says what it is for in helm-docs comments."""
    text = (CHART / "values.yaml").read_text()
    for key in VALUES:
        head, _, body = text.partition(f"\n{key}:")
        section = body.split("\n\n")[0]
        assert "# --" in section or head.rstrip().rsplit("\n", 1)[-1].startswith("#"), key
