// Asks the server that sent the page: its key, its errors, and its streams of events.

import { ofTab } from "./texts.js";

const KEY = "moegraph.key";
const UNREACHABLE = "The server cannot be reached.";

export class ServerError extends Error {
  // status: of HTTP; 0 if no answer came.
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Asks the user for a key. Takes whether one was refused; returns it, or null.
let askForKey = async () => null;
let asking = null;

export function onKeyNeeded(ask) {
  askForKey = ask;
}

// Returns the response to a GET, or to a POST of a body. quiet: the user is not asked for a key.
export async function ask(path, { body, signal, quiet = false } = {}) {
  for (;;) {
    const used = ofTab.get(KEY);
    const response = await send(path, body, signal, used);
    if (response.ok) return response;
    if (response.status !== 401 || quiet || !(await findKey(used))) throw await failure(response);
  }
}

async function send(path, body, signal, key) {
  const headers = key === null ? {} : { Authorization: `Bearer ${key}` };
  const given = { headers, signal, cache: "no-store", credentials: "omit" };
  if (body !== undefined) {
    headers["Content-Type"] = "application/json";
    Object.assign(given, { method: "POST", body: JSON.stringify(body) });
  }
  try {
    return await fetch(path, given);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, UNREACHABLE);
  }
}

// Returns whether there is another key to try. Requests that fail together share one question.
async function findKey(used) {
  if (ofTab.get(KEY) !== used) return true;
  asking ??= askForKey(used !== null).finally(() => {
    asking = null;
  });
  const key = await asking;
  if (key !== null) ofTab.set(KEY, key);
  return key !== null;
}

async function failure(response) {
  const text = await response.text();
  let message = `The server answered with status ${response.status}.`;
  try {
    message = JSON.parse(text).error.message;
  } catch {
    // not from this server, perhaps from a proxy before it
  }
  const after = response.headers.get("Retry-After");
  if (after !== null && response.status === 429) message += ` (try again in ${after} s)`;
  return new ServerError(response.status, message);
}

// Yields the values of a stream's data lines, up to [DONE].
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new ServerError(0, "The connection was lost before the answer was complete.");
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line === "data: [DONE]") return;
        if (line.startsWith("data: ")) yield parsed(line.slice(6));
      }
    }
  } catch (error) {
    if (error instanceof ServerError || error.name === "AbortError") throw error;
    throw new ServerError(0, "The connection was lost before the answer was complete.");
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parsed(text) {
  const value = JSON.parse(text);
  if (value.error) throw new ServerError(500, value.error.message);
  return value;
}
