// The last minute in numbers.

import { h, keyed, setText } from "./dom.js";
import { count, duration, percent, rate } from "./format.js";

const TILES = [
  // Time to the first token, and between two tokens.
  ["TTFT p50", (r) => duration(r.ttft_p50_s)],
  ["TTFT p99", (r) => duration(r.ttft_p99_s)],
  ["ITL p50", (r) => duration(r.itl_p50_s)],
  ["ITL p99", (r) => duration(r.itl_p99_s)],
  ["Errors", (r) => percent(r.error_rate), (r) => r.error_rate > 0.01],
  ["Retries", (r) => percent(r.retry_rate)],
  ["Prefix hits", (r) => percent(r.prefix_hit_rate)],
  ["Transfer exposed", (r) => percent(r.exposed_share)],
  ["Prompt", (r) => rate(r.prompt_tokens_per_s, "tok/s")],
  ["Output", (r) => rate(r.generation_tokens_per_s, "tok/s")],
  ["Running", (r, routers) => count(sum(routers, "num_running"))],
  ["Queued", (r, routers) => count(sum(routers, "num_queued"))],
];

// What runs and waits is that of all routers, as it is on the same workers.
const sum = (routers, name) => routers.reduce((total, router) => total + router[name], 0);

export function drawTiles({ recent, routers }) {
  keyed(
    document.getElementById("tiles"),
    TILES,
    ([name]) => name,
    ([name]) => h("div", { class: "tile" }, h("dt", {}, name), h("dd")),
    (tile, [, value, isBad]) => {
      setText(tile.lastElementChild, value(recent, routers));
      tile.classList.toggle("bad", Boolean(isBad?.(recent)));
    },
  );
}
