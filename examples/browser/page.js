"use strict";
const place = (name) => document.getElementById(name);
const begin = (text = "") => { place("answer").textContent = text; };
const show = (text) => { place("answer").textContent += text; };
const say = (state) => { place("state").textContent = state; };
let asked = 0; // the number of the newest question: an older one shows nothing more

// A call of this page's own server.
async function own(path, body = {}) {
  const answer = await fetch(path, {method: "POST", body: JSON.stringify(body)});
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
  return found;
}

const newTicket = async (request_id) => (await own("/tickets/read", {request_id})).ticket;
// How long to wait before the next try: 1, 2, 4, then 8 seconds.
const pause = (tries) => 1000 * 2 ** Math.min(tries, 3);

function onFrame(frame) {
  if (frame.type === "chunk") show(frame.text);
  if (frame.type === "snapshot") begin(frame.text);
  if (frame.type === "restarted") begin();
  if (frame.type === "status") say(frame.detail ?? frame.waiting_for?.reason ?? frame.status);
  if (frame.type === "result" || frame.type === "error") say(frame.error?.message ?? frame.status);
}

async function byEvents(prompt) {
  const number = ++asked;
  begin();
  say("…");
  try {
    const question = await own("/questions", {prompt});
    follow(question, await newTicket(question.request_id), number);
  } catch (error) {
    if (number === asked) say(error.message);
  }
}

// The browser reconnects by itself, with the last cursor, while the ticket is valid. At any answer but 200 it gives up.
function follow(question, ticket, number, after = "", tries = 0) {
  const {gateway, request_id} = question;
  const events = new EventSource(`${gateway}/v1/requests/${request_id}/events?ticket=${ticket}&after=${after}`);
  for (const type of ["status", "chunk", "snapshot", "restarted", "result"]) events.addEventListener(type, (event) => {
    if (number !== asked) return events.close();
    after = event.lastEventId;
    tries = 0;
    if (type === "result") events.close();
    onFrame(JSON.parse(event.data));
  });
  events.addEventListener("error", () => {
    if (number !== asked) return events.close();
    say("the connection has ended: trying again" + (tries > 1 ? " (does auth.allowed_origins have this page's origin?)" : ""));
    if (events.readyState === EventSource.CLOSED) setTimeout(again, pause(tries++));
  });
  const again = () => newTicket(request_id).then((ticket) => follow(question, ticket, number, after, tries),
    () => number === asked && setTimeout(again, pause(tries++)));
}

// A socket's ticket is good once: each connection needs one. The idempotency key makes a repeated submit one request.
function bySocket(prompt) {
  const number = ++asked;
  begin();
  say("…");
  const idempotency_key = crypto.randomUUID();
  let request_id, after, done = false, tries = 0;
  async function connect() {
    const {gateway, ticket, user_id} = await own("/tickets/socket");
    const socket = new WebSocket(`${gateway.replace("http", "ws")}/v1/ws?ticket=${ticket}`, "penstock.v1");
    const payload = {messages: [{role: "user", content: prompt}], max_tokens: 100};
    const request = {task: "text_generation", stream: true, user_id, payload};
    socket.onopen = () => socket.send(JSON.stringify(
      request_id ? {type: "subscribe", request_id, after} : {type: "submit", idempotency_key, request}));
    socket.onmessage = ({data}) => {
      if (number !== asked) return socket.close();
      const frame = JSON.parse(data);
      request_id = frame.request_id ?? request_id;
      after = frame.cursor ?? after;
      tries = 0;
      done = frame.type === "result" || frame.type === "error";
      onFrame(frame);
      if (done) socket.close();
    };
    socket.onclose = ({code, reason}) => {
      if (done || number !== asked) return;
      say(`closed (${code}): ${reason}`);
      if (code !== 4403) setTimeout(again, pause(tries++)); // the gateway refuses pages of this origin
    };
  }
  const again = () => connect().catch((error) => {
    if (number !== asked) return;
    say(error.message);
    setTimeout(again, pause(tries++));
  });
  again();
}
