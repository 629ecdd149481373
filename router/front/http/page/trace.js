// One request as a Chrome trace, which Perfetto and chrome://tracing open.

import { phasesOf } from "./waterfall.js";

const PROCESS = 1;
const ROWS = { request: 1, prefill: 2, kv: 3 };

export function traceOf(record) {
  const timings = record.timings;
  const events = [
    name("process_name", 0, `request ${record.request_id}`),
    ...Object.entries({ request: "phases", prefill: "prefill chunks", kv: "KV in place" }).map(([row, text]) =>
      name("thread_name", ROWS[row], text)),
    ...phasesOf(timings).map(([phase, start, end]) => span(phase, ROWS.request, start, end, {})),
    ...(timings.prefill_chunks ?? []).map(([start, end, tokens], idx) =>
      span(`chunk ${idx + 1}`, ROWS.prefill, start, end, { tokens })),
    ...(timings.kv_ticks ?? []).map(([at, first, last, tokens]) =>
      instant(`layers ${first}-${last - 1}`, ROWS.kv, at, { tokens })),
    instant("first token", ROWS.request, timings.time_to_first_token_s, {}),
  ];
  return { traceEvents: events, displayTimeUnit: "ms", otherData: { request_id: record.request_id } };
}

const micros = (seconds) => Math.round(seconds * 1e9) / 1e3;

function name(kind, tid, text) {
  return { ph: "M", pid: PROCESS, tid, name: kind, args: { name: text } };
}

function span(text, tid, start, end, args) {
  return { ph: "X", pid: PROCESS, tid, name: text, ts: micros(start), dur: micros(end - start), args };
}

function instant(text, tid, at, args) {
  return { ph: "i", s: "t", pid: PROCESS, tid, name: text, ts: micros(at), args };
}

export function download(fileName, value) {
  const url = URL.createObjectURL(new Blob([JSON.stringify(value)], { type: "application/json" }));
  const link = Object.assign(document.createElement("a"), { href: url, download: fileName });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
