"""The autoscaler through a step from idle to overload and back, as a picture: `python -m tests.bench.autoscale_plot`.

`sim`: the made-up cluster of its tests, on a virtual clock. `live`: `pdserve up` on this machine with the demo model,
under the load generator of `pdserve bench`. Writes an SVG and, beside it, a JSON with every number. Exit code 1 when a
request failed or a pool turned more than once.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from common.checkpoint.demo_model import fetch_demo_model
from common.values.config import AutoscaleSettings
from common.values.messages import Role
from deploy.load.http_client import Endpoint
from deploy.load.openai_client import Target, served_model, vocabulary_of
from deploy.load.plan import Piece, PlannedRequest
from deploy.load.prompts import WORDS, Prompts
from deploy.load.results import Outcome
from deploy.load.run import Run
from tests.bench.timeline import Sample, Timeline, svg_of
from tests.cluster.cluster import Cluster, running_cluster
from tests.deploy.scaling.load_model import DECODE_S, MAX_NUM_SEQS, TICK_S, ClusterModel

INTERVAL_S = 0.5
# (seconds, requests per second)
Phases = Sequence[tuple[float, float]]
SIM_PHASES: Phases = ((60, 0.0), (300, 6.0), (240, 0.0))
SIM_SETTINGS = AutoscaleSettings(prefill_max=8, decode_max=10, stable_window_s=60)
LIVE_AUTOSCALE: dict[str, Any] = {
    **{"enabled": True, "prefill_max": 2, "decode_max": 2, "target_ttft_s": 1.0, "target_tpot_s": 0.1},
    **{"up_window_s": 3, "stable_window_s": 20, "up_cooldown_s": 10, "down_cooldown_s": 10},
}


def simulated() -> Timeline:
    """The step on the virtual clock."""
    model = ClusterModel(SIM_SETTINGS)
    title = f"Autoscaler, simulated, {datetime.now(UTC):%Y-%m-%d}: {_in_words(SIM_PHASES)}"
    timeline = Timeline(title, SIM_SETTINGS.target_ttft_s, SIM_SETTINGS.target_tpot_s)
    for duration_s, rate in SIM_PHASES:
        for _ in range(int(duration_s / TICK_S)):
            model.run(TICK_S, rate)
            pools = [model.pools[role] for role in Role]
            timeline.samples.append(
                Sample(
                    model.now_s,
                    rate,
                    round(model.num_sequences, 1),
                    (pools[0].size, pools[1].size),
                    (pools[0].num_ready, pools[1].num_ready),
                )
            )
            timeline.tpot_s.append((model.now_s, _simulated_tpot_s(model)))
    timeline.ttft_s = list(model.ttft_s)
    timeline.changes = [(at_s, role.value, before, to, "") for at_s, role, before, to in model.changes]
    return timeline


def _simulated_tpot_s(model: ClusterModel) -> float:
    """A sequence of 100 tokens takes DECODE_S once it has a seat; those without one wait."""
    seats = model.pools[Role.DECODE].num_ready * MAX_NUM_SEQS
    return DECODE_S / 100 * max(1.0, model.num_sequences / seats)


def live(phases: Phases, input_len: int, output_len: int, max_num_seqs: int) -> Timeline:
    """The step on a cluster of this machine, which is gone afterwards."""
    config = {
        "autoscale": LIVE_AUTOSCALE,
        "decode_worker": {"max_num_seqs": max_num_seqs},
        "router": {"local_prefill_max_tokens": 0},
    }
    model = fetch_demo_model(print)
    with running_cluster(model, config=config) as cluster:
        return asyncio.run(_live(cluster, phases, input_len, output_len))


async def _live(cluster: Cluster, phases: Phases, input_len: int, output_len: int) -> Timeline:
    endpoint = Endpoint.of(cluster.url, "")
    model = await served_model(endpoint)
    vocabulary = await vocabulary_of(endpoint, model)
    run = Run(Target(endpoint, model), Prompts(vocabulary or range(len(WORDS)), 0), max_concurrency=1000)
    settings = AutoscaleSettings.model_validate(LIVE_AUTOSCALE)
    title = f"Autoscaler, live on 2 cores, {model}, {datetime.now(UTC):%Y-%m-%d}: {_in_words(phases)}"
    timeline = Timeline(title, settings.target_ttft_s, settings.target_tpot_s)
    watching = asyncio.create_task(_watch(cluster, phases, timeline))
    await run.send(_plan(phases, input_len, output_len), lambda progress: None)
    timeline.changes = _changes(await watching)
    _add_latencies(timeline, run.outcomes, run.started_s)
    return timeline


def _plan(phases: Phases, input_len: int, output_len: int) -> list[PlannedRequest]:
    """Evenly spaced: the step is to be the only surprise."""
    plan, begins_s = [], 0.0
    for duration_s, rate in phases:
        for idx in range(round(duration_s * rate)):
            pieces = (Piece(f"request-{len(plan)}", input_len),)
            plan.append(PlannedRequest(begins_s + idx / rate, pieces, output_len))
        begins_s += duration_s
    return plan


async def _watch(cluster: Cluster, phases: Phases, timeline: Timeline) -> dict[str, Any]:
    """Look until the phases are over; the last state."""
    began_s, end_s = time.monotonic(), sum(duration_s for duration_s, _ in phases)
    while True:
        state = await asyncio.to_thread(cluster.get, "/admin/v1/state")
        if state["pools"] is None:  # Redis was not quick enough
            await asyncio.sleep(INTERVAL_S)
            continue
        at_s = time.monotonic() - began_s
        if at_s > end_s:
            return {**state, "at_s": at_s}
        ready = [worker["role"] for worker in state["workers"] if worker["state"] == "ready"]
        timeline.samples.append(
            Sample(
                round(at_s, 2),
                _rate_at(phases, at_s),
                sum(router["num_running"] + router["num_queued"] for router in state["routers"]),
                (state["pools"]["prefill"]["desired"], state["pools"]["decode"]["desired"]),
                (ready.count("prefill"), ready.count("decode")),
            )
        )
        await asyncio.sleep(INTERVAL_S)


def _rate_at(phases: Phases, at_s: float) -> float:
    for duration_s, rate in phases:
        if at_s < duration_s:
            return rate
        at_s -= duration_s
    return 0.0


def _changes(state: dict[str, Any]) -> list[tuple[float, str, int, int, str]]:
    found = [
        (round(state["at_s"] - change["age_s"], 1), role, change["from"], change["to"], change["reason"])
        for role in ("prefill", "decode")
        for change in state["pools"][role]["autoscale"]["changes"]
    ]
    return sorted(found)


def _add_latencies(timeline: Timeline, outcomes: Sequence[Outcome], started_s: float) -> None:
    timeline.num_requests = len(outcomes)
    timeline.num_failed = sum(not outcome.is_success for outcome in outcomes)
    for outcome in outcomes:
        if outcome.is_success:
            at_s = round(outcome.planned_s - started_s, 3)
            timeline.ttft_s.append((at_s, round(outcome.ttft_s, 4)))
            timeline.tpot_s.append((at_s, round(outcome.tpot_s or 0.0, 5)))


def _in_words(phases: Phases) -> str:
    return ", ".join(f"{rate:g}/s for {duration_s:g} s" for duration_s, rate in phases)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["sim", "live"])
    parser.add_argument("--out", type=Path, required=True, help="SVG to write; the JSON has the same name")
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second of the overload, live")
    parser.add_argument("--seconds", type=float, nargs=3, default=(20, 60, 75), help="idle, overload, idle, live")
    parser.add_argument("--input-len", type=int, default=192)
    parser.add_argument("--output-len", type=int, default=48)
    parser.add_argument("--max-num-seqs", type=int, default=4, help="of a decode worker, live")
    options = parser.parse_args()
    before, during, after = options.seconds
    phases = ((before, 0.2), (during, options.rate), (after, 0.2))
    timeline = (
        simulated()
        if options.kind == "sim"
        else live(phases, options.input_len, options.output_len, options.max_num_seqs)
    )
    options.out.write_text(svg_of(timeline))
    options.out.with_suffix(".json").write_text(json.dumps(timeline.as_json()) + "\n")
    print(f"{timeline.num_failed} of {timeline.num_requests} failed, {timeline.num_turns} turns: {timeline.changes}")
    return 0 if timeline.num_failed == 0 and timeline.num_turns <= 2 else 1


if __name__ == "__main__":
    raise SystemExit(main())
