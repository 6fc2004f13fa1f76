// The one place that talks to the server: adds the key, and turns what goes wrong into words.

import { events } from "./sse.js";

const KEY = "prolepsis-key";

/** What went wrong, in words for the user. `status` is 0 where the server was not reached. */
export class ApiError extends Error {
  constructor(message, status, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

export const key = () => sessionStorage.getItem(KEY) ?? "";

/** Keep the key until this tab is closed; an empty one is forgotten. */
export function setKey(value) {
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
}

/** A response that is fine; otherwise raises ApiError, or an AbortError where `signal` said so. */
export async function request(path, { method = "GET", body, signal } = {}) {
  const headers = {};
  if (key()) headers.Authorization = `Bearer ${key()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method, headers, signal, cache: "no-store", body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Is it still running?", 0);
  }
  if (!response.ok) throw await failure(response);
  return response;
}

export const json = async (path, options) => (await request(path, options)).json();

/** The JSON of each event of a stream. One that holds an `error` is raised. */
export async function* stream(path, options) {
  const response = await request(path, options);
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.message ?? "The server gave up on this answer.", 200);
    yield event;
  }
}

async function failure(response) {
  let detail = "";
  try {
    const told = await response.json();
    detail = told.error?.message ?? "";
  } catch {
    // a proxy in between may answer with something else than JSON
  }
  const retryAfter = Number(response.headers.get("Retry-After")) || null;
  return new ApiError(explain(response.status, detail, retryAfter), response.status, retryAfter);
}

function explain(status, detail, retryAfter) {
  const again = retryAfter ? `Try again in ${retryAfter} second${retryAfter === 1 ? "" : "s"}.` : "Try again soon.";
  if (status === 401) return key() ? "The server does not know this key." : "The server asks for an API key.";
  if (status === 413) return detail || "That is more text than the server takes at once.";
  if (status === 429) return `The server is busy. ${again}`;
  if (status === 503) return `The server is not ready${detail ? ` (${detail})` : ""}. ${again}`;
  return detail || `The server answered with status ${status}.`;
}
