"""`pdserve explain`: one request as text, from what the router remembers of it."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from deploy.cli.waterfall import Waterfall, render
from deploy.client.admin import AdminClient, AdminFailed
from deploy.client.show import table

_DECISION = ("at", "role", "worker", "cost", "load", "cached", "")


def explain_request(url: str, beginning: str, *, as_json: bool) -> None:
    """Print it; without a beginning of an id, the newest. Raises AdminFailed: the router knows none, or several."""
    record = find_record(AdminClient(url), beginning)
    print(json.dumps(record) if as_json else "\n".join(lines_of(record)))


def find_record(client: AdminClient, beginning: str) -> Mapping[str, Any]:
    """The request with that id, or the only one that begins so among the newest."""
    found = [record for record in client.records() if str(record["request_id"]).startswith(beginning)]
    if not beginning and found:
        return found[0]
    if len(found) == 1:
        return found[0]
    if len(found) > 1 and all(record["request_id"] != beginning for record in found):
        raise AdminFailed(f"{len(found)} requests begin with {beginning!r}: give more of the id")
    if not beginning:
        raise AdminFailed("the router remembers no request yet")
    return client.record(beginning)


def lines_of(record: Mapping[str, Any]) -> Iterator[str]:
    """What, where the time went, why there, what was tried."""
    yield f"{record['request_id']}: {_outcome(record)}"
    yield (
        f"prompt {record['num_prompt_tokens']} tokens ({record['num_cached_tokens']} cached), "
        f"answer {record['num_completion_tokens']}, retries {record['num_retries']}"
    )
    if record["num_beams"]:
        yield f"beam search: {record['num_beams']} beams, the best {record['num_choices']} were returned"
    if record["num_returned"] < record["num_choices"]:
        yield f"choices: {record['num_choices']}, the best {record['num_returned']} by mean logprob were returned"
    if record["adapter"]:
        yield f"adapter: {record['adapter']}"
    if record["num_drafts"]:
        yield f"speculation: {record['num_accepted_drafts']} of {record['num_drafts']} drafted tokens accepted"
    yield ""
    yield from render(waterfall_of(record))
    yield from _steps(record["timings"])
    yield ""
    yield from _decisions(record["decisions"])
    yield ""
    widths = _widths(record["decisions"])
    for attempt in record["attempts"]:
        yield _attempt(attempt, widths)


def waterfall_of(record: Mapping[str, Any]) -> Waterfall:
    """The record's timings, as the drawing wants them."""
    timings = record["timings"]
    return Waterfall(
        route_s=timings["route_s"],
        queue_s=timings["prefill_queue_s"],
        prefill_s=timings["prefill_s"],
        hidden_transfer_s=max(0.0, timings["kv_transfer_s"] - timings["kv_exposed_s"]),
        exposed_transfer_s=timings["kv_exposed_s"],
        decode_queue_s=timings["decode_queue_s"],
        decode_s=timings["decode_s"],
        first_token_s=timings["time_to_first_token_s"],
        kv_bytes=timings["kv_bytes"],
        num_tokens=record["num_completion_tokens"],
    )


def _outcome(record: Mapping[str, Any]) -> str:
    if record["status"] == "failed":
        return f"failed, {record['error']}: {record['message']}"
    if record["status"] == "running":
        return f"running for {record['age_s']:.1f} s"
    return f"finished ({', '.join(dict.fromkeys(record['finish_reasons']))})"


def _steps(timings: Mapping[str, Any]) -> Iterator[str]:
    """Prefill step by step, and when KV was in its place."""
    for idx, (start_s, end_s, num_tokens) in enumerate(timings["prefill_chunks"], 1):
        yield f"  prefill step {idx}: {num_tokens} tokens, {_ms(start_s)} to {_ms(end_s)}"
    ticks = timings.get("kv_ticks", ())
    if ticks:
        yield f"  KV of {len(ticks)} chunks in place from {_ms(ticks[0][0])} to {_ms(ticks[-1][0])}"
        yield from _link(timings)
        handover_s = timings["kv_exposed_s"] + timings["decode_queue_s"]
        yield f"  prompt computed to first decode step: {_ms(handover_s)}"


def _link(timings: Mapping[str, Any]) -> Iterator[str]:
    """What the KV came over, and how fast that was lately."""
    if transport := timings.get("kv_transport", ""):
        rate = timings["kv_link_bytes_per_s"]
        yield f"  link {transport}, " + (f"{rate / 1e9:.2f} GB/s" if rate else "not measured yet")


def _decisions(decisions: list[Mapping[str, Any]]) -> list[str]:
    rows = [_DECISION, *(row for decision in decisions for row in _candidates(decision))]
    return table(rows) if len(rows) > 1 else ["no routing decision yet"]


def _candidates(decision: Mapping[str, Any]) -> Iterator[tuple[object, ...]]:
    for candidate in decision["candidates"]:
        is_chosen = candidate["worker_id"] == decision["chosen"]
        note = candidate["refusal"] or (f"<- chosen: {decision['why']}" if is_chosen else "")
        cost, load = f"{candidate['cost']:.3f}", f"{candidate['load']:.3f}"
        where = (candidate["worker_id"], cost, load, candidate["num_cached_tokens"])
        yield (_ms(decision["at_s"]), decision["role"], *where, note)


def _widths(decisions: list[Mapping[str, Any]]) -> dict[str, int]:
    """How many ranks each worker has that a request could have gone to."""
    candidates = [candidate for decision in decisions for candidate in decision["candidates"]]
    return {candidate["worker_id"]: candidate["num_ranks"] for candidate in candidates}


def _attempt(attempt: Mapping[str, Any], widths: Mapping[str, int]) -> str:
    prefill = "local" if attempt["is_local"] else _worker(attempt["prefill_worker"], widths)
    try_note = f" (try {attempt['prefill_try'] + 1})" if attempt["prefill_try"] > 0 else ""
    state = attempt["end_reason"] or attempt["phase"]
    where = f"prefill {prefill}{try_note}, decode {_worker(attempt['decode_worker'], widths)}"
    return f"attempt {attempt['attempt']}: {where}: {state}"


def _worker(reference: str, widths: Mapping[str, int]) -> str:
    """Its name, without which of its lives it was, and how many ranks it has if there are several."""
    name = reference.partition("#")[0]
    width = widths.get(name, 1)
    return f"{name} of {width} ranks" if width > 1 else name or "-"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
