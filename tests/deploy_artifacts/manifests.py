"""Looking into Kubernetes manifests: the pods that a set of manifests makes, by component."""

from collections.abc import Iterator
from typing import Any

Manifest = dict[str, Any]
Template = dict[str, Any]


def pod_templates(manifests: list[Manifest]) -> Iterator[tuple[str, Template]]:
    """(component, pod template) of everything that runs."""
    for manifest in manifests:
        for template in _templates(manifest):
            yield template["metadata"]["labels"]["app.kubernetes.io/component"], template


def _templates(manifest: Manifest) -> list[Template]:
    if manifest["kind"] in ("Deployment", "StatefulSet"):
        return [manifest["spec"]["template"]]
    if manifest["kind"] == "RayCluster":
        groups = [manifest["spec"]["headGroupSpec"], *manifest["spec"]["workerGroupSpecs"]]
        return [group["template"] for group in groups]
    return []


def containers(template: Template) -> list[dict[str, Any]]:
    return [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def named(manifests: list[Manifest], kind: str, suffix: str) -> Manifest:
    """The one manifest of a kind whose name ends so."""
    (found,) = [manifest for manifest in of_kind(manifests, kind) if manifest["metadata"]["name"].endswith(suffix)]
    return found
