// Requests to the server that served this page, with the API key where it asks for one.

const STORE = "interlock-key";
let key = sessionStorage.getItem(STORE) || "";
let onKeyWanted = () => {};

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// ``callback(wasSent)`` shows the field for the key; ``wasSent``: a key was sent and is wrong.
export function whenKeyWanted(callback) { onKeyWanted = callback; }

// The server needs a key: ask for it unless there is one to try.
export function wantKey() {
  if (!key) onKeyWanted(false);
}

export function useKey(text) {
  key = text.trim();
  sessionStorage.setItem(STORE, key);
}

function headers(extra) {
  return key ? { ...extra, Authorization: `Bearer ${key}` } : { ...extra };
}

async function refuse(response) {
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message;
  } catch { /* the body is no error object: the status must do */ }
  if (response.status === 401) {
    const wasSent = Boolean(key);
    useKey("");
    onKeyWanted(wasSent);
  }
  throw new ApiError(response.status, message);
}

export async function get(path) {
  const response = await fetch(path, { headers: headers({}), cache: "no-store" });
  if (!response.ok) await refuse(response);
  return response.json();
}

// 503 has a body that says why, so it is an answer here.
export async function getState(path) {
  const response = await fetch(path, { cache: "no-store" });
  return response.json();
}

// Objects of the server-sent events of a streamed answer, as they come.
export async function* stream(path, body, signal) {
  const response = await fetch(path, {
    method: "POST", signal, headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(body),
  });
  if (!response.ok) await refuse(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const parsed = JSON.parse(data);
      if (parsed.error) throw new ApiError(0, parsed.error.message);
      yield parsed;
    }
  }
}
