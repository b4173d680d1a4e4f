// Calls of the gateway's public routes. The session is a cookie that this script cannot read.

/** An answer that is no success: its code and message, as docs/reference/errors.md has them. */
export class ApiError extends Error {
  constructor(status, error) {
    super(error?.message ?? `HTTP ${status}`);
    this.status = status;
    this.code = error?.code ?? "unknown";
  }
}

/** The JSON of an answer. Throws ApiError, also with status 0 when the gateway does not answer. */
export async function call(method, path, body, headers = {}) {
  const options = {method, headers: {...headers}, credentials: "same-origin", cache: "no-store"};
  if (body !== undefined && body !== null) {
    options.body = JSON.stringify(body);
    options.headers["content-type"] = "application/json";
  }
  let answer;
  try {
    answer = await fetch(path, options);
  } catch {
    throw new ApiError(0, {code: "unreachable", message: "the gateway does not answer"});
  }
  const text = await answer.text();
  let json = null;
  try { json = text ? JSON.parse(text) : null; } catch { /* a proxy's page */ }
  if (!answer.ok) throw new ApiError(answer.status, json?.error);
  return json;
}

export const get = (path) => call("GET", path);
/** A part of a path or query, escaped. */
export const part = encodeURIComponent;

/** Log in: the key is sent once, and the gateway sets the session's cookie. Throws ApiError. */
export const logIn = (key) => call("POST", "/v1/tickets", {use: "session"}, {authorization: `Bearer ${key}`});
/** Log out: the gateway takes the cookie back. */
export const logOut = () => call("DELETE", "/v1/tickets/session");

const SOCKET_RETRY_MS = 1000;

/**
 * Submit a request over the resuming WebSocket and follow it, over any number of connections.
 * `on` is told every frame, and {type: "away"} when a connection has ended. Returns a function that ends it.
 */
export function follow(submit, on) {
  const idempotency_key = crypto.randomUUID();
  let request_id, after, socket, over = false;
  const connect = () => {
    socket = new WebSocket(`${location.origin.replace("http", "ws")}/v1/ws`, "penstock.v1");
    socket.onopen = () => socket.send(JSON.stringify(request_id === undefined
      ? {type: "submit", idempotency_key, request: submit} : {type: "subscribe", request_id, after}));
    socket.onmessage = ({data}) => {
      const frame = JSON.parse(data);
      request_id = frame.request_id ?? request_id;
      after = frame.cursor ?? after;
      over ||= frame.type === "result" || frame.type === "error";
      on(frame);
      if (over) socket.close();
    };
    socket.onclose = ({code, reason}) => {
      if (over) return;
      on({type: "away", code, reason});
      if (code < 4400 || code > 4403) setTimeout(() => over || connect(), SOCKET_RETRY_MS);
    };
  };
  connect();
  return () => { over = true; socket.close(); };
}
