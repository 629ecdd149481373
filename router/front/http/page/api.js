// Everything this page asks of its router: JSON, one stream of snapshots, the chat, and the keys for them.

const ADMIN = new URL("../admin/v1/", document.baseURI);
const OPENAI = new URL("../v1/", document.baseURI);
const ADMIN_KEY = {
  name: "pdserve-admin-key",
  title: "Admin key",
  about: "This router asks for a key before it shows or changes anything.",
  headers: (key) => ({ "x-admin-key": key }),
};
const API_KEY = {
  name: "pdserve-api-key",
  title: "API key",
  about: "This router asks for a tenant's key before it answers.",
  headers: (key) => ({ authorization: `Bearer ${key}` }),
};
const SILENCE_MS = 10_000;

let asking = null;

// Ask for a key, once however many calls need it. Resolves when the user gave one.
function askForKey(kind, wasWrong) {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key-dialog");
    const input = document.getElementById("key");
    document.getElementById("key-problem").textContent = wasWrong ? "That key was not accepted." : "";
    document.getElementById("key-title").textContent = kind.title;
    document.getElementById("key-about").textContent = kind.about;
    input.value = "";
    dialog.addEventListener(
      "close",
      () => {
        if (input.value) sessionStorage.setItem(kind.name, input.value);
        input.value = "";
        asking = null;
        resolve();
      },
      { once: true },
    );
    dialog.showModal();
  });
  return asking;
}

async function call(url, options = {}, kind = ADMIN_KEY) {
  while (true) {
    const key = sessionStorage.getItem(kind.name);
    const headers = { ...options.headers, ...(key ? kind.headers(key) : {}) };
    const reply = await fetch(url, { ...options, headers, cache: "no-store" }).catch((error) => {
      throw options.signal?.aborted ? error : inWords(error);
    });
    if (reply.status !== 401) return reply;
    const wasWrong = Boolean(key) && key === sessionStorage.getItem(kind.name);
    if (wasWrong) sessionStorage.removeItem(kind.name);
    if (!wasWrong && sessionStorage.getItem(kind.name)) continue;
    await askForKey(kind, wasWrong);
  }
}

export function askModel(body, signal) {
  const options = { method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json" }, signal };
  return call(new URL("chat/completions", OPENAI), options, API_KEY);
}

export async function problemOf(reply) {
  try {
    return (await reply.json()).error.message;
  } catch {
    return `the router answered ${reply.status}`;
  }
}

export async function getRecord(requestId) {
  const reply = await call(new URL(`requests/${encodeURIComponent(requestId)}`, ADMIN));
  if (reply.status === 404) return null;
  if (!reply.ok) throw new Error(await problemOf(reply));
  return reply.json();
}

async function post(path, body) {
  const options = { method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json" } };
  const reply = await call(new URL(path, ADMIN), options);
  if (!reply.ok) throw new Error(await problemOf(reply));
}

export const scale = (role, replicas) => post(`pools/${role}`, { replicas });
export const drain = (workerId) => post(`workers/${encodeURIComponent(workerId)}/drain`, {});

// A browser's own texts ("Failed to fetch", "BodyStreamBuffer was aborted") say nothing to a person.
function inWords(error) {
  if (error.name === "AbortError") return new Error(`the router has been silent for ${SILENCE_MS / 1000} s`);
  return error instanceof TypeError ? new Error("the router cannot be reached") : error;
}

// Data of server-sent events, as they come. `onBytes` is called for keep-alives too.
export async function* eventsOf(reply, onBytes = () => {}) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) return;
    onBytes();
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) if (event.startsWith("data: ")) yield event.slice(6);
  }
}

// Call `onSnapshot` with each snapshot, for ever; connect again when the stream ends or says nothing.
export async function follow(onSnapshot, onLost) {
  for (let attempt = 0; ; attempt += 1) {
    const abort = new AbortController();
    let timer = 0;
    const heard = () => {
      clearTimeout(timer);
      timer = setTimeout(() => abort.abort(), SILENCE_MS);
    };
    try {
      const reply = await call(new URL("events", ADMIN), { signal: abort.signal });
      if (!reply.ok) throw new Error(await problemOf(reply));
      heard();
      for await (const data of eventsOf(reply, heard)) {
        attempt = 0;
        const snapshot = JSON.parse(data);
        if (snapshot.error) throw new Error(snapshot.error.message);
        onSnapshot(snapshot);
      }
      throw new Error("the router closed the stream");
    } catch (error) {
      onLost(inWords(error));
    } finally {
      clearTimeout(timer);
      abort.abort();
    }
    await new Promise((resolve) => setTimeout(resolve, Math.min(5000, 250 * 2 ** attempt)));
  }
}
