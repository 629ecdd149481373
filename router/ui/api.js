// Everything this page asks of its router: JSON, one stream of snapshots, and the admin key for both.

const ADMIN = new URL("../admin/v1/", document.baseURI);
export const OPENAI = new URL("../v1/", document.baseURI);
const KEY = "pdserve-admin-key";
const SILENCE_MS = 10_000;

let asking = null;

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { "x-admin-key": key } : {};
}

// Ask for the key, once however many calls need it. Resolves when the user gave one.
function askForKey(wasWrong) {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key-dialog");
    const input = document.getElementById("key");
    document.getElementById("key-problem").textContent = wasWrong ? "That key was not accepted." : "";
    input.value = "";
    dialog.addEventListener(
      "close",
      () => {
        if (input.value) sessionStorage.setItem(KEY, input.value);
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

async function call(url, options = {}) {
  while (true) {
    const given = headers();
    const reply = await fetch(url, { ...options, headers: { ...options.headers, ...given }, cache: "no-store" });
    if (reply.status !== 401) return reply;
    const wasWrong = Boolean(given["x-admin-key"]) && given["x-admin-key"] === sessionStorage.getItem(KEY);
    if (wasWrong) sessionStorage.removeItem(KEY);
    if (!wasWrong && sessionStorage.getItem(KEY)) continue;
    await askForKey(wasWrong);
  }
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
      onLost(error);
    } finally {
      clearTimeout(timer);
      abort.abort();
    }
    await new Promise((resolve) => setTimeout(resolve, Math.min(5000, 250 * 2 ** attempt)));
  }
}
