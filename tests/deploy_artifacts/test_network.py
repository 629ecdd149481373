"""Who may connect to whom, by evaluating the rendered NetworkPolicies as a cluster would."""

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.values.config import ClusterConfig
from tests.deploy_artifacts.conftest import Helm, Render
from tests.deploy_artifacts.manifests import named, of_kind, pod_templates
from tests.deploy_artifacts.toolbox import CHART

NAMESPACE = "serving"
METRICS_NAMESPACE = {"kubernetes.io/metadata.name": "monitoring"}


@dataclass(frozen=True)
class Peer:
    """One end of a connection: a pod of this release, a pod elsewhere, or an address outside."""

    labels: tuple[tuple[str, str], ...] = ()
    namespace: tuple[tuple[str, str], ...] = (("kubernetes.io/metadata.name", NAMESPACE),)
    address: str = ""


def selects(selector: dict[str, Any] | None, labels: dict[str, str]) -> bool:
    if selector is None:
        return True
    wanted = selector.get("matchLabels", {})
    if not wanted.items() <= labels.items():
        return False
    for expression in selector.get("matchExpressions", []):
        assert expression["operator"] == "In"
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return True


def peer_matches(rule: dict[str, Any], peer: Peer) -> bool:
    if "ipBlock" in rule:
        return bool(peer.address) and ipaddress.ip_address(peer.address) in ipaddress.ip_network(
            rule["ipBlock"]["cidr"]
        )
    if peer.address:
        return False
    same = dict(peer.namespace).get("kubernetes.io/metadata.name") == NAMESPACE
    in_namespace = selects(rule["namespaceSelector"], dict(peer.namespace)) if "namespaceSelector" in rule else same
    return in_namespace and selects(rule.get("podSelector"), dict(peer.labels))


def port_matches(rule: dict[str, Any], port: int) -> bool:
    return not rule.get("ports") or any(
        each["protocol"] == "TCP" and each["port"] <= port <= each.get("endPort", each["port"])
        for each in rule["ports"]
    )


def allowed_by(policies: list[dict[str, Any]], direction: str, subject: Peer, other: Peer, port: int) -> bool:
    """Whether the policies that select `subject` let the connection pass in one direction."""
    applying = [
        policy["spec"]
        for policy in policies
        if direction.capitalize() in policy["spec"]["policyTypes"]
        and selects(policy["spec"]["podSelector"], dict(subject.labels))
    ]
    if not applying:
        return True
    key = {"ingress": "from", "egress": "to"}[direction]
    rules = [rule for spec in applying for rule in spec.get(direction, [])]
    return any(
        port_matches(rule, port) and (not rule.get(key) or any(peer_matches(each, other) for each in rule[key]))
        for rule in rules
    )


class Cluster:
    """The pods and the policies of one rendering."""

    def __init__(self, manifests: list[dict[str, Any]]) -> None:
        self.policies = of_kind(manifests, "NetworkPolicy")
        self.pods = {
            component: Peer(tuple(template["metadata"]["labels"].items()))
            for component, template in pod_templates(manifests)
        }
        self.pods["stranger"] = Peer((("app", "other"),))
        self.pods["client"] = Peer((("app", "other"),), (("kubernetes.io/metadata.name", "shop"),))
        self.pods["prometheus"] = Peer((("app", "prometheus"),), tuple(METRICS_NAMESPACE.items()))
        self.pods["internet"] = Peer(address="203.0.113.7")
        self.pods["api-server"] = Peer(address="10.96.0.1")

    def connects(self, source: str, target: str, port: int) -> bool:
        a, b = self.pods[source], self.pods[target]
        return allowed_by(self.policies, "egress", a, b, port) and allowed_by(self.policies, "ingress", b, a, port)


@pytest.fixture
def cluster(render: Render) -> Cluster:
    return Cluster(render("default"))


HTTP, GRPC, METRICS, WORKER, DATA, REDIS = 8000, 50051, 9090, 50061, 40000, 6380
GCS, DASHBOARD, RAY_CLIENT, RAY_AGENT, RAYLET = 6379, 8265, 10001, 52365, 20000

