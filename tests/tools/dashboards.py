"""Write the Grafana dashboards in `deploy/grafana`, or check that the committed ones are current.

`python -m tests.tools.dashboards` exits 1 when a dashboard is stale; with `--write` it writes them. A panel is a
title, a unit, and queries with their legends; where it stands on the page follows from its place in the list.
"""

import json
import sys
from dataclasses import dataclass
from typing import Any

from tests.paths import ROOT

GRAFANA_DIR = ROOT / "deploy" / "grafana"
_MODEL = 'model_name=~"$model"'
_WORKER = f'{_MODEL}, worker=~"$worker"'
_COLUMNS, _WIDTH, _HEIGHT = 3, 8, 8


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]  # (expression, legend)
    about: str = ""


def quantiles(metric: str, by: str = "", legend: str = "") -> tuple[tuple[str, str], ...]:
    """Median and 99th percentile of a histogram."""
    labels = f"le, {by}" if by else "le"
    rate = f"sum by ({labels}) (rate({metric}_bucket{{{_MODEL}}}[$__rate_interval]))"
    return tuple((f"histogram_quantile({q}, {rate})", f"{legend}p{int(q * 100)}") for q in (0.5, 0.99))


def rate(metric: str, by: str, selector: str = _MODEL) -> str:
    return f"sum by ({by}) (rate({metric}{{{selector}}}[$__rate_interval]))"


OVERVIEW = (
    Panel("Time to first token", "s", quantiles("pdserve_time_to_first_token_seconds"), "Arrival to first token."),
    Panel("Inter-token latency", "s", quantiles("pdserve_inter_token_latency_seconds")),
    Panel("Time per output token", "s", quantiles("pdserve_time_per_output_token_seconds"), "Mean of each request."),
    Panel("Requests by outcome", "reqps", ((rate("pdserve_requests_total", "status"), "{{status}}"),)),
    Panel(
        "Errors",
        "reqps",
        (
            (rate("pdserve_requests_total", "error_type", f'{_MODEL}, status="failed"'), "{{error_type}}"),
            (rate("pdserve_admission_rejections_total", "reason"), "refused: {{reason}}"),
        ),
    ),
    Panel(
        "Prefills",
        "short",
        ((rate("pdserve_prefills_total", "worker_role"), "{{worker_role}}"),),
        "Per second, by who computes the prompt: decode workers do when prefill workers would take longer.",
    ),
    Panel(
        "Tokens",
        "short",
        (
            (rate("pdserve_prompt_tokens_total", "model_name"), "prompt"),
            (rate("pdserve_prompt_tokens_cached_total", "model_name"), "prompt, cached"),
            (rate("pdserve_generation_tokens_total", "model_name"), "generated"),
        ),
        "Per second.",
    ),
    Panel(
        "Workers",
        "short",
        ((f"max by (worker_role, state) (pdserve_workers{{{_MODEL}}})", "{{worker_role}} {{state}}"),),
        "As the routers see them.",
    ),
    Panel(
        "Prompt tokens waiting for prefill",
        "short",
        ((f'sum by (worker) (pdserve_waiting_uncached_tokens{{{_MODEL}, role="prefill"}})', "{{worker}}"),),
        "Tokens that no cache holds: the signal for the size of the prefill pool.",
    ),
    Panel(
        "Decode blocks in use",
        "percentunit",
        ((f'max by (worker) (pdserve_kv_cache_usage_ratio{{{_MODEL}, role="decode"}})', "{{worker}}"),),
        "The signal for the size of the decode pool.",
    ),
    Panel(
        "Where the time goes (median)",
        "s",
        (quantiles("pdserve_phase_duration_seconds", "phase", "{{phase}} ")[0],),
        "One phase of the waterfall each.",
    ),
    Panel(
        "KV transfer",
        "s",
        (
            *quantiles("pdserve_kv_transfer_seconds", legend="whole "),
            *quantiles("pdserve_kv_transfer_exposed_seconds", legend="not hidden "),
            *quantiles("pdserve_kv_handover_seconds", legend="prompt done to first step "),
        ),
    ),
    Panel(
        "Retries, preemptions, failed transfers",
        "short",
        (
            (rate("pdserve_request_retries_total", "reason"), "retry: {{reason}}"),
            (rate("pdserve_preemptions_total", "model_name"), "preempted"),
            (rate("pdserve_kv_transfer_failures_total", "reason"), "transfer: {{reason}}"),
            (rate("pdserve_kv_slow_transfers_total", "transport"), "slow link: {{transport}}"),
        ),
        "Per second.",
    ),
    Panel("Index look-up", "s", quantiles("pdserve_index_lookup_seconds")),
    Panel(
        "Index errors, stale hits, dropped traces",
        "ops",
        (
            (rate("pdserve_index_errors_total", "op"), "error: {{op}}"),
            (rate("pdserve_index_stale_hits_total", "model_name"), "stale hits"),
            (rate("pdserve_traces_dropped_total", "model_name"), "dropped traces"),
        ),
        "Nothing of it fails a request. A stale hit: a worker no longer held the prefix that the index promised.",
    ),
    Panel(
        "Cached share of prompt tokens",
        "percentunit",
        (
            (
                f"{rate('pdserve_prompt_tokens_cached_total', 'model_name')}"
                f" / {rate('pdserve_prompt_tokens_total', 'model_name')}",
                "{{model_name}}",
            ),
        ),
    ),
)

