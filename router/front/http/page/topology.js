// Routers, prefill and decode workers, and what flows between them: the wider an edge, the more bytes per second.

import { h, svg } from "./dom.js";
import { bytes } from "./format.js";

const WIDTH = 740, ROW = 62, ROUTER_WIDTH = 150, BOX_WIDTH = 196, BOX_HEIGHT = 46, TOP = 14;
const COLUMNS = { router: 4, prefill: 216, decode: 540 };
const MAX_ROWS = 12;

export function drawTopology({ state, recent, router, routers }) {
  const workers = { prefill: byRole(state.workers, "prefill"), decode: byRole(state.workers, "decode") };
  const counts = [routers.length, workers.prefill.length, workers.decode.length];
  const rows = Math.max(1, Math.min(MAX_ROWS, Math.max(...counts)));
  const height = TOP * 2 + rows * ROW - (ROW - BOX_HEIGHT);
  const at = new Map();
  for (const role of ["prefill", "decode"]) place(at, workers[role], COLUMNS[role], height);
  const hubs = placed(routers, height).map(([each, y]) => ({ x: COLUMNS.router, y, router: each }));
  const picture = svg(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": inWords(counts, recent.transfers) },
    hubs.map((hub) => [...at.values()].map((box) => controlEdge(hub, box))).flat(),
    transferEdges(at, recent.transfers),
    hubs.map(({ x, y, router: each }) => box(x, y, each.router_id === router.router_id ? "router here" : "router",
      each.router_id, `${each.num_running} running, ${each.num_queued} queued`, each.is_ready ? "ready" : "unhealthy",
      `${each.router_id}, ${each.http_url}`)),
    [...at.values()].map(({ x, y, worker }) => workerBox(x, y, worker)),
  );
  const hidden = counts.reduce((sum, count) => sum + Math.max(0, count - MAX_ROWS), 0);
  const notes = [
    hidden ? `${hidden} more are not drawn` : "",
    routers.length > 1 ? "Latencies, rates, transfers and requests on this page are those of the router with the thick border." : "",
  ];
  const note = notes.some(Boolean) ? h("p", { class: "muted" }, notes.filter(Boolean).join(". ")) : null;
  document.getElementById("topology").replaceChildren(picture, ...(note ? [note] : []));
}

export function byRole(workers, role) {
  return workers
    .filter((worker) => worker.role === role)
    .sort((a, b) => a.worker_id.localeCompare(b.worker_id, "en", { numeric: true }));
}

function place(at, workers, x, height) {
  for (const [worker, y] of placed(workers, height)) at.set(worker.worker_id, { x, y, worker });
}

// [item, y] of the first items of a column, centred.
function placed(items, height) {
  const shown = items.slice(0, MAX_ROWS);
  const first = (height - (shown.length * ROW - (ROW - BOX_HEIGHT))) / 2;
  return shown.map((item, idx) => [item, first + idx * ROW]);
}

function workerBox(x, y, worker) {
  const busy = (worker.kv_blocks_used + worker.kv_blocks_held) / Math.max(1, worker.kv_blocks_total);
  const what = `${worker.running} running, ${worker.waiting} waiting, KV ${(busy * 100).toFixed(0)} %`;
  return box(x, y, worker.role, worker.worker_id, what, worker.state);
}

function box(x, y, kind, name, what, state, title = name) {
  const isRouter = kind.startsWith("router"), most = isRouter ? 16 : 20;
  const short = name.length > most ? `${name.slice(0, most - 1)}…` : name;
  return svg(
    "g",
    { class: `node ${kind} ${state}` },
    svg("title", {}, title),
    svg("rect", { x, y, width: isRouter ? ROUTER_WIDTH : BOX_WIDTH, height: BOX_HEIGHT, rx: 8 }),
    svg("circle", { cx: x + 14, cy: y + 16, r: 4.5, class: "lamp" }),
    svg("text", { x: x + 26, y: y + 20, class: "name" }, short),
    svg("text", { x: x + 12, y: y + 37, class: "what" }, what),
  );
}

function controlEdge(hub, { x, y }) {
  const from = [hub.x + ROUTER_WIDTH, hub.y + BOX_HEIGHT / 2], to = [x, y + BOX_HEIGHT / 2];
  return svg("path", { d: curve(from, to), class: "control" });
}

// The fastest first: a rate that finds no free place is left to the list in words.
function transferEdges(at, transfers) {
  const taken = [];
  const ordered = [...transfers].sort((one, other) => other.bytes_per_s - one.bytes_per_s);
  return ordered.map((transfer) => transferEdge(at, transfer, taken));
}

function transferEdge(at, transfer, taken) {
  const prefill = at.get(transfer.prefill_worker_id), decode = at.get(transfer.decode_worker_id);
  if (!prefill || !decode) return null;
  const from = [prefill.x + BOX_WIDTH, prefill.y + BOX_HEIGHT / 2], to = [decode.x, decode.y + BOX_HEIGHT / 2];
  const perSecond = transfer.bytes_per_s;
  const place = perSecond > 0 ? freePlace(from, to, taken) : null;
  const width = perSecond > 0 ? Math.min(14, 1.5 + Math.log10(1 + perSecond / 1e5) * 2.5) : 1;
  return svg(
    "g",
    { class: perSecond > 0 ? "transfer live" : "transfer" },
    svg("path", { d: curve(from, to), "stroke-width": width.toFixed(1) }),
    svg("title", {}, `${transfer.prefill_worker_id} to ${transfer.decode_worker_id}: ${bytes(perSecond)}/s`),
    place ? svg("text", { x: place[0], y: place[1] + 4, "text-anchor": "middle" }, `${bytes(perSecond)}/s`) : null,
  );
}

// A place on the edge for its rate that is not under another one.
function freePlace(from, to, taken) {
  const places = [0.5, 0.28, 0.72].map((share) =>
    [from[0] + (to[0] - from[0]) * share, on(from[1], to[1], share)]);
  const free = places.find(([x, y]) => taken.every(([x2, y2]) => Math.abs(x - x2) > 54 || Math.abs(y - y2) > 13));
  if (free) taken.push(free);
  return free;
}

// Height of `curve` at a share of its width; near enough for a label.
function on(y1, y2, share) {
  return y1 + (y2 - y1) * share * share * (3 - 2 * share);
}

function curve([x1, y1], [x2, y2]) {
  const middle = (x1 + x2) / 2;
  return `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`;
}

function inWords([numRouters, numPrefill, numDecode], transfers) {
  const live = transfers.filter((transfer) => transfer.bytes_per_s > 0);
  const flows = live.map((t) => `${t.prefill_worker_id} to ${t.decode_worker_id} ${bytes(t.bytes_per_s)} per second`);
  const counts = `${numRouters} router${numRouters === 1 ? "" : "s"}, ${numPrefill} prefill and ${numDecode} decode workers`;
  return `${counts}; ${flows.length ? flows.join(", ") : "no transfer at the moment"}`;
}
