// Routers, prefill and decode workers, and what flows between them: the wider an edge, the more bytes per second.

import { h, svg } from "./dom.js";
import { bytes } from "./format.js";

const BOX_HEIGHT = 46, TOP = 14, NARROW = 560, MAX_ROWS = 12;
// Of a row of boxes: the card beside it is often higher, and then the rows take that room.
const MIN_ROW = 62, MAX_ROW = 110, NOTES = 40;
// Pixels of one character of a name, and of what stands left of it: names are cut where their box ends.
const NAME_CHARACTER = 7.4, NAME_START = 34;
let last = null;

export function startTopology() {
  addEventListener("resize", () => last && drawTopology(last));
}

export function drawTopology(snapshot) {
  last = snapshot;
  const { state, recent, router, routers } = snapshot;
  const card = document.getElementById("topology");
  const columns = [routers, byRole(state.workers, "prefill"), byRole(state.workers, "decode")];
  const counts = columns.map((column) => column.length);
  const plan = planOf(columns, card.clientWidth || 740);
  const at = new Map([...plan.prefill, ...plan.decode].map((box) => [box.item.worker_id, box]));
  const picture = svg(
    "svg",
    { viewBox: `0 0 ${plan.width} ${plan.height}`, width: plan.width, height: plan.height, role: "img", "aria-label": inWords(counts, recent.transfers) },
    plan.routers.map((hub) => [...at.values()].map((box) => controlEdge(hub, box, plan.isNarrow))).flat(),
    recent.transfers.map((transfer) => transferEdge(at, transfer)),
    plan.routers.map((box) => routerBox(box, router)),
    [...at.values()].map(workerBox),
  );
  const hidden = counts.reduce((sum, count) => sum + Math.max(0, count - MAX_ROWS), 0);
  const notes = [
    hidden ? `${hidden} more are not drawn` : "",
    routers.length > 1 ? "Latencies, rates, transfers and requests on this page are those of the router with the thick border." : "",
  ].filter(Boolean);
  const parts = [picture, flows(recent.transfers), notes.length ? h("p", { class: "muted" }, notes.join(". ")) : null];
  card.replaceChildren(...parts.filter(Boolean));
}

export function byRole(workers, role) {
  return workers
    .filter((worker) => worker.role === role)
    .sort((a, b) => a.worker_id.localeCompare(b.worker_id, "en", { numeric: true }));
}

// Where every box stands. Wide: three columns. Narrow: routers in a row above the two pools, so that all are in view.
function planOf([routers, prefill, decode], width) {
  const isNarrow = width < NARROW;
  if (!isNarrow) {
    const box = Math.min(230, width * 0.27), rows = rowsOf([routers, prefill, decode]);
    const row = Math.max(MIN_ROW, Math.min(MAX_ROW, (roomBeside() - NOTES) / rows)), height = heightOf(rows, row);
    const column = (items, x) => placed(items, height, row).map(([item, y]) => ({ item, x, y, width: box }));
    return { width, height, isNarrow, routers: column(routers, 2), prefill: column(prefill, width * 0.345), decode: column(decode, width - box - 2) };
  }
  const box = (width - 44) / 2, shown = routers.slice(0, MAX_ROWS);
  const below = TOP + Math.ceil(shown.length / 2) * MIN_ROW + 12, height = heightOf(rowsOf([prefill, decode]), MIN_ROW);
  const column = (items, x) => placed(items, height, MIN_ROW).map(([item, y]) => ({ item, x, y: y + below, width: box }));
  const hubs = shown.map((item, idx) => ({
    item, y: TOP + Math.floor(idx / 2) * MIN_ROW, width: box,
    x: shown.length === 1 ? (width - box) / 2 : 2 + (idx % 2) * (width - box - 4),
  }));
  return { width, height: height + below, isNarrow, routers: hubs, prefill: column(prefill, 2), decode: column(decode, width - box - 2) };
}

const rowsOf = (columns) => Math.max(1, Math.min(MAX_ROWS, Math.max(...columns.map((column) => column.length))));
const heightOf = (rows, row) => TOP * 2 + rows * row - (row - BOX_HEIGHT);
const roomBeside = () => document.getElementById("pools").offsetHeight;

// [item, y] of the first items of a column, centred.
function placed(items, height, row) {
  const shown = items.slice(0, MAX_ROWS);
  const first = (height - (shown.length * row - (row - BOX_HEIGHT))) / 2;
  return shown.map((item, idx) => [item, first + idx * row]);
}

