// Joins the stream of snapshots to the parts of the page.

import { follow } from "./api.js";
import { startChat } from "./chat.js";
import { setText } from "./dom.js";
import { drawEvents } from "./events.js";
import { drawIndex } from "./index_view.js";
import { drawPools } from "./pools.js";
import { drawRequests } from "./requests.js";
import { drawTiles } from "./tiles.js";
import { drawTopology } from "./topology.js";

const PARTS = [drawHead, drawTiles, drawTopology, drawPools, drawRequests, drawIndex, drawEvents];

function drawHead({ router }) {
  const pill = document.getElementById("readiness");
  setText(document.getElementById("model"), `${router.model} · ${router.max_model_len} tokens · ${router.version} · ${router.router_id}`);
  setText(pill, router.is_ready ? "ready" : `not ready: ${router.reasons.join("; ")}`);
  pill.className = router.is_ready ? "pill ready" : "pill unhealthy";
  setText(document.getElementById("connection"), "");
}

function onLost(error) {
  document.getElementById("readiness").className = "pill unhealthy";
  setText(document.getElementById("readiness"), "no connection");
  setText(document.getElementById("connection"), `${error.message}; trying again`);
}

startChat();
follow((snapshot) => PARTS.forEach((draw) => draw(snapshot)), onLost);
