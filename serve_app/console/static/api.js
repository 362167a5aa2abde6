// Requests to this server. The API key is in this variable and nowhere else.

let key = "";
const base = new URL(".", location.href);
const notice = document.getElementById("notice");
const dialog = document.getElementById("key-dialog"), keyField = document.getElementById("key-field");
let asked = null;  // the promise of an answer to the form

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const url = (path) => new URL(path, base).href;
export const hasKey = () => key !== "";

export function tell(text) {
  if (notice.textContent !== text) notice.textContent = text;
}

// Asks for the key. Several requests that need one share a form. Resolves to whether a key was given.
export function askForKey(text) {
  asked ??= new Promise((resolve) => {
    document.getElementById("key-text").textContent = text ?? "This page keeps the key in memory only. A reload forgets the key.";
    keyField.value = "";
    dialog.returnValue = "";
    dialog.showModal();
    dialog.addEventListener("close", () => {
      asked = null;
      resolve(dialog.returnValue === "given");
    }, { once: true });
  });
  return asked;
}

document.getElementById("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = keyField.value.trim();
  dialog.close("given");
});
document.getElementById("key-cancel").addEventListener("click", () => dialog.close());
document.getElementById("key-button").addEventListener("click", () => askForKey());

// A response with status 200. Raises: ApiError with the server's own text.
export async function call(path, { body, signal } = {}) {
  for (;;) {
    const used = key;
    const headers = used ? { authorization: `Bearer ${used}` } : {};
    if (body !== undefined) headers["content-type"] = "application/json";
    let response;
    try {
      response = await fetch(url(path), { method: body === undefined ? "GET" : "POST", headers, body: body === undefined ? undefined : JSON.stringify(body), signal, cache: "no-store", credentials: "omit" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, "The server does not answer.");
    }
    if (response.ok) return response;
    if (response.status === 401) {
      if (used !== key) continue;
      if (await askForKey(used ? "The server does not accept this key. Enter another one." : "This server needs an API key. The page keeps the key in memory only.")) continue;
      throw new ApiError(401, "The server needs a valid API key. Use the button API key.");
    }
    throw new ApiError(response.status, await textOf(response));
  }
}

export const json = async (path, options) => (await call(path, options)).json();

async function textOf(response) {
  const text = await response.text();
  try {
    const { error, message } = JSON.parse(text);
    return (typeof error === "string" ? error : error?.message) ?? message ?? text;
  } catch {
    return text || `The server answered ${response.status}.`;
  }
}

// The events of a streamed answer, as parsed JSON.
export async function* events(path, options) {
  const reader = (await call(path, options)).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (data === "[DONE]") return;
      if (!data) continue;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.code ?? 500, event.error.message ?? String(event.error));
      yield event;
    }
  }
}
