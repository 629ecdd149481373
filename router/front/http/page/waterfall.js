// Where a request's time went: its phases on one axis, prefill chunk by chunk, KV chunks as ticks where they arrived.

import { svg } from "./dom.js";
import { bytes, duration } from "./format.js";

const LABELS = 112, WIDTH = 760, ROW = 27, BAR = 15, RIGHT = 72;
const SPAN = WIDTH - LABELS - RIGHT;

// [name, start, end] in seconds since the request arrived. Their lengths add up to the wall time.
export function phasesOf(timings) {
  let start = 0;
  return [
    ["route", timings.route_s],
    ["prefill queue", timings.prefill_queue_s],
    ["prefill", timings.prefill_s],
    ["KV exposed", timings.kv_exposed_s],
    ["decode queue", timings.decode_queue_s],
    ["decode", timings.decode_s],
  ].map(([name, length]) => {
    const phase = [name, start, start + (length ?? 0)];
    start = phase[2];
    return phase;
  });
}

export function drawWaterfall(timings) {
  const phases = phasesOf(timings);
  const wall = Math.max(phases.at(-1)[2], 1e-9);
  const x = (seconds) => LABELS + (Math.min(seconds, wall) / wall) * SPAN;
  const height = phases.length * ROW + 34;
  return svg(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${height}`, class: "waterfall", role: "img", "aria-label": inWords(phases, timings) },
    axis(wall, x, height),
    phases.map(([name, start, end], row) => bar(name, start, end, row, x)),
    (timings.prefill_chunks ?? []).map((chunk, idx) => prefillChunk(chunk, idx, x)),
    (timings.kv_ticks ?? []).map((tick) => kvTick(tick, x)),
    firstToken(timings.time_to_first_token_s, x, height),
  );
}

function bar(name, start, end, row, x) {
  const y = 8 + row * ROW;
  return svg(
    "g",
    { class: `phase ${name.replace(" ", "-").toLowerCase()}` },
    svg("text", { x: LABELS - 8, y: y + 12, "text-anchor": "end" }, name),
    svg("rect", { x: x(start), y, width: Math.max(1.5, x(end) - x(start)), height: BAR, rx: 2 },
      svg("title", {}, `${name}: ${duration(end - start)}`)),
    svg("text", { x: WIDTH - RIGHT + 8, y: y + 12, class: "value" }, duration(end - start)),
  );
}

function prefillChunk([start, end, tokens], idx, x) {
  return svg(
    "rect",
    { x: x(start) + 0.5, y: 8 + 2 * ROW, width: Math.max(1.5, x(end) - x(start) - 1), height: BAR, rx: 2,
      class: idx % 2 ? "chunk odd" : "chunk" },
    svg("title", {}, `prefill chunk ${idx + 1}: ${tokens} tokens in ${duration(end - start)}`),
  );
}

// Ticks stand on the prefill row: those inside its bar cost nothing.
function kvTick([at, layerStart, layerEnd, tokens], x) {
  return svg(
    "line",
    { x1: x(at), x2: x(at), y1: 5 + 2 * ROW, y2: 11 + 2 * ROW + BAR, class: "tick" },
    svg("title", {}, `KV of layers ${layerStart} to ${layerEnd - 1}, ${tokens} tokens, in place at ${duration(at)}`),
  );
}

function firstToken(at, x, height) {
  if (!at) return null;
  const isLate = x(at) > WIDTH - RIGHT - 80;
  return svg(
    "g",
    { class: "first-token" },
    svg("line", { x1: x(at), x2: x(at), y1: 2, y2: height - 24 }),
    svg("text", { x: x(at) + (isLate ? -4 : 4), y: height - 16, "text-anchor": isLate ? "end" : "start" },
      `first token ${duration(at)}`),
  );
}

function axis(wall, x, height) {
  const ticks = [0, 0.25, 0.5, 0.75, 1];
  return svg(
    "g",
    { class: "axis" },
    ticks.map((share) => svg("line", { x1: x(wall * share), x2: x(wall * share), y1: 2, y2: height - 24 })),
    ticks.map((share) =>
      svg("text", { x: x(wall * share), y: height - 2, "text-anchor": "middle" }, duration(wall * share))),
  );
}

function inWords(phases, timings) {
  const parts = phases.map(([name, start, end]) => `${name} ${duration(end - start)}`);
  return `${parts.join(", ")}; first token after ${duration(timings.time_to_first_token_s)}, `
    + `${timings.kv_chunks} KV chunks, ${bytes(timings.kv_bytes)}`;
}
