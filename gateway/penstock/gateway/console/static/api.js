// Calls of the gateway's public routes. The session is a cookie that this script cannot read.

/** An answer that is no success: its code and message, as docs/reference/errors.md has them. */
class ApiError extends Error {
  constructor(status, error) {
    super(error?.message ?? `HTTP ${status}`);
    this.status = status;
    this.code = error?.code ?? "unknown";
    this.details = error?.details ?? null;
  }
}

const GET_MS = 8000;
const CHANGE_MS = 30_000;
let ahead_ms = 0;
/** The time by the gateway's clock, which may differ from the browser's. */
export const now = () => Date.now() - ahead_ms;

/** Aborts after so many ms; Debian's TypeScript does not know it yet. */
const after = (ms) => /** @type {any} */ (AbortSignal).timeout(ms);

const MOST_KNOWN = 32;
/** The newest answers that have an entity tag, by path: the gateway says 304 while they are still right. Changes are asked for once. */
const known = new Map();

/** The JSON of an answer, which for a GET may be a second old: gateways make one for all pages. Throws ApiError, also with status 0 when the gateway does not answer in time. */
export async function call(method, path, body, headers = {}) {
  const sent = body !== undefined && body !== null, bytes = body instanceof Blob;
  const before = known.get(path), shared = method === "GET" && {"cache-control": "max-age=2", ...before && {"if-none-match": before.etag}};
  /** @type {RequestInit} */
  const options = {method, headers: {...shared, ...sent && {"content-type": bytes ? body.type : "application/json"}, ...headers},
    body: bytes ? body : sent ? JSON.stringify(body) : undefined, signal: bytes ? undefined : after(method === "GET" ? GET_MS : CHANGE_MS),
    credentials: "same-origin", cache: "no-store"};
  let answer, text;
  try {
    answer = await fetch(path, options);
    text = await answer.text();
  } catch {
    throw new ApiError(0, {code: "unreachable", message: "the gateway does not answer"});
  }
  const date = answer.headers.get("date");
  if (date) ahead_ms = Date.now() - Date.parse(date);
  if (answer.status === 304) return before?.json;
  let json = null;
  try { json = text ? JSON.parse(text) : null; } catch { /* a proxy's page */ }
  if (!answer.ok) throw new ApiError(answer.status, json?.error);
  const etag = answer.headers.get("etag");
  if (method === "GET" && etag && !path.includes("changed_since=")) {
    known.delete(path);
    known.set(path, {etag, json});
    if (known.size > MOST_KNOWN) known.delete(known.keys().next().value);
  }
  return json;
}

export const get = (path) => call("GET", path);
const MOST_PAGES = 20;
/** A list from its first page on; `has_more` if it is longer than 20 pages. */
export async function getPages(path) {
  const data = [];
  let page = null;
  for (let read = 0; read < MOST_PAGES && page?.has_more !== false; read++) {
    page = await get(`${path}${page ? `&after=${part(page.last_id)}` : ""}`);
    data.push(...page.data);
  }
  return {data, has_more: page.has_more};
}
/** A part of a path or query, escaped. */
export const part = encodeURIComponent;

/** Log in: the key is sent once, and the gateway sets the session's cookie. Throws ApiError, also when the browser keeps no cookie. A key without `read` has a session too. */
export async function logIn(key) {
  await call("POST", "/v1/tickets", {use: "session"}, {authorization: `Bearer ${key}`});
  try {
    await get("/v1/stats");
  } catch (error) {
    if (error.status === 403) return;
    throw error.status !== 401 ? error : new ApiError(401, {code: "no_session",
      message: "the key is good, but the browser kept no session: allow cookies for this page, or open it by another address"});
  }
}
/** Log out: the gateway takes the cookie back. */
export const logOut = () => call("DELETE", "/v1/tickets/session");

const WAIT_S = 25;
/** Submit a request with a key that may not read, and wait a while for its outcome. `on` is told of it as by `follow`. */
export function submit(request, on) {
  let over = false;
  const tell = (frame) => over || on(frame);
  call("POST", `/v1/requests?wait=${WAIT_S}`, request).then((one) => tell(one.done ? {...one, type: "result"}
    : {type: "error", error: {code: "forbidden", message: "it goes on, and this key may not read what comes of it"}}), (error) => tell({type: "error", error}));
  return () => { over = true; };
}

const RETRY_MS = 1000;
const MOST_RETRY_MS = 8000;
const REFUSED = [4400, 4401, 4402, 4403];
const random = () => [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

/**
 * Submit a request over the resuming WebSocket and follow it, over any number of connections; or follow one that is `there`.
 * `on` is told every frame, and {type: "away"} when a connection has ended; a refused one is told as an error frame. Returns a function that ends it.
 */
export function follow(submit, on, there = undefined) {
  const idempotency_key = random();
  let request_id = there, after, socket, over = false, retry_ms = RETRY_MS;
  const connect = () => {
    socket = new WebSocket(`${location.origin.replace("http", "ws")}/v1/ws`, "penstock.v1");
    socket.onopen = () => socket.send(JSON.stringify(request_id === undefined
      ? {type: "submit", idempotency_key, request: submit} : {type: "subscribe", request_id, after}));
    socket.onmessage = ({data}) => {
      const frame = JSON.parse(data);
      retry_ms = RETRY_MS;
      request_id = frame.request_id ?? request_id;
      after = frame.cursor ?? after;
      over ||= frame.type === "result" || frame.type === "error";
      on(frame);
      if (over) socket.close();
    };
    socket.onclose = ({code, reason}) => {
      if (over) return;
      over = REFUSED.includes(code);
      if (over) return on({type: "error", error: {code, message: reason || "the gateway has closed the connection"}});
      on({type: "away", code, reason});
      setTimeout(() => over || connect(), retry_ms);
      retry_ms = Math.min(2 * retry_ms, MOST_RETRY_MS);
    };
  };
  connect();
  return () => { over = true; socket.close(); };
}
