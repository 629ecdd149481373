// The newest requests, and the whole story of one of them.

import { getRecord } from "./api.js";
import { h, keyed, setText, toast } from "./dom.js";
import { bytes, count, duration, percent } from "./format.js";
import { download, traceOf } from "./trace.js";
import { chunkTables, drawWaterfall, waterfallLegend } from "./waterfall.js";

const REFRESH_MS = 1000;
const LABELS = ["Status", "Prompt", "Cached", "Output", "First token", "Total", "Prefill → decode"];
let selected = null;
let shown = null;
let shownAt = 0;
let isUnderMouse = false;

export function drawRequests({ requests }) {
  const list = document.getElementById("requests");
  document.getElementById("no-requests").hidden = requests.length > 0;
  keyed(list, inPlace(list, requests), (request) => request.request_id, createRow, updateRow);
  const live = requests.find((request) => request.request_id === selected);
  if (live?.status === "running" && Date.now() - shownAt > REFRESH_MS) show(selected);
}

// While the pointer is over the rows they stay where they are: what is new waits, and the note counts it.
function inPlace(list, requests) {
  const note = document.getElementById("new-requests");
    const known = new Set([...list.children].map((row) => row.dataset.key));
  const stay = known.size > 0 && isUnderMouse ? requests.filter((request) => known.has(request.request_id)) : requests;
  const numNew = requests.length - stay.length;
  setText(note, numNew ? `${numNew} new, shown when the pointer leaves the list` : "");
  return stay;
}

export function startRequests() {
  const list = document.getElementById("requests");
  // A finger leaves no pointer behind on what it touched.
  list.addEventListener("pointerover", (event) => (isUnderMouse = event.pointerType === "mouse"));
  list.addEventListener("pointerleave", () => (isUnderMouse = false));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && selected !== null && !document.querySelector("dialog[open]")) close();
  });
  addEventListener("resize", () => shown && drawDetail(shown));
}

// Another router knows other requests.
export function forgetRequests() {
  if (selected !== null) close();
}

function createRow({ request_id: id }) {
  const open = h("button", { type: "button", class: "link", onclick: () => select(id) }, id);
  const cells = LABELS.map((label, idx) => h("td", { class: idx >= 1 && idx <= 5 ? "number" : null, "data-label": label }));
  return h("tr", { onclick: (event) => event.target === open || select(id) }, h("th", { scope: "row", title: id }, open), cells);
}

function updateRow(row, request) {
  const [, status, prompt, cached, output, first, total, workers] = row.children;
  const isRunning = request.status === "running";
  status.className = `status ${request.status}`;
  setText(status, request.error || request.status);
  setText(prompt, count(request.num_prompt_tokens));
  setText(cached, count(request.num_cached_tokens));
  setText(output, count(request.num_completion_tokens));
  setText(first, request.num_completion_tokens ? duration(request.time_to_first_token_s) : "–");
  setText(total, duration(isRunning ? request.age_s : request.wall_s));
  const prefill = request.is_local ? "local" : request.prefill_worker || "–";
  setText(workers, `${prefill} → ${request.decode_worker || "–"}${request.num_retries ? `, ${request.num_retries} ${request.num_retries === 1 ? "retry" : "retries"}` : ""}`);
  row.classList.toggle("selected", request.request_id === selected);
  row.querySelector("button").setAttribute("aria-pressed", String(request.request_id === selected));
}

export async function select(id) {
  selected = id;
  for (const row of document.getElementById("requests").children) {
    row.classList.toggle("selected", row.dataset.key === id);
  }
  await show(id);
  document.getElementById("detail").scrollIntoView({ block: "nearest" });
}

async function show(id) {
  shownAt = Date.now();
  try {
    const record = await getRecord(id);
    if (id !== selected) return;
    if (!record) toast("The router has forgotten this request.", true);
    else drawDetail(record);
  } catch (error) {
    toast(error.message, true);
  }
}

