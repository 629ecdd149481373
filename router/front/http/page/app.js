// Joins the stream of snapshots to the parts of the page.

import { follow } from "./api.js";
import { startChat } from "./chat.js";
import { setText } from "./dom.js";
import { drawEvents } from "./events.js";
import { drawIndex } from "./index_view.js";
import { drawPools, forgetPools } from "./pools.js";
import { drawRequests, forgetRequests, startRequests } from "./requests.js";
import { drawTiles } from "./tiles.js";
import { drawTopology, startTopology } from "./topology.js";

const PARTS = [drawHead, drawTiles, drawTopology, drawPools, drawRequests, drawIndex, drawEvents];
let answeredBy = null;
let heardAt = 0;
let clock = 0;

function onSnapshot(snapshot) {
  const process = processOf(snapshot);
  if (answeredBy !== null && process !== answeredBy) {
    forgetPools();
    forgetRequests();
  }
  answeredBy = process;
  heardAt = Date.now();
  clearInterval(clock);
  setLost(false);
  PARTS.forEach((draw) => draw(snapshot));
}

// Which process answers: behind one address there may be another router since, or this one started anew.
function processOf({ router, routers }) {
  const own = routers.find((each) => each.router_id === router.router_id);
  return `${router.router_id} ${own?.pid}`;
}

function drawHead({ router }) {
  const pill = document.getElementById("readiness");
  setText(document.getElementById("model"), `${router.model} · ${router.max_model_len} tokens · ${router.version} · ${router.router_id}`);
  setText(pill, router.is_ready ? "ready" : `not ready: ${router.reasons.join("; ")}`);
  pill.className = router.is_ready ? "pill ready" : "pill unhealthy";
  setText(document.getElementById("connection"), "");
}

// What is on the page gets older from now on: it is grey, says its age, and nothing can be asked for.
function onLost(error) {
  document.getElementById("readiness").className = "pill unhealthy";
  setText(document.getElementById("readiness"), "no connection");
  setLost(true);
  clearInterval(clock);
  const sayAge = () => {
    const age = heardAt ? ` What is shown is ${Math.round((Date.now() - heardAt) / 1000)} s old.` : "";
    setText(document.getElementById("connection"), `${error.message}; trying again.${age}`);
  };
  clock = setInterval(sayAge, 1000);
  sayAge();
}

function setLost(isLost) {
  document.body.classList.toggle("lost", isLost);
  for (const part of document.querySelectorAll("#pools, #chat")) part.inert = isLost;
}

startChat();
startRequests();
startTopology();
follow(onSnapshot, onLost);
