// A smoke test for the whole cluster: one conversation, streamed.

import { askModel, eventsOf, problemOf } from "./api.js";
import { h } from "./dom.js";
import { duration } from "./format.js";
import { select } from "./requests.js";

const messages = [];
let running = null;

export function startChat() {
  const form = document.getElementById("chat"), message = document.getElementById("message");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running && message.value.trim()) ask(message.value.trim());
  });
  message.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  document.getElementById("stop").addEventListener("click", () => running?.abort());
}

async function ask(text) {
  const input = document.getElementById("message"), send = document.querySelector("#chat [type=submit]");
  input.value = "";
  messages.push({ role: "user", content: text });
  say("user", text);
  const answer = say("assistant", "");
  running = new AbortController();
  setBusy(send, true);
  const began = performance.now();
  try {
    const { content, id, firstAt } = await stream(answer, running.signal);
    messages.push({ role: "assistant", content });
    note(answer, id, (firstAt - began) / 1000, (performance.now() - began) / 1000);
  } catch (error) {
    messages.pop();
    answer.append(h("p", { class: "problem" }, error.name === "AbortError" ? "stopped" : error.message));
  } finally {
    running = null;
    setBusy(send, false);
    input.focus();
  }
}

async function stream(answer, signal) {
  const body = { messages, stream: true, max_tokens: document.getElementById("max-tokens").valueAsNumber || 64 };
  const reply = await askModel(body, signal);
  if (!reply.ok) throw new Error(await problemOf(reply));
  let content = "", thought = "", id = "", firstAt = performance.now();
  for await (const data of eventsOf(reply)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    id = chunk.id;
    const { content: piece = "", reasoning = "" } = chunk.choices[0]?.delta ?? {};
    if ((piece || reasoning) && !content && !thought) firstAt = performance.now();
    content += piece;
    thought += reasoning;
    answer.querySelector("p").textContent = thought && content ? `${thought}\n\n${content}` : thought + content;
    answer.parentElement.scrollTop = answer.parentElement.scrollHeight;
  }
  return { content, id, firstAt };
}

function say(role, text) {
  const bubble = h("div", { class: `bubble ${role}` }, h("span", { class: "muted" }, role), h("p", {}, text));
  const log = document.getElementById("transcript");
  log.append(bubble);
  log.scrollTop = log.scrollHeight;
  return bubble;
}

function note(answer, id, firstTokenS, totalS) {
  answer.append(h("p", { class: "muted" },
    `first token ${duration(firstTokenS)}, total ${duration(totalS)}, as seen here. `,
    h("button", { type: "button", class: "link", onclick: () => select(id) }, "Where the time went")));
}

function setBusy(send, isBusy) {
  send.disabled = isBusy;
  document.getElementById("stop").disabled = !isBusy;
}