WORKERS = (
    Panel("Running", "short", ((f"pdserve_requests_running{{{_WORKER}}}", "{{role}} {{worker}}"),)),
    Panel("Waiting", "short", ((f"pdserve_requests_waiting{{{_WORKER}}}", "{{role}} {{worker}}"),)),
    Panel("Uncached tokens waiting", "short", ((f"pdserve_waiting_uncached_tokens{{{_WORKER}}}", "{{worker}}"),)),
    Panel(
        "KV blocks", "short", ((f"sum by (worker, state) (pdserve_kv_blocks{{{_WORKER}}})", "{{worker}} {{state}}"),)
    ),
    Panel("KV blocks in use", "percentunit", ((f"pdserve_kv_cache_usage_ratio{{{_WORKER}}}", "{{worker}}"),)),
    Panel("Preemptions", "ops", ((rate("pdserve_preemptions_total", "worker", _WORKER), "{{worker}}"),)),
    Panel(
        "Drafts",
        "ops",
        (
            (rate("pdserve_draft_tokens_total", "worker", _WORKER), "{{worker}} verified"),
            (rate("pdserve_draft_tokens_accepted_total", "worker", _WORKER), "{{worker}} accepted"),
            (rate("pdserve_draft_tokens_wasted_total", "worker", _WORKER), "{{worker}} wasted"),
        ),
        "Tokens per second. Nothing with speculation off.",
    ),
    Panel(
        "Adapters",
        "short",
        (
            ("pdserve_adapters_loaded" + f"{{{_WORKER}}}", "{{worker}} in memory"),
            (rate("pdserve_adapter_loads_total", "worker, outcome", _WORKER), "{{worker}} {{outcome}} per second"),
            ("sum by (adapter) (rate(pdserve_adapter_requests_total[$__rate_interval]))", "{{adapter}} requests/s"),
        ),
        "LoRA. Nothing where none is served.",
    ),
    Panel(
        "Tokens per sequence and step with drafts (mean)",
        "short",
        (
            (
                f"{rate('pdserve_sequence_step_tokens_sum', 'worker', _WORKER)}"
                f" / {rate('pdserve_sequence_step_tokens_count', 'worker', _WORKER)}",
                "{{worker}}",
            ),
        ),
    ),
    Panel(
        "Step time (mean)",
        "s",
        (
            (
                f"{rate('pdserve_step_seconds_sum', 'role, worker', _WORKER)}"
                f" / {rate('pdserve_step_seconds_count', 'role, worker', _WORKER)}",
                "{{role}} {{worker}}",
            ),
        ),
    ),
    Panel(
        "Tokens per step (mean)",
        "short",
        (
            (
                f"{rate('pdserve_step_tokens_sum', 'role, worker', _WORKER)}"
                f" / {rate('pdserve_step_tokens_count', 'role, worker', _WORKER)}",
                "{{role}} {{worker}}",
            ),
        ),
    ),
    Panel(
        "Role changes",
        "short",
        (
            (
                f"sum by (worker, to_role) (increase(pdserve_role_changes_total{{{_WORKER}}}[5m]))",
                "{{worker}} to {{to_role}}",
            ),
            (
                f"{rate('pdserve_role_change_seconds_sum', 'role', _WORKER)}"
                f" / {rate('pdserve_role_change_seconds_count', 'role', _WORKER)}",
                "seconds to {{role}} (mean)",
            ),
        ),
        "Workers that took the other role, their weights kept, in 5 minutes; and how long it took, the drain included.",
    ),
    Panel(
        "Loads and lives given up",
        "short",
        (
            (f"sum by (worker) (increase(pdserve_model_loads_total{{{_WORKER}}}[5m]))", "{{worker}} loaded"),
            (
                f"sum by (worker, reason) (increase(pdserve_lives_given_up_total{{{_WORKER}}}[5m]))",
                "{{worker}} {{reason}}",
            ),
        ),
        "In 5 minutes. A frozen worker begins a new life by itself, a wedged one ends and is replaced.",
    ),
    Panel("KV received", "Bps", ((rate("pdserve_kv_transfer_bytes_sum", "worker", _WORKER), "{{worker}}"),)),
    Panel(
        "Speed of links",
        "Bps",
        (
            (
                'min by (worker, transport) (pdserve_link_bytes_per_second{model_name=~"$model", worker=~"$worker"})',
                "{{worker}}, {{transport}}",
            ),
        ),
        "Of a decode worker's last transfer, while bytes were under way.",
    ),
)


