"""Takes the pictures of the page that the documents show, from a live cluster: `python -m tests.ui.pictures DIRECTORY`.

Two routers and 2+2 workers with the demo model under the load generator of `pdserve bench`, and one long prompt, whose
parts must add up to its wall time within a millisecond. Look at the pictures before they are committed.
"""

import asyncio
import base64
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from common.checkpoint.demo_model import fetch_demo_model
from deploy.load.http_client import Endpoint
from deploy.load.openai_client import Target, served_model, vocabulary_of
from deploy.load.plan import Shape, synthetic
from deploy.load.prompts import WORDS, Prompts
from deploy.load.run import Run
from tests.cluster.cluster import Cluster, running_cluster
from tests.ports import free_port
from tests.ui.browser import Browser, browser

LONG_ID = "long-prompt"
NUM_LONG_TOKENS = 1700
PARTS = ("route_s", "prefill_queue_s", "prefill_s", "kv_exposed_s", "decode_queue_s", "decode_s")
WIDTH, HEIGHT = 1400, 1180


async def load(cluster: Cluster, num_requests: int, rate_per_s: float) -> None:
    """Requests that share four prefixes, to both routers in turn."""
    urls = [cluster.url, f"http://127.0.0.1:{cluster.http_port + 1}"]
    await asyncio.gather(*(_load(url, num_requests, rate_per_s, seed) for seed, url in enumerate(urls)))


async def _load(url: str, num_requests: int, rate_per_s: float, seed: int) -> None:
    endpoint = Endpoint.of(url, "")
    model = await served_model(endpoint)
    vocabulary = await vocabulary_of(endpoint, model) or range(len(WORDS))
    run = Run(Target(endpoint, model), Prompts(vocabulary, 0), max_concurrency=100)
    shape = Shape(192, 48, prefix_len=128, num_prefixes=4)
    await run.send(synthetic(shape, num_requests, rate_per_s, random.Random(seed)), lambda progress: None)
    assert all(outcome.is_success for outcome in run.outcomes), [outcome.error for outcome in run.outcomes]


def ask_long(cluster: Cluster, model: str) -> dict[str, Any]:
    """One long prompt; its record, the parts of which add up."""
    token_ids = [random.Random(7).randrange(1000, 9000) for _ in range(NUM_LONG_TOKENS)]
    body = {"model": model, "prompt": token_ids, "max_tokens": 24, "ignore_eos": True}
    reply = httpx.post(f"{cluster.url}/v1/completions", json=body, headers={"x-request-id": LONG_ID}, timeout=120)
    assert reply.status_code == 200, reply.text
    record: dict[str, Any] = cluster.get(f"/admin/v1/requests/{reply.json()['id']}")
    timings = record["timings"]
    difference_s = sum(timings[part] for part in PARTS) - timings["wall_s"]
    print(f"parts and wall time differ by {difference_s * 1e6:.1f} us of {timings['wall_s']:.3f} s")
    assert abs(difference_s) < 1e-3
    return record


def take(tab: Browser, cluster: Cluster, record: dict[str, Any], out: Path) -> None:
    """The page and the waterfall, light and dark."""
    tab.set_window(WIDTH, HEIGHT)
    tab.open(f"{cluster.url}/ui/")
    tab.wait("return document.querySelectorAll('#requests tr').length > 5")
    tab.wait("return document.querySelectorAll('.transfer.live').length > 1")
    for theme in ("light", "dark"):
        tab.set_dark(dark=theme == "dark")
        time.sleep(1.2)  # the bars move to their places
        tab.screenshot(out / f"ui-{theme}.png")
    tab.script(
        "import(new URL('requests.js', document.baseURI)).then(m => m.select(arguments[0]))", record["request_id"]
    )
    tab.wait("return document.querySelector('.waterfall .chunk') !== null")
    tab.set_window(WIDTH, 2 * HEIGHT)  # no scroll bar, which would change the widths
    for theme in ("light", "dark"):
        tab.set_dark(dark=theme == "dark")
        element_picture(tab, "#detail", out / f"waterfall-{theme}.png")


def element_picture(tab: Browser, selector: str, path: Path) -> None:
    box = tab.script(
        "const r = document.querySelector(arguments[0]).getBoundingClientRect();"
        "return {x: r.x + scrollX, y: r.y + scrollY, width: r.width, height: r.height}", selector,
    )  # fmt: skip
    shot = tab.devtools("Page.captureScreenshot", clip={**box, "scale": 1})
    path.write_bytes(base64.b64decode(shot["data"]))


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    options = ("--routers", "2", "--local-prefill-max-tokens", "0")
    model = fetch_demo_model(print)
    with running_cluster(model, *options, prefill=2, decode=2, ports=(free_port(1), free_port(1))) as cluster:
        name = cluster.get("/v1/models")["data"][0]["id"]
        record = ask_long(cluster, name)
        loading = threading.Thread(target=lambda: asyncio.run(load(cluster, 40, 1.5)))
        loading.start()
        time.sleep(6)
        with tempfile.TemporaryDirectory() as profile, browser(Path(profile)) as tab:
            take(tab, cluster, record, out)
        loading.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