function workerBox({ item: worker, x, y, width }) {
  const busy = (worker.kv_blocks_used + worker.kv_blocks_held) / Math.max(1, worker.kv_blocks_total);
  const [running, waiting] = width > 180 ? ["running", "waiting"] : ["run", "wait"];
  const what = `${worker.running} ${running}, ${worker.waiting} ${waiting}, KV ${(busy * 100).toFixed(0)} %`;
  return box({ x, y, width }, worker.role, worker.worker_id, what, worker.state);
}

function routerBox({ item: each, ...place }, router) {
  const kind = each.router_id === router.router_id ? "router here" : "router";
  const what = `${each.num_running} running, ${each.num_queued} queued`;
  return box(place, kind, each.router_id, what, each.is_ready ? "ready" : "unhealthy", `${each.router_id}, ${each.http_url}`);
}

function box({ x, y, width }, kind, name, what, state, title = name) {
  const most = Math.floor((width - NAME_START) / NAME_CHARACTER);
  const short = name.length > most ? `${name.slice(0, most - 1)}…` : name;
  return svg(
    "g",
    { class: `node ${kind} ${state}` },
    svg("title", {}, title),
    svg("rect", { x, y, width, height: BOX_HEIGHT, rx: 8 }),
    svg("circle", { cx: x + 14, cy: y + 16, r: 4.5, class: "lamp" }),
    svg("text", { x: x + 26, y: y + 20, class: "name" }, short),
    svg("text", { x: x + 10, y: y + 37, class: "what" }, what),
  );
}

function controlEdge(hub, box, isNarrow) {
  if (!isNarrow) return svg("path", { d: across([hub.x + hub.width, middle(hub)], [box.x, middle(box)]), class: "control" });
  const from = [hub.x + hub.width / 2, hub.y + BOX_HEIGHT], to = [box.x + box.width / 2, box.y];
  const bend = (from[1] + to[1]) / 2;
  return svg("path", { d: `M${from.join(" ")}C${from[0]} ${bend} ${to[0]} ${bend} ${to.join(" ")}`, class: "control" });
}

function transferEdge(at, transfer) {
  const prefill = at.get(transfer.prefill_worker_id), decode = at.get(transfer.decode_worker_id);
  if (!prefill || !decode) return null;
  const perSecond = transfer.bytes_per_s;
  const width = perSecond > 0 ? Math.min(14, 1.5 + Math.log10(1 + perSecond / 1e5) * 2.5) : 1;
  return svg(
    "g",
    { class: perSecond > 0 ? "transfer live" : "transfer" },
    svg("path", { d: across([prefill.x + prefill.width, middle(prefill)], [decode.x, middle(decode)]), "stroke-width": width.toFixed(1) }),
    svg("title", {}, `${transfer.prefill_worker_id} to ${transfer.decode_worker_id}: ${bytes(perSecond)}/s`),
  );
}

// The rates as a list, the fastest first: on the edges they would lie on one another.
function flows(transfers) {
  const live = transfers.filter(({ bytes_per_s: perSecond }) => perSecond > 0).sort((a, b) => b.bytes_per_s - a.bytes_per_s);
  if (!live.length) return null;
  return h("ul", { class: "flows", "aria-label": "Transfers of KV, the fastest first" }, live.map((transfer) =>
    h("li", {}, h("strong", {}, `${bytes(transfer.bytes_per_s)}/s`), ` ${transfer.prefill_worker_id} → ${transfer.decode_worker_id}`)));
}

const middle = ({ y }) => y + BOX_HEIGHT / 2;

function across([x1, y1], [x2, y2]) {
  const bend = (x1 + x2) / 2;
  return `M${x1} ${y1}C${bend} ${y1} ${bend} ${y2} ${x2} ${y2}`;
}

function inWords([numRouters, numPrefill, numDecode], transfers) {
  const live = transfers.filter((transfer) => transfer.bytes_per_s > 0);
  const flows = live.map((t) => `${t.prefill_worker_id} to ${t.decode_worker_id} ${bytes(t.bytes_per_s)} per second`);
  const counts = `${numRouters} router${numRouters === 1 ? "" : "s"}, ${numPrefill} prefill and ${numDecode} decode workers`;
  return `${counts}; ${flows.length ? flows.join(", ") : "no transfer at the moment"}`;
}