def dashboard(uid: str, title: str, panels: tuple[Panel, ...], variables: tuple[str, ...]) -> dict[str, Any]:
    """One dashboard in Grafana's JSON model."""
    return {
        "uid": uid,
        "title": title,
        "tags": ["pdserve"],
        "schemaVersion": 41,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_datasource(), *(_variable(name) for name in variables)]},
        "panels": [_panel(idx, panel) for idx, panel in enumerate(panels)],
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _variable(name: str) -> dict[str, Any]:
    label = {"model": "model_name"}.get(name, name)
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": f"label_values(pdserve_build_info, {label})",
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(idx: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(idx, _COLUMNS)
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "id": idx + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": source,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + n), "datasource": source, "expr": expr, "legendFormat": legend}
            for n, (expr, legend) in enumerate(panel.queries)
        ],
    }


def dashboards() -> dict[str, str]:
    """File name -> content of every dashboard."""
    overview = dashboard("pdserve-overview", "pdserve: overview", OVERVIEW, ("model",))
    workers = dashboard("pdserve-workers", "pdserve: workers", WORKERS, ("model", "worker"))
    return {
        name: json.dumps(content, indent=1) + "\n"
        for name, content in {"pdserve-overview.json": overview, "pdserve-workers.json": workers}.items()
    }


def main() -> int:
    paths = {GRAFANA_DIR / name: text for name, text in dashboards().items()}
    if "--write" in sys.argv:
        for path, text in paths.items():
            path.write_text(text)
        return 0
    stale = [path.name for path, text in paths.items() if not path.exists() or path.read_text() != text]
    if stale:
        print(f"stale: {', '.join(stale)}: run `python -m tests.tools.dashboards --write`")
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
