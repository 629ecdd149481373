// What each worker has in the prefix index: how many blocks, never which.

import { h, keyed, setText } from "./dom.js";
import { count, percent } from "./format.js";

export function drawIndex({ index, state }) {
  const rows = index ?? [];
  const blockSize = new Map(state.workers.map((worker) => [worker.worker_id, worker.block_size]));
  const note = document.getElementById("no-index");
  note.hidden = rows.length > 0;
  setText(note, index ? "No worker has any prefix in the index." : "The index cannot be read; requests are routed by load alone.");
  keyed(document.getElementById("index"), rows, (row) => row.worker_id, createRow, (element, row) =>
    updateRow(element, row, blockSize.get(row.worker_id)));
}

function createRow({ worker_id: name }) {
  const cells = Array.from({ length: 4 }, (_, idx) => h("td", { class: idx < 3 ? "number" : null }));
  return h("tr", {}, h("th", { scope: "row" }, name), cells);
}

function updateRow(row, stats, blockSize) {
  const [, blocks, tokens, only, shared] = row.children;
  setText(blocks, count(stats.num_blocks));
  setText(tokens, blockSize ? count(stats.num_blocks * blockSize) : count(null));
  setText(only, percent(stats.share_only_here));
  setText(shared, stats.most_shared_with ? `${stats.most_shared_with}, ${percent(stats.most_shared)}` : "–");
}
