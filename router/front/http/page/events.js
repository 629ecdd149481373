// What happened lately: as this router saw it, and what the autoscaler decided.

import { h, keyed, setText } from "./dom.js";

const MAX_EVENTS = 50;

export function drawEvents({ events, pools }) {
  const entries = [...events, ...decisions(pools)].sort((one, other) => one.age_s - other.age_s).slice(0, MAX_EVENTS);
  document.getElementById("no-events").hidden = entries.length > 0;
  keyed(document.getElementById("events"), entries, keyOf, create, update);
}

function decisions(pools) {
  return Object.entries(pools ?? {}).flatMap(([role, pool]) => (pool.autoscale?.changes ?? []).map((change, idx, all) => (
    { number: `${role}-${idx - all.length}`, age_s: change.age_s, kind: "autoscale",
      text: `${role} ${change.from} → ${change.to}: ${change.reason}` })));
}

// What was decided has no number of its own; with its place from the end, two equal decisions are told apart.
const keyOf = (entry) => `${entry.number} ${entry.kind} ${entry.text}`;

function create({ kind, text }) {
  return h("li", {}, h("span", { class: "age" }), h("span", { class: `kind ${kind}` }, kind), h("span", { class: "what" }, text));
}

function update(item, { age_s: age }) {
  setText(item.firstElementChild, ago(age));
}

function ago(seconds) {
  if (seconds < 60) return `${Math.round(seconds)} s ago`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min ago`;
  return `${(seconds / 3600).toFixed(1)} h ago`;
}
