// Where a request's time went: its phases on one axis, prefill chunk by chunk, KV chunks as ticks where they arrived.

import { h, svg } from "./dom.js";
import { bytes, count, duration } from "./format.js";

const LABELS = 98, ROW = 28, BAR = 16, RIGHT = 66, TOP = 10;
const MIN_WIDTH = 280, MAX_WIDTH = 900;
// Room for one label of the axis, in pixels.
const TICK = 62;
// Shorter phases print as 0.0 ms: they leave no mark.
const VISIBLE_S = 0.00005;
const PREFILL_ROW = 2;

// [name, start, end] in seconds since the request arrived. Their lengths add up to the wall time.
export function phasesOf(timings) {
  let start = 0;
  return [
    ["route", timings.route_s],
    ["queue", timings.prefill_queue_s],
    ["prefill", timings.prefill_s],
    ["transfer", timings.kv_exposed_s],
    ["decode queue", timings.decode_queue_s],
    ["decode", timings.decode_s],
  ].map(([name, length]) => {
    const phase = [name, start, start + (length ?? 0)];
    start = phase[2];
    return phase;
  });
}

// Round values from 0 to `end`, at most `most` of them: 1, 2 or 5 times a power of ten apart.
export function roundTicks(end, most) {
  const step = [1, 2, 5, 10].map((factor) => factor * 10 ** Math.floor(Math.log10(end / (most - 1))))
    .find((each) => end / each <= most - 1);
  return Array.from({ length: Math.floor(end / step + 1e-9) + 1 }, (_, idx) => idx * step);
}

// As wide as there is room: text keeps its size, and the durations stay in view.
export function drawWaterfall(timings, room) {
  const width = Math.max(MIN_WIDTH, Math.min(MAX_WIDTH, room));
  const phases = phasesOf(timings);
  const wall = Math.max(phases.at(-1)[2], 1e-9);
  const x = (seconds) => LABELS + (Math.min(seconds, wall) / wall) * (width - LABELS - RIGHT);
  const height = TOP + phases.length * ROW + 34;
  return svg(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, width, height, class: "waterfall", role: "img", "aria-label": inWords(phases, timings) },
    axis(wall, x, height, Math.max(3, Math.min(8, Math.floor((width - LABELS - RIGHT) / TICK)))),
    phases.map(([name, start, end], row) => bar(name, start, end, row, x, width)),
    (timings.prefill_chunks ?? []).map((chunk, idx) => prefillChunk(chunk, idx, x)),
    (timings.kv_ticks ?? []).map((tick) => kvTick(tick, x)),
    firstToken(timings.time_to_first_token_s, x, height, width),
  );
}

// What the marks on the prefill row mean; nothing where there are none.
export function waterfallLegend({ prefill_chunks: chunks, kv_ticks: ticks }) {
  if (!chunks?.length && !ticks?.length) return null;
  return h("ul", { class: "legend", "aria-label": "Marks of the waterfall" },
    h("li", {}, h("span", { class: "swatch chunk-swatch" }), "prefill chunk"),
    ticks?.length ? h("li", {}, h("span", { class: "swatch tick-swatch" }), "KV of some layers in place") : null);
}

// The same marks as text, for touch and keyboard.
export function chunkTables({ prefill_chunks: chunks, kv_ticks: ticks }, isOpen) {
  if (!chunks?.length && !ticks?.length) return null;
  const parts = [
    ...(chunks ?? []).map(([start, end, tokens], idx) =>
      [duration(start), `prefill chunk ${idx + 1}`, `${count(tokens)} tokens in ${duration(end - start)}`]),
    ...(ticks ?? []).map(([at, first, last, tokens]) =>
      [duration(at), `KV of layers ${first} to ${last - 1}`, `${count(tokens)} tokens in place`]),
  ];
  return h("details", { open: isOpen, class: "marks" },
    h("summary", {}, `Marks: ${chunks?.length ?? 0} prefill chunks, ${ticks?.length ?? 0} KV chunks`),
    h("div", { class: "scroll" }, h("table", { class: "compact" },
      h("caption", { class: "hidden-label" }, "Prefill chunks and KV chunks of this request"),
      h("tbody", {}, parts.map((cells) => h("tr", {}, cells.map((text) => h("td", {}, text))))))));
}

function bar(name, start, end, row, x, width) {
  const y = TOP + row * ROW;
  const mark = svg("rect", { x: x(start), y, width: Math.max(1.5, x(end) - x(start)), height: BAR, rx: 2 },
    svg("title", {}, `${name}: ${duration(end - start)}`));
  return svg(
    "g",
    { class: `phase ${name.replace(" ", "-")}` },
    svg("text", { x: LABELS - 8, y: y + 12, "text-anchor": "end" }, name),
    end - start >= VISIBLE_S ? mark : null,
    svg("text", { x: width - RIGHT + 8, y: y + 12, class: "value" }, duration(end - start)),
  );
}

// Edges of chunks are gaps in the bar.
function prefillChunk([start, end, tokens], idx, x) {
  return svg(
    "rect",
    { x: x(start) + 1, y: TOP + PREFILL_ROW * ROW, width: Math.max(1.5, x(end) - x(start) - 2), height: BAR, rx: 2, class: "chunk" },
    svg("title", {}, `prefill chunk ${idx + 1}: ${tokens} tokens in ${duration(end - start)}`),
  );
}

// Ticks hang over the upper edge of the prefill row, so that the chunks' edges stay visible below them.
function kvTick([at, layerStart, layerEnd, tokens], x) {
  const y = TOP + PREFILL_ROW * ROW;
  return svg(
    "line",
    { x1: x(at), x2: x(at), y1: y - 6, y2: y + 5, class: "tick" },
    svg("title", {}, `KV of layers ${layerStart} to ${layerEnd - 1}, ${tokens} tokens, in place at ${duration(at)}`),
  );
}

function firstToken(at, x, height, width) {
  if (!at) return null;
  const isLate = x(at) > width - RIGHT - 110;
  return svg(
    "g",
    { class: "first-token" },
    svg("line", { x1: x(at), x2: x(at), y1: 2, y2: height - 24 }),
    svg("text", { x: x(at) + (isLate ? -4 : 4), y: height - 18, "text-anchor": isLate ? "end" : "start" },
      `first token ${duration(at)}`),
  );
}

function axis(wall, x, height, most) {
  const ticks = roundTicks(wall, most);
  const unit = wall >= 1 ? [1, "s"] : [1000, "ms"];
  const text = (seconds) => (seconds === 0 ? "0" : `${+(seconds * unit[0]).toPrecision(6)} ${unit[1]}`);
  return svg(
    "g",
    { class: "axis" },
    ticks.map((at) => svg("line", { x1: x(at), x2: x(at), y1: 2, y2: height - 14 })),
    ticks.map((at) => svg("text", { x: x(at), y: height - 2, "text-anchor": "middle" }, text(at))),
  );
}

function inWords(phases, timings) {
  const parts = phases.map(([name, start, end]) => `${name} ${duration(end - start)}`);
  return `${parts.join(", ")}; first token after ${duration(timings.time_to_first_token_s)}, `
    + `${timings.kv_chunks} KV chunks, ${bytes(timings.kv_bytes)}`;
}
