"""Text for people: what the cluster looks like. Pure: no IO."""

from collections.abc import Mapping, Sequence
from typing import Any

_COLUMNS = (
    ("worker", "worker_id"),
    ("role", "role"),
    ("state", "state"),
    ("pid", "pid"),
    ("address", "address"),
    ("running", "running"),
    ("waiting", "waiting"),
    ("used", "kv_blocks_used"),
    ("cached", "kv_blocks_cached"),
    ("free", "kv_blocks_free"),
    ("held", "kv_blocks_held"),
    ("blocks", "kv_blocks_total"),
)

_NUM_CHANGES = 3
SILENT_S = 2.0  # a rank is heard of several times a second
DEFAULT_SERVER = "127.0.0.1:50051"
DEFAULT_URL = "http://127.0.0.1:8000"
# Longer than what a decode worker prefills itself, as a shell writes it.
_QUESTION, _NUMBERS = "Which number is missing", "$(seq -s ' ' 2 100)"


def table(rows: Sequence[Sequence[object]]) -> list[str]:
    """Rows as aligned columns, the first row as their names; numbers to the right."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[idx]) for row in texts) for idx in range(len(texts[0]))]
    is_number = [_is_numeric([row[idx] for row in texts[1:]]) for idx in range(len(widths))]
    lines = []
    for row in texts:
        cells = zip(row, widths, is_number, strict=True)
        lines.append(
            "  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in cells).rstrip()
        )
    return lines


def _is_numeric(cells: Sequence[str]) -> bool:
    filled = [cell for cell in cells if cell]
    return bool(filled) and all(cell.isdigit() for cell in filled)


def workers_table(workers: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line per worker, with its queue and its KV blocks, and beneath one per rank where there are several."""
    header = [name for name, _ in _COLUMNS]
    ordered = sorted(workers, key=lambda worker: (worker["role"] == "decode", worker["worker_id"]))
    lines = (line for worker in ordered for line in (worker, *_rank_lines(worker)))
    return table([header, *([line.get(key, "") for _, key in _COLUMNS] for line in lines)])


def _rank_lines(worker: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Its processes, in the columns of a worker: the device stands where a worker has its address."""
    ranks = worker.get("ranks", ())
    return [
        {
            "worker_id": f"  rank {rank['rank']}",
            "state": "alive" if rank["silent_s"] < SILENT_S else f"silent for {rank['silent_s']:.0f} s",
            "pid": rank["pid"],
            "address": rank["device"],
        }
        for rank in (ranks if len(ranks) > 1 else ())
    ]


def routers_table(routers: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line per router, with where it listens and what it has."""
    header = ("router", "state", "pid", "HTTP", "gRPC", "running", "queued")
    rows = (
        (
            router["router_id"],
            "ready" if router["is_ready"] else "not ready",
            router["pid"],
            router["http_url"],
            router["grpc_address"],
            router["num_running"],
            router["num_queued"],
        )
        for router in routers
    )
    return table([header, *rows])


def loading_lines(loading: Sequence[Mapping[str, Any]], workers: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line per worker that is not ready yet: what it does, and how far it is. Its last report may outlive that."""
    ready = {worker["worker_id"] for worker in workers if worker["state"] == "ready"}
    return [
        f"{worker['worker_id']}: {loading_text(worker)}, for {worker['elapsed_s']:.0f} s"
        for worker in loading
        if worker["worker_id"] not in ready
    ]


def loading_text(worker: Mapping[str, Any]) -> str:
    """`reading weights, 43 %`."""
    return f"{worker['phase']}, {worker['share'] * 100:.0f} %" if worker["share"] else str(worker["phase"])


def pools_line(workers: Sequence[Mapping[str, Any]], pools: Mapping[str, Any]) -> str:
    """`prefill: 2 ready of 2; decode: 1 ready, 1 starting of 2`. `pools`: the controller's, if there is one."""
    parts = []
    for role in ("prefill", "decode"):
        states = [str(worker["state"]) for worker in workers if worker["role"] == role]
        states += ["starting"] * pools.get(role, {}).get("starting", 0)
        counts = [f"{states.count(state)} {state}" for state in dict.fromkeys(sorted(states, key=_state_order))]
        wanted = f" of {pools[role]['desired']}" if role in pools else ""
        parts.append(f"{role}: {', '.join(counts) or 'none'}{wanted}")
    return "; ".join(parts)


def controller_lines(pools: Mapping[str, Any]) -> list[str]:
    """What the pool controller wants and why, a line per pool and thing; empty without a controller."""
    lines = []
    for role, pool in pools.items():
        lines += [
            f"{role}: {change['from_worker_id']} takes this role as {change['worker_id']}, for {change['age_s']:.0f} s"
            for change in pool.get("changing", ())
        ]
        if pool["retry_in_s"] > 0:
            lines.append(f"{role}: next start in {pool['retry_in_s']:.0f} s; {pool['last_failure']}")
        if autoscale := pool.get("autoscale"):
            text = autoscale["problem"] or autoscale["reason"]
            lines.append(f"{role}: autoscaled, {pool['desired']} wanted: {text}")
            lines += [
                f"{role}: {change['age_s']:.0f} s ago {change['from']} -> {change['to']}: {change['reason']}"
                for change in autoscale.get("changes", ())[:_NUM_CHANGES]
            ]
    return lines


def endpoints(http_url: str, grpc_address: str, model: str) -> list[str]:
    """Where to ask, commands that do, with a prompt that is long enough to go to a prefill worker, and what is next."""
    url, server = _option("--url", http_url, DEFAULT_URL), _option("--server", grpc_address, DEFAULT_SERVER)
    return [
        f"HTTP  {http_url}/v1  (OpenAI)",
        f"gRPC  {grpc_address}  (pdserve.v1.GenerationService)",
        "",
        f"  curl -N {http_url}/v1/chat/completions -H 'content-type: application/json' \\",
        f'    -d \'{{"model": "{model}", "stream": true, "max_tokens": 64,',
        f'''         "messages": [{{"role": "user", "content": "{_QUESTION}: '"{_NUMBERS}"'"}}]}}\'''',
        f'  pdserve generate --chat "{_QUESTION}: {_NUMBERS}"{server}',
        f"  pdserve explain --last{url}   (then: pdserve status, top, scale decode=2, drain decode-0)",
        "",
        f"page  {http_url}/ui/",
    ]


def _option(flag: str, value: str, default: str) -> str:
    return "" if value == default else f" {flag} {value}"


def _state_order(state: str) -> int:
    order = ("ready", "loading", "draining", "unhealthy")
    return order.index(state) if state in order else len(order)
