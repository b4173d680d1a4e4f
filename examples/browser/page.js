"use strict";
let gateway, id;
const place = (name) => document.getElementById(name);
const begin = (text = "") => { place("answer").textContent = text; };
const show = (text) => { place("answer").textContent += text; };
const say = (state) => { place("state").textContent = state; };
let asked = 0; // the number of the newest question: an older one shows nothing more

// A call of this page's own server.
async function own(path, body = {}) {
  const answer = await fetch(path, {method: "POST", body: JSON.stringify(body)});
  if (!answer.ok) throw new Error(`${path}: ${answer.status} ${answer.statusText}`);
  return answer.json();
}

const newTicket = async () => (await own("/tickets/read", {request_id: id})).ticket;

async function byEvents(prompt) {
  const number = ++asked;
  begin();
  say("…");
  try {
    ({gateway, request_id: id} = await own("/questions", {prompt}));
    follow(await newTicket(), number);
  } catch (error) {
    say(error.message);
  }
}

// The browser reconnects by itself, with the last cursor, while the ticket is valid. At any answer but 200 it gives up.
function follow(ticket, number, after = "") {
  const events = new EventSource(`${gateway}/v1/requests/${id}/events?ticket=${ticket}&after=${after}`);
  const on = (type, act) => events.addEventListener(type, (event) => {
    if (number !== asked) return events.close();
    after = event.lastEventId;
    act(JSON.parse(event.data));
  });
  on("chunk", (frame) => show(frame.text));
  on("snapshot", (frame) => begin(frame.text));
  on("restarted", () => begin());
  on("result", (frame) => { events.close(); say(frame.status); });
  events.addEventListener("error", () => {
    if (events.readyState !== EventSource.CLOSED || number !== asked) return;
    say("no connection to the gateway: trying again (does auth.allowed_origins have this page's origin?)");
    setTimeout(again, 1000);
  });
  const again = () => newTicket().then((ticket) => follow(ticket, number, after), () => setTimeout(again, 1000));
}

// A socket's ticket is good once: each connection needs one. The idempotency key makes a repeated submit one request.
function bySocket(prompt) {
  const number = ++asked;
  begin();
  say("…");
  const idempotency_key = crypto.randomUUID();
  let request_id, after, done = false;
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
      if (frame.type === "chunk") show(frame.text);
      if (frame.type === "snapshot") begin(frame.text);
      if (frame.type === "restarted") begin();
      if (frame.type === "result" || frame.type === "error") {
        done = true;
        say(frame.status ?? frame.error.message);
        socket.close();
      }
    };
    socket.onclose = ({code, reason}) => {
      if (done || number !== asked) return;
      say(`closed (${code}): ${reason}`);
      if (code !== 4403) setTimeout(again, 1000); // the gateway refuses pages of this origin
    };
  }
  const again = () => connect().catch((error) => { say(error.message); if (number === asked) setTimeout(again, 1000); });
  again();
}
