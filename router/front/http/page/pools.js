// Both pools: their size, and per worker its queue and its KV blocks.

import { drain, scale } from "./api.js";
import { h, keyed, setText, toast } from "./dom.js";
import { count, percent } from "./format.js";
import { byRole } from "./topology.js";

const SILENT_S = 2; // a rank is heard of several times a second
const BLOCKS = ["used", "held", "cached", "free"];

export function drawPools({ state, pools, loading }) {
  const roles = ["prefill", "decode"].map((role) => ({
    role, workers: byRole(state.workers, role), plan: pools?.[role], loading: loading.filter((each) => each.role === role),
  }));
  keyed(document.getElementById("pools"), roles, ({ role }) => role, createPool, updatePool);
}

function createPool({ role, workers }) {
  const id = `size-${role}`;
  const input = h("input", { id, type: "number", min: 0, max: 1024, value: workers.length });
  const form = h(
    "form",
    { class: "pool-size", onsubmit: (event) => setSize(event, role, input) },
    h("label", { for: id }, "Workers"),
    input,
    h("button", { type: "submit", "aria-label": `Scale the ${role} pool` }, "Scale"),
  );
  return h(
    "div",
    { class: `pool ${role}` },
    h("div", { class: "pool-head" }, h("h3", {}, role), h("p", { class: "muted" }), form),
    h("p", { class: "plan" }),
    h("ul", { class: "workers" }),
    h("ul", { class: "loading" }),
  );
}

function updatePool(pool, { workers, plan, loading }) {
  const states = new Map();
  for (const worker of workers) states.set(worker.state, (states.get(worker.state) ?? 0) + 1);
  const waiting = workers.reduce((sum, worker) => sum + worker.waiting_uncached_tokens, 0);
  const parts = [...states].map(([state, number]) => `${number} ${state}`);
  if (waiting) parts.push(`${count(waiting)} tokens wait`);
  setText(pool.querySelector("p"), parts.join(", ") || "no worker");
  setText(pool.querySelector(".plan"), planned(plan));
  pool.querySelector(".plan").classList.toggle("problem", Boolean(plan?.retry_in_s));
  keyed(pool.querySelector(".workers"), workers, (worker) => worker.worker_id, createWorker, updateWorker);
  keyed(pool.querySelector(".loading"), loading, (worker) => worker.worker_id, createLoading, updateLoading);
}

// A worker that is not ready yet: what it does, and how much of that is done.
function createLoading({ worker_id: name }) {
  return h("li", {},
    h("div", { class: "worker-head" }, h("strong", {}, name), h("span", { class: "pill loading" }, "loading")),
    h("progress", { max: 1, "aria-label": `Loading of ${name}` }),
    h("p", { class: "muted" }));
}

function updateLoading(item, { phase, share, elapsed_s: elapsed }) {
  const [, bar, note] = item.children;
  if (share) bar.value = share;
  else bar.removeAttribute("value");
  setText(note, `${phase}${share ? `, ${percent(share)}` : ""}, for ${elapsed.toFixed(0)} s`);
}

// What the pool's controller wants, and why.
function planned(plan) {
  if (!plan) return "";
  const parts = [`${plan.desired} wanted`];
  if (plan.starting) parts.push(`${plan.starting} starting`);
  for (const change of plan.changing ?? []) parts.push(`${change.from_worker_id} takes this role as ${change.worker_id}`);
  if (plan.autoscale) parts.push(plan.autoscale.reason);
  if (plan.retry_in_s) parts.push(`next try in ${plan.retry_in_s.toFixed(0)} s after ${plan.num_crashes} crashes: ${plan.last_failure}`);
  return parts.join(" · ");
}

function createWorker(worker) {
  const name = worker.worker_id;
  return h(
    "li",
    {},
    h("div", { class: "worker-head" }, h("strong", {}, name), h("span", { class: "pill" }),
      h("button", { type: "button", "aria-label": `Drain ${name}`, onclick: () => askToDrain(name) }, "Drain")),
    h("div", { class: "bar", role: "img" }, BLOCKS.map((kind) => h("span", { class: kind }))),
    h("p", { class: "muted" }),
  );
}

function updateWorker(item, worker) {
  const [head, bar, note] = item.children;
  const pill = head.children[1];
  setText(pill, worker.state);
  pill.className = `pill ${worker.state}`;
  head.children[2].disabled = worker.state === "draining";
  const parts = BLOCKS.map((kind) => `${worker[`kv_blocks_${kind}`]} ${kind}`);
  bar.setAttribute("aria-label", `KV blocks of ${worker.worker_id}: ${parts.join(", ")}`);
  BLOCKS.forEach((kind, idx) => (bar.children[idx].style.flexGrow = worker[`kv_blocks_${kind}`]));
  setText(note, `${worker.running} running, ${worker.waiting} waiting · ${parts.join(", ")} of `
    + `${count(worker.kv_blocks_total)} KV blocks · ${worker.device || "cpu"}${ranks(worker)}`
    + (worker.num_preemptions ? ` · ${count(worker.num_preemptions)} preemptions` : ""));
}

// Its processes, if there are several: the pid of each, and for how long one that should be heard of is silent.
function ranks({ ranks: all }) {
  if (!(all?.length > 1)) return "";
  const each = all.map(({ pid, silent_s: silent }) => `${pid}${silent < SILENT_S ? "" : ` silent for ${silent.toFixed(0)} s`}`);
  return ` · ${all.length} ranks: ${each.join(", ")}`;
}

// Sizes that were typed for another router are not this one's.
export function forgetPools() {
  document.getElementById("pools").replaceChildren();
}

async function setSize(event, role, input) {
  event.preventDefault();
  await tell(() => scale(role, input.valueAsNumber), `The ${role} pool is going to ${input.value}.`);
}

async function askToDrain(workerId) {
  if (!confirm(`Drain ${workerId}? It finishes what it has and ends; its pool then replaces it.`)) return;
  await tell(() => drain(workerId), `${workerId} is draining.`);
}

async function tell(action, done) {
  try {
    await action();
    toast(done);
  } catch (error) {
    toast(error.message, true);
  }
}