ALLOWED = [
    ("client", "router", HTTP),
    ("client", "router", GRPC),
    ("stranger", "router", HTTP),
    ("prometheus", "router", METRICS),
    ("prometheus", "prefill", METRICS),
    ("prometheus", "decode", METRICS),
    ("router", "prefill", WORKER),
    ("router", "decode", WORKER),
    ("router", "valkey", REDIS),
    ("prefill", "valkey", REDIS),
    ("decode", "valkey", REDIS),
    ("ray-head", "valkey", REDIS),
    ("prefill", "decode", WORKER),
    ("prefill", "decode", DATA),
    ("decode", "prefill", DATA),
    ("prefill", "prefill", DATA),
    ("prefill", "router", HTTP),
    ("decode", "router", HTTP),
    ("ray-head", "router", HTTP),
    ("prefill", "ray-head", GCS),
    ("decode", "ray-head", GCS),
    ("ray-head", "prefill", RAYLET),
    ("ray-head", "decode", 20999),
    ("prefill", "ray-head", RAY_AGENT),
    ("ray-head", "api-server", 443),
]
DENIED = [
    ("client", "router", METRICS),
    ("stranger", "router", METRICS),
    *[("stranger", "ray-head", port) for port in (GCS, DASHBOARD, RAY_CLIENT, RAY_AGENT, RAYLET)],
    *[("client", "ray-head", port) for port in (GCS, DASHBOARD, RAY_CLIENT, RAY_AGENT, RAYLET)],
    ("router", "ray-head", GCS),
    ("router", "prefill", DATA),
    ("router", "prefill", RAYLET),
    ("stranger", "prefill", WORKER),
    ("stranger", "decode", DATA),
    ("client", "decode", WORKER),
    ("prometheus", "decode", WORKER),
    ("prometheus", "valkey", REDIS),
    ("stranger", "valkey", REDIS),
    ("client", "valkey", REDIS),
    ("prefill", "internet", 443),
    ("decode", "internet", 443),
    ("router", "internet", 443),
    ("valkey", "internet", 443),
    ("valkey", "router", HTTP),
    ("prefill", "api-server", 443),
    ("prefill", "ray-head", DASHBOARD),
]


@pytest.mark.parametrize(("source", "target", "port"), ALLOWED)
def test_what_serving_needs_may_connect(cluster: Cluster, source: str, target: str, port: int) -> None:
    assert cluster.connects(source, target, port)


@pytest.mark.parametrize(("source", "target", "port"), DENIED)
def test_everything_else_is_denied(cluster: Cluster, source: str, target: str, port: int) -> None:
    assert not cluster.connects(source, target, port)


@pytest.mark.parametrize("source", ["router", "valkey", "stranger", "prometheus", "internet"])
@pytest.mark.parametrize("target", ["ray-head", "prefill", "decode"])
def test_rays_ports_are_closed_on_their_own_side(cluster: Cluster, source: str, target: str) -> None:
    """Whatever the other end may send: its own egress rules are not what protects Ray."""
    for port in (GCS, DASHBOARD, RAY_CLIENT, RAY_AGENT, RAYLET):
        assert not allowed_by(cluster.policies, "ingress", cluster.pods[target], cluster.pods[source], port)


def test_clients_can_be_limited_to_the_ingress(render: Render) -> None:
    cluster = Cluster(render("monitoring"))
    cluster.pods["ingress"] = Peer(
        (("app.kubernetes.io/name", "ingress-nginx"),), (("kubernetes.io/metadata.name", "ingress-nginx"),)
    )
    assert cluster.connects("ingress", "router", HTTP)
    assert not cluster.connects("client", "router", HTTP)
    assert cluster.connects("decode", "router", HTTP)
    assert cluster.connects("ray-head", "router", HTTP)


def test_an_external_redis_is_reached_where_it_is_said_to_be(render: Render) -> None:
    cluster = Cluster(render("external-redis-secret"))
    cluster.pods["redis"] = Peer(address="10.20.3.4")
    assert all(cluster.connects(source, "redis", 6379) for source in ("router", "prefill", "decode", "ray-head"))
    assert not cluster.connects("router", "internet", 6379)


def test_rays_pinned_ports_are_those_the_policy_opens(render: Render) -> None:
    (ray,) = of_kind(render("default"), "RayCluster")
    for group in (ray["spec"]["headGroupSpec"], *ray["spec"]["workerGroupSpecs"]):
        params = group["rayStartParams"]
        pinned = [
            int(value)
            for name, value in params.items()
            if name.endswith("port") and name != "dashboard-agent-listen-port"
        ]
        assert len(pinned) == 6
        assert all(20000 <= port <= 20999 for port in pinned)
        assert params["dashboard-agent-listen-port"] == str(RAY_AGENT)


