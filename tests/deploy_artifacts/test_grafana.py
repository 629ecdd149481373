"""Dashboards and alert rules name metrics and labels that pdserve really exposes."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from common.telemetry.metrics import METRICS, Metrics
from tests.deploy_artifacts.toolbox import ROOT
from tests.tools import dashboards

GRAFANA_DIR = ROOT / "deploy" / "grafana"
CONSTANT_LABELS = {"model_name", "role", "worker"}
TARGET_LABELS = {"job", "instance", "namespace", "pod"}  # what Prometheus adds


def scrape() -> str:
    """The exposition of a process in which every metric has been used once."""
    metrics = Metrics("model", "router", "router-0")
    use = {"counter": metrics.inc, "gauge": metrics.set, "histogram": metrics.observe}
    for spec in METRICS:
        value = {} if spec.kind == "counter" else {"value": 1.0}
        use[spec.kind](spec.name, **value, **dict.fromkeys(spec.labels, "x"))
    return metrics.exposition().decode()


def exposed() -> dict[str, set[str]]:
    """Sample name -> label names, of everything in a scrape."""
    samples = re.findall(r"^([a-zA-Z_:][\w:]*)\{([^}]*)\}", scrape(), re.MULTILINE)
    return {name: set(re.findall(r'(\w+)="', labels)) for name, labels in samples}


EXPOSED = exposed()


def expressions() -> Iterator[tuple[str, str]]:
    """(where, expression) of every panel and alert rule."""
    for path in sorted(GRAFANA_DIR.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                yield f"{path.stem}: {panel['title']} {target['refId']}", target["expr"]
    rules = yaml.safe_load((GRAFANA_DIR / "alerts.yaml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


EXPRESSIONS = list(expressions())


def expanded(expression: str) -> str:
    """Grafana's variables replaced, as Grafana does before it asks Prometheus."""
    return expression.replace("$__rate_interval", "1m").replace("$model", ".*").replace("$worker", ".*")


def selectors(expression: str) -> list[tuple[str, set[str]]]:
    """(metric, labels matched on) of every selector in an expression."""
    from promql_parser import VectorSelector, parse, walk

    found: list[tuple[str, set[str]]] = []

    def visit(node: Any) -> None:
        if isinstance(node, VectorSelector):
            found.append((node.name, {matcher.name for matcher in node.matchers.matchers}))

    walk(parse(expression), visit)
    return found


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS, ids=[where for where, _ in EXPRESSIONS])
def test_metrics_and_labels_exist_in_a_scrape(tools: object, where: str, expression: str) -> None:
    found = selectors(expanded(expression))
    assert found
    for metric, labels in found:
        assert metric in EXPOSED, f"{where}: no metric {metric}"
        assert labels <= EXPOSED[metric] | TARGET_LABELS, f"{where}: {metric} has no {labels - EXPOSED[metric]}"


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS, ids=[where for where, _ in EXPRESSIONS])
def test_aggregations_keep_labels_that_exist(where: str, expression: str) -> None:
    kept = {label.strip() for labels in re.findall(r"\bby \(([^)]*)\)", expression) for label in labels.split(",")}
    known = set().union(*EXPOSED.values()) | TARGET_LABELS
    assert kept <= known, where


def test_an_unknown_metric_or_label_is_found(tools: object) -> None:
    """The checks above can fail: a metric of another engine, a label that ours has not."""
    ((metric, _),) = selectors('sum(rate(vllm_e2e_request_latency_seconds_bucket{le="1"}[5m]))')
    assert metric not in EXPOSED
    ((metric, labels),) = selectors('pdserve_requests_total{tenant="x"}')
    assert not labels <= EXPOSED[metric] | TARGET_LABELS


def test_histogram_quantiles_have_le() -> None:
    for where, expression in EXPRESSIONS:
        for inner in re.findall(r"histogram_quantile\([\d.]+, sum by \(([^)]*)\)", expression):
            assert "le" in [label.strip() for label in inner.split(",")], where


def test_dashboards_are_what_their_description_says() -> None:
    """When this fails: `python -m tests.tools.dashboards --write`."""
    for name, text in dashboards.dashboards().items():
        assert (GRAFANA_DIR / name).read_text() == text


def test_panels_do_not_overlap_and_have_a_title() -> None:
    for path in GRAFANA_DIR.glob("*.json"):
        board = json.loads(path.read_text())
        cells = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
        assert len(set(cells)) == len(cells)
        assert all(panel["title"] and panel["fieldConfig"]["defaults"]["unit"] for panel in board["panels"])


def test_every_metric_of_the_list_is_on_a_dashboard_or_in_a_rule() -> None:
    """Every metric is on a panel; build_info is what variables are made from."""
    text = "\n".join(expression for _, expression in EXPRESSIONS)
    unseen = {spec.name for spec in METRICS if not re.search(rf"\b{spec.name}(_total|_bucket|_sum|_count)?\b", text)}
    assert unseen <= {"pdserve_kv_blocks_total", "pdserve_request_finished", "pdserve_request_duration_seconds"}


def test_alerts_say_what_is_wrong_and_how_bad() -> None:
    for group in yaml.safe_load((GRAFANA_DIR / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("info", "warning", "critical")
            assert rule["annotations"]["summary"]
            assert rule["annotations"]["description"]
