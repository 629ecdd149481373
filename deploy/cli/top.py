"""`pdserve top`: the cluster in a terminal, from the router's stream of snapshots."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from deploy.client.admin import AdminClient
from deploy.client.show import loading_text

_BAR_WIDTH = 24
_BLOCKS = (("used", "█", "blue"), ("held", "▓", "yellow"), ("cached", "▒", "cyan"), ("free", "·", "bright_black"))
_STATES = {"ready": "green", "loading": "yellow", "draining": "yellow", "unhealthy": "red"}
_STATUSES = {"finished": "green", "running": "blue", "failed": "red"}
_NUM_REQUESTS = 12
_NUM_TRANSFERS = 8
_WIDE, _WIDE_COLUMNS = 96, ("cached",)  # columns that a narrower terminal has no room for
_REQUEST_COLUMNS = (
    ("status", 8), ("prompt", 6), ("cached", 6), ("output", 6), ("TTFT", 8), ("total", 8), ("prefill → decode", 20),
)  # fmt: skip


def watch(url: str, *, once: bool, as_json: bool) -> None:
    """Draw until Ctrl-C. Raises AdminFailed when the router does not answer, or goes away."""
    snapshots = AdminClient(url).snapshots()
    first = next(snapshots)
    if as_json:
        print(json.dumps(first), flush=True)
        for snapshot in () if once else snapshots:
            print(json.dumps(snapshot), flush=True)
        return
    console = Console()
    if once:
        console.print(screen(first, console.width))
        return
    with Live(screen(first, console.width), console=console, screen=console.is_terminal, auto_refresh=False) as live:
        for snapshot in snapshots:
            live.update(screen(snapshot, console.width), refresh=True)


def screen(snapshot: Mapping[str, Any], width: int = _WIDE) -> RenderableType:
    """Everything, top to bottom by how often it is looked at."""
    state, recent = snapshot["state"], snapshot["recent"]
    plans = snapshot["pools"] or {}
    pools = [_pool(snapshot, role, plans.get(role)) for role in ("prefill", "decode")]
    parts: list[RenderableType] = [_head(snapshot), _latencies(recent, state), *pools]
    if len(snapshot["routers"]) > 1:
        parts.insert(1, _routers(snapshot))
    if recent["transfers"]:
        parts.append(_transfers(recent["transfers"]))
    return Group(*parts, _requests(snapshot["requests"], width))


def _head(snapshot: Mapping[str, Any]) -> Text:
    router = snapshot["router"]
    name = Text(router["router_id"])  # as Text: from outside, and no markup
    text = Text.assemble(("pdserve ", "bold"), router["version"], "  ", router["model"], "  ", name, "  ")
    if router["is_ready"]:
        return text.append("ready", style="green")
    return text.append(f"not ready: {'; '.join(router['reasons'])}", style="red")


def _routers(snapshot: Mapping[str, Any]) -> Panel:
    grid = Table.grid(padding=(0, 2))
    for router in snapshot["routers"]:
        is_shown = router["router_id"] == snapshot["router"]["router_id"]
        state = Text("ready", "green") if router["is_ready"] else Text("not ready", "red")
        load = f"{router['num_running']} running {router['num_queued']} queued"
        grid.add_row(Text(router["router_id"]), state, Text(router["http_url"]), load, "asked here" if is_shown else "")
    return Panel(grid, title="routers; latencies, rates and requests are those of one", title_align="left")


def _latencies(recent: Mapping[str, Any], state: Mapping[str, Any]) -> Panel:
    grid = Table.grid(padding=(0, 3))
    ttft = f"TTFT p50 {_ms(recent['ttft_p50_s'])}  p99 {_ms(recent['ttft_p99_s'])}"
    itl = f"ITL p50 {_ms(recent['itl_p50_s'])}  p99 {_ms(recent['itl_p99_s'])}"
    grid.add_row(ttft, f"prompt {recent['prompt_tokens_per_s']:.0f} tok/s")
    grid.add_row(itl, f"output {recent['generation_tokens_per_s']:.0f} tok/s")
    grid.add_row(
        f"running {state['num_running']}  queued {state['num_queued']}",
        f"errors {_percent(recent['error_rate'])}  retries {_percent(recent['retry_rate'])}",
    )
    shares = (_percent(recent["prefix_hit_rate"]), _percent(recent["exposed_share"]))
    grid.add_row(f"prefix hits {shares[0]}", f"transfer exposed {shares[1]}")
    return Panel(grid, title=f"last {recent['window_s']:.0f} s", title_align="left")


def _pool(snapshot: Mapping[str, Any], role: str, plan: Mapping[str, Any] | None) -> Panel:
    members = sorted((w for w in snapshot["state"]["workers"] if w["role"] == role), key=lambda w: str(w["worker_id"]))
    grid = Table.grid(padding=(0, 2))
    for worker in members:
        busy = worker["kv_blocks_used"] + worker["kv_blocks_held"]
        grid.add_row(
            worker["worker_id"],
            Text(worker["state"], _STATES.get(worker["state"], "")),
            bar(worker),
            f"{busy}/{worker['kv_blocks_total']}",
            f"{worker['running']} run {worker['waiting']} wait",
        )
    for worker in snapshot["loading"]:
        if worker["role"] == role:
            grid.add_row(Text(worker["worker_id"]), Text("loading", "yellow"), Text(loading_text(worker)))
    waiting = sum(worker["waiting_uncached_tokens"] for worker in members)
    ready = sum(worker["state"] == "ready" for worker in members)
    wanted = f" of {plan['desired']} wanted{_coming(plan)}" if plan else ""
    title = f"{role}: {ready} ready{wanted}, {waiting} tokens wait"
    note = (plan.get("autoscale") or {}).get("reason", "") if plan else ""
    is_coming = plan is not None and plan.get("starting", 0) > 0
    shown = grid if grid.row_count else Text("starting" if is_coming else "no worker", "yellow" if is_coming else "red")
    return Panel(shown, title=title, title_align="left", subtitle=Text(note), subtitle_align="left")


def _coming(plan: Mapping[str, Any]) -> str:
    """Workers that take this role, by their old names."""
    names = [change["from_worker_id"] for change in plan.get("changing", ())]
    return f", {' and '.join(names)} on the way here" if names else ""


def bar(worker: Mapping[str, Any]) -> Text:
    """KV blocks by state; what exists is at least one character wide."""
    total = max(1, worker["kv_blocks_total"])
    text = Text()
    for state, character, style in _BLOCKS[:-1]:
        count = worker[f"kv_blocks_{state}"]
        width = max(1, round(count / total * _BAR_WIDTH)) if count else 0
        text.append(character * min(width, _BAR_WIDTH - len(text)), style)
    _, character, style = _BLOCKS[-1]
    return text.append(character * (_BAR_WIDTH - len(text)), style)


def _transfers(transfers: Sequence[Mapping[str, Any]]) -> Panel:
    grid = Table.grid(padding=(0, 2))
    for transfer in sorted(transfers, key=lambda t: float(t["bytes_per_s"]), reverse=True)[:_NUM_TRANSFERS]:
        pair = f"{transfer['prefill_worker_id']} → {transfer['decode_worker_id']}"
        grid.add_row(pair, f"{transfer['bytes_per_s'] / 1e6:.1f} MB/s", f"{transfer['num_handoffs']} handoffs")
    return Panel(grid, title="KV transfers", title_align="left")


def _requests(requests: Sequence[Mapping[str, Any]], width: int) -> Table:
    """Where there is no room, ids are cut to a beginning that `pdserve explain` takes."""
    columns = [column for column in _REQUEST_COLUMNS if width >= _WIDE or column[0] not in _WIDE_COLUMNS]
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bright_black", expand=True)
    table.add_column("request", ratio=1, no_wrap=True, overflow="crop", min_width=8)
    for name, column_width in columns:
        is_text = name in ("status", "prefill → decode")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True, width=column_width)
    for request in requests[:_NUM_REQUESTS]:
        cells = _cells(request)
        # As Text: an id from outside is no markup.
        table.add_row(Text(request["request_id"]), *(cells[name] for name, _ in columns))
    return table


def _cells(request: Mapping[str, Any]) -> dict[str, Text | str]:
    total_s = request["age_s"] if request["status"] == "running" else request["wall_s"]
    prefill = "local" if request["is_local"] else request["prefill_worker"] or "-"
    return {
        "status": Text(str(request["error"] or request["status"]), _STATUSES.get(request["status"], "")),
        "prompt": str(request["num_prompt_tokens"]),
        "cached": str(request["num_cached_tokens"]),
        "output": str(request["num_completion_tokens"]),
        "TTFT": _ms(request["time_to_first_token_s"]) if request["num_completion_tokens"] else "-",
        "total": _ms(total_s),
        "prefill → decode": Text(f"{prefill} → {request['decode_worker'] or '-'}"),
    }


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.1f} %"