function drawDetail(record) {
  const panel = document.getElementById("detail");
  const openDecisions = panel.querySelector(".decisions")?.open ?? true;
  const openMarks = panel.querySelector(".marks")?.open ?? false;
  const hadFocus = panel.contains(document.activeElement) ? document.activeElement.textContent : null;
  panel.hidden = false;
  shown = record;
  const parts = [
    h("div", { class: "detail-head" },
      h("h3", {}, record.request_id),
      h("button", { type: "button", onclick: () => save(record) }, "Export trace"),
      h("button", { type: "button", onclick: close }, "Close")),
    record.message ? h("p", { class: "problem" }, record.message) : null,
    h("div", { class: "picture" }, drawWaterfall(record.timings, panel.clientWidth - 20)),
    waterfallLegend(record.timings),
    h("p", { class: "muted" }, summary(record)),
    chunkTables(record.timings, openMarks),
    decisions(record, openDecisions),
    attempts(record),
  ];
  panel.replaceChildren(...parts.filter(Boolean));
  [...panel.querySelectorAll("button, summary")].find((element) => element.textContent === hadFocus)?.focus();
}

function close() {
  const row = [...document.getElementById("requests").children].find((each) => each.dataset.key === selected);
  selected = shown = null;
  row?.classList.remove("selected");
  document.getElementById("detail").hidden = true;
  row?.querySelector("button").focus();
}

function save(record) {
  download(`${record.request_id}.trace.json`, traceOf(record));
  toast("Open the file in ui.perfetto.dev or chrome://tracing.");
}

function summary(record) {
  const { timings, num_prompt_tokens, num_cached_tokens, num_completion_tokens, finish_reasons } = record;
  const parts = [
    `total ${duration(timings.wall_s)}`,
    `${count(num_prompt_tokens)} prompt tokens (${count(num_cached_tokens)} cached)`,
    `${count(num_completion_tokens)} output tokens`,
  ];
  if (record.num_beams) parts.push(`best ${count(record.num_choices)} of ${count(record.num_beams)} beams`);
  if (record.num_returned < record.num_choices) parts.push(`best ${count(record.num_returned)} of ${count(record.num_choices)} choices`);
  if (record.adapter) parts.push(`adapter ${record.adapter}`);
  if (record.num_drafts) parts.push(`${count(record.num_accepted_drafts)} of ${count(record.num_drafts)} drafts accepted`);
  const reasons = finish_reasons.filter(Boolean);
  if (reasons.length) parts.push(`ended by ${[...new Set(reasons)].join(", ")}`);
  if (timings.kv_bytes) {
    const hidden = timings.kv_transfer_s > 0 ? 1 - Math.min(1, timings.kv_exposed_s / timings.kv_transfer_s) : 1;
    parts.push(`KV ${bytes(timings.kv_bytes)} in ${count(timings.kv_chunks)} chunks, ${duration(timings.kv_transfer_s)},`
      + ` ${percent(hidden)} hidden behind prefill`);
  } else parts.push("no KV was sent");
  return parts.join(" · ");
}

function decisions(record, isOpen) {
  const rows = record.decisions.flatMap((decision) =>
    decision.candidates.map((candidate) => candidateRow(decision, candidate)));
  return h("details", { open: isOpen, class: "decisions" },
    h("summary", {}, `Routing decisions: ${record.decisions.length}`),
    h("div", { class: "scroll" },
      h("table", { class: "compact" },
        h("caption", { class: "hidden-label" }, "Candidates of each routing decision"),
        h("thead", {}, h("tr", {}, ["When", "Role", "Worker", "Cost", "Load", "Cached", "Why"].map((text) =>
          h("th", { scope: "col" }, text)))),
        h("tbody", {}, rows))));
}

function candidateRow(decision, candidate) {
  const isChosen = candidate.worker_id === decision.chosen;
  const why = candidate.refusal || (isChosen ? `chosen: ${decision.why}` : "");
  const cells = [duration(decision.at_s), decision.role, candidate.worker_id, candidate.cost.toFixed(3),
    candidate.load.toFixed(3), count(candidate.num_cached_tokens), why];
  return h("tr", { class: isChosen ? "chosen" : null }, cells.map((text) => h("td", {}, text)));
}

// A worker without which of its lives it was.
const nameOf = (reference) => reference.split("#")[0];

function attempts(record) {
  if (record.attempts.length < 2 && !record.num_retries) return null;
  return h("ul", { class: "attempts" }, record.attempts.map((attempt) => h("li", {},
    `attempt ${attempt.attempt}: ${nameOf(attempt.prefill_worker) || "local"} → ${nameOf(attempt.decode_worker) || "–"}, `
    + `${attempt.phase}${attempt.end_reason ? ` (${attempt.end_reason})` : ""}`)));
}