def test_the_data_ports_are_the_pods_ephemeral_range(render: Render) -> None:
    for component, template in pod_templates(render("default")):
        if component in ("prefill", "decode"):
            (sysctl,) = template["spec"]["securityContext"]["sysctls"]
            assert sysctl == {"name": "net.ipv4.ip_local_port_range", "value": "32768 60999"}


# ---- certificates ---------------------------------------------------------------------------------------

WITH_TLS = "external-redis-url"


def settings_of(render: Render, value_set: str) -> ClusterConfig:
    config = named(of_kind(render(value_set), "ConfigMap"), "ConfigMap", "-config")
    return ClusterConfig.model_validate(yaml.safe_load(config["data"]["pdserve.yaml"]))


def test_with_tls_each_pod_mounts_the_certificates_of_the_roles_it_can_take(render: Render) -> None:
    """Where the settings look for them, by reference, readable by the processes' group alone."""
    settings = settings_of(render, WITH_TLS)
    roles = {"router": ["router"], "prefill": ["prefill", "decode"], "decode": ["prefill", "decode"], "ray-head": []}
    for component, template in pod_templates(render(WITH_TLS)):
        secrets = {each["name"]: each["secret"] for each in template["spec"]["volumes"] if "secret" in each}
        mounts = {each["mountPath"]: each for each in template["spec"]["containers"][0]["volumeMounts"]}
        assert secrets.keys() == {f"tls-{role}" for role in roles[component]}
        for role in roles[component]:
            folders = {str(Path(path).parent) for path in settings.tls.paths_of(role)}
            assert [mounts[folder]["name"] for folder in folders] == [f"tls-{role}"]
            assert secrets[f"tls-{role}"] == {"secretName": f"pdserve-{role}-tls", "defaultMode": 0o440}


def test_without_tls_the_chart_says_that_the_network_is_trusted_and_closes_it(render: Render) -> None:
    settings = settings_of(render, "default")
    assert (settings.tls.is_on, settings.insecure) == (False, True)
    assert of_kind(render("default"), "NetworkPolicy")


def egress_of(helm: Helm, policy: str, settings: str) -> list[dict[str, Any]]:
    done = helm("template", "pd", str(CHART), "--set", settings)
    assert done.returncode == 0, done.stderr
    manifests = [each for each in yaml.safe_load_all(done.stdout) if each]
    egress: list[dict[str, Any]] = named(manifests, "NetworkPolicy", f"-{policy}")["spec"]["egress"]
    return egress


@pytest.mark.parametrize(
    ("url", "port"),
    [
        ("http://collector.tracing:4318/v1/traces", 4318),
        ("https://otlp.example.com/v1/traces", 443),
        ("http://otlp.example.com/v1/traces", 80),
    ],
)
def test_traces_open_the_way_to_their_collector_for_routers_alone(helm: Helm, url: str, port: int) -> None:
    setting = f"config.router.otlp_traces_endpoint={url}"
    assert egress_of(helm, "router", setting)[-1] == {"ports": [{"protocol": "TCP", "port": port}]}
    there = "networkPolicy.otlpTo[0].ipBlock.cidr=10.1.0.0/16"
    assert egress_of(helm, "router", f"{setting},{there}")[-1]["to"] == [{"ipBlock": {"cidr": "10.1.0.0/16"}}]
    assert egress_of(helm, "workers", setting) == egress_of(helm, "workers", "router.replicas=2")


def test_other_ways_out_and_other_dns_ports_can_be_opened(helm: Helm) -> None:
    rule = "networkPolicy.extraEgress[0].ports[0].port=8443,networkPolicy.extraEgress[0].to[0].ipBlock.cidr=10.9.0.0/16"
    assert egress_of(helm, "extra", rule) == [{"ports": [{"port": 8443}], "to": [{"ipBlock": {"cidr": "10.9.0.0/16"}}]}]
    (dns,) = egress_of(helm, "dns", "networkPolicy.dnsPorts={53,5353}")
    assert [(each["protocol"], each["port"]) for each in dns["ports"]] == [
        ("UDP", 53), ("TCP", 53), ("UDP", 5353), ("TCP", 5353),
    ]  # fmt: skip
