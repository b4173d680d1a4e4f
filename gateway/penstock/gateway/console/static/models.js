// Models and devices: what is loaded where and why not, what holds the memory, what was loaded and unloaded, and orders about models.
import {Act, Ago, Failure, Table, age, duration, gib, html, times, usePoll} from "./parts.js";
import {useEffect, useState} from "./vendor/hooks.js";
import {Memory} from "./attempts.js";
import {SchemaField} from "./fields.js";
import {call, get, now, part} from "./api.js";

const POLL_MS = 2000, EVENTS_MS = 5000;
const ASKED_BEFORE = ["unload", "pause", "remove"];
const HOUR_MS = 3_600_000, WIDE = 1000, HIGH = 8;
const SHOWN_EVENTS = 50;
const words = (name) => name.replaceAll("_", " ");
const percent = (part) => `${Math.round(100 * part)} %`;
const place = ({worker_id, device}) => html`<bdi>${worker_id}</bdi>${device ? ` ${device}` : ""}`;
const TONES = {loaded: "good", failed: "bad", evicted: "warn"};

export function Models({tell}) {
  const [models, error] = usePoll("/v1/admin/models", POLL_MS);
  const [devices, no_devices] = usePoll("/v1/admin/devices", POLL_MS);
  const [events, no_events] = usePoll("/v1/admin/model-events?limit=1000", EVENTS_MS);
  return html`<section aria-labelledby="models"><h2 id="models">Models</h2><${Failure} error=${error} />
      ${models && html`<${Table} name="List of models" columns=${["model", "orders", "where", "memory", "requests"]}
        rows=${models.data.map((one) => cells(one, tell))} keys=${models.data.map((one) => JSON.stringify([one.id, one.pool]))}
        empty="There is none. The form below adds one; so does: penstock models add" />`}</section>
    <section aria-labelledby="devices"><h2 id="devices">Memory of devices</h2><${Failure} error=${no_devices} />
      ${devices && html`<div class="columns">${devices.data.map((one) => html`<${Device} one=${one} />`)}</div>
        ${!devices.data.length && html`<p class="faint">No worker reports a device. <code>penstock worker</code> starts one.</p>`}`}</section>
    <section aria-labelledby="events"><h2 id="events">Loads, unloads and evictions</h2><${Failure} error=${no_events} />
      ${events && html`<${Timeline} events=${events.data} models=${models?.data ?? []} /><${Events} events=${events.data} />`}</section>
    <${Add} tell=${tell} />`;
}

// -- what is loaded, and orders

function cells(one, tell) {
  const held = one.replicas.filter((replica) => replica.device);
  return [html`<strong><bdi>${one.id}</bdi></strong>${one.pool === null ? "" : html` in <bdi>${one.pool}</bdi>`}
      <div><${State} one=${one} /></div>
      <div class="faint">${one.engine}: ${one.tasks.map(words).join(", ")}${one.aliases.length ? html`; also <bdi>${one.aliases.join(", ")}</bdi>` : ""}</div>`,
    html`<${Orders} one=${one} tell=${tell} />`,
    held.length ? held.map((replica) => html`<div>${place(replica)}</div>`) : html`<span class="faint">nowhere</span>`,
    held.map((replica) => html`<div>${bytes(replica)}</div>`),
    `${sum(one.replicas, "running")} running, ${Math.max(0, ...one.replicas.map((replica) => replica.queued))} waiting`];
}

const sum = (list, name) => list.reduce((all, one) => all + one[name], 0);
const bytes = ({memory_bytes: measured, reserved_bytes: granted}) => [granted !== null && `${gib(granted)} granted`, measured !== null && `${gib(measured)} measured`].filter(Boolean).join(", ");

/** The state of a model, how far its load is, and why it is not loaded. */
function State({one}) {
  const {state, progress, reason, cause} = one;
  const tone = state === "ready" ? "good" : state === "failed" ? "bad" : "faint";
  return html`<span class=${tone}>${state === "absent" ? "not loaded" : words(state)}</span>${one.pinned ? ", pinned" : ""}${one.paused ? html`, <span class="warn">paused</span>` : ""}
    ${progress !== null && state !== "ready" && html`<label>${percent(progress)} <progress max="1" value=${progress}></progress></label>`}
    ${(reason || cause) && html`<div class=${state === "failed" ? "bad" : "faint"}>${[reason && words(reason), cause].filter(Boolean).join(": ")}</div>`}
    ${one.missing_on.length > 0 && html`<div class="faint">not served by <bdi>${one.missing_on.join(", ")}</bdi></div>`}
    ${one.waiting_workers.length > 0 && html`<div class="faint">the last order is not observed yet by <bdi>${one.waiting_workers.join(", ")}</bdi></div>`}`;
}

function Orders({one, tell}) {
  const path = `/v1/admin/models/${part(one.id)}`, pool = one.pool === null ? "" : `?pool=${part(one.pool)}`;
  const acts = [["ready", "draining", "loading"].includes(one.state) ? "unload" : "load", one.pinned ? "unpin" : "pin", one.paused ? "resume" : "pause"];
  const about = (act) => `${act} the model ${one.id}${one.pool === null ? "" : ` in the pool ${one.pool}`}`;
  const button = (act, method, to) => html`<${Act} label=${act} about=${about(act)} method=${method} path=${to} tell=${tell}
    confirm=${ASKED_BEFORE.includes(act) && `${about(act)}?`} /> `;
  return html`<span class="acts">${acts.map((act) => button(act, "POST", `${path}/${act}${pool}`))}${button("remove", "DELETE", path + pool)}</span>`;
}

// -- the memory of devices

function Device({one}) {
  const rows = (one.holders ?? []).map((holder) => [html`<bdi>${holder.model}</bdi>`, gib(holder.bytes), holder.measured_bytes === null ? "" : gib(holder.measured_bytes)]);
  return html`<div><div class="row"><strong>${place(one)}</strong><span class="figure">${gib(one.reserved_bytes)}</span><span class="faint">of ${gib(one.limit_bytes)} granted</span></div>
    <${Memory} of=${one} />
    <p class="faint">${gib(one.measured_bytes)} measured of engines${one.foreign_bytes === null ? "" : `, ${gib(one.foreign_bytes)} held by other processes`}</p>
    <${Table} name=${`Holders of ${one.device} on ${one.worker_id}`} columns=${["model", "granted", "measured"]} rows=${rows} empty="No model holds memory here." /></div>`;
}

// -- what happened

/**
 * When each model was loading and loaded on each worker, from `begin_ms` on: [name, [[kind, from, to], …]].
 * `events`: newest first. `there`: names of what is loading or loaded at the end.
 */
export function courses(events, there, begin_ms, end_ms) {
  const bars = new Map(), open = new Map();
  const add = (name, kind, from, to) => { if (to > begin_ms) bars.set(name, [...bars.get(name) ?? [], [kind, Math.max(from, begin_ms), to]]); };
  const close = (name, at, unknown = /** @type {string | null} */ (null)) => {
    const [kind, from] = open.get(name) ?? [unknown, begin_ms];
    open.delete(name);
    if (kind) add(name, kind, from, at);
  };
  for (const one of [...events].reverse()) {
    const name = course(one), at = Date.parse(one.at), ends = ["unloaded", "evicted"].includes(one.event);
    close(name, at, ends && !bars.has(name) ? "run" : null);
    if (one.event === "failed") add(name, "bad", at, at);
    else if (!ends) open.set(name, [one.event === "loading" ? "load" : "run", at]);
  }
  for (const [name, [, from]] of open) close(name, there.includes(name) ? end_ms : from);
  for (const name of there) if (!bars.has(name)) add(name, "run", begin_ms, end_ms);
  return [...bars].sort(([a], [b]) => a < b ? -1 : 1);
}

const course = ({model, worker_id, replica}) => `${model} on ${worker_id}${replica ? ` (${replica})` : ""}`;

function Timeline({events, models}) {
  const end = now(), begin = end - HOUR_MS;
  const there = models.flatMap((one) => one.replicas.filter((replica) => ["ready", "draining"].includes(replica.state) || replica.state === "loading" && replica.device).map((replica) => course({model: one.id, ...replica})));
  const rows = courses(events, there, begin, end);
  if (!rows.length) return null;
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Timeline of the last hour"><table class="course loads">
    <thead><tr><th scope="col">model</th><th scope="col" class="of-course">1 h ago to now</th></tr></thead>
    <tbody>${rows.map(([name, bars]) => html`<tr><th scope="row"><bdi>${name}</bdi></th><td><svg viewBox=${`0 0 ${WIDE} 12`} preserveAspectRatio="none" role="img" aria-label=${spoken(bars)}>
      ${bars.map(([kind, from, to]) => html`<rect class=${kind} x=${WIDE * (from - begin) / HOUR_MS} y="2" height=${HIGH} width=${Math.max(3, WIDE * (to - from) / HOUR_MS)} />`)}</svg></td></tr>`)}</tbody></table></div>`;
}

const SPOKEN = {load: "loading", run: "loaded", bad: "failed"};
const spoken = (bars) => bars.map(([kind, from, to]) => `${SPOKEN[kind]} ${duration(age(new Date(from).toISOString()))} ago for ${duration((to - from) / 1000)}`).join(", ");

function Events({events}) {
  const rows = events.slice(0, SHOWN_EVENTS).map((one) => [html`<${Ago} at=${one.at} />`, html`<span class=${TONES[one.event] ?? ""}>${one.event}</span>`, html`<bdi>${one.model}</bdi>`, place(one),
    [one.load_seconds !== null && `in ${duration(one.load_seconds)}`, one.reason && words(one.reason), one.cause].filter(Boolean).join(": ")]);
  return html`<${Table} name="List of loads and unloads" columns=${["when", "what", "model", "where", "why"]} rows=${rows}
      empty="None is known. Loads, unloads and evictions of all workers are shown here." />
    ${events.length > rows.length && html`<p class="faint">${times(events.length - rows.length, "older one")} not shown (<code>GET /v1/admin/model-events</code>)</p>`}`;
}

// -- one more model

const FIRST = ["id", "source", "engine"];

/** A form from the schema of a `[[models]]` table. The list above shows how far its download and its load are. */
function Add({tell}) {
  const [schemas, setSchemas] = useState(/** @type {any} */ (null));
  const [entry, setEntry] = useState(/** @type {any} */ ({})), [drawn, setDrawn] = useState(0);
  useEffect(() => { get("/openapi.json").then((found) => setSchemas(found.components.schemas), (error) => tell({error})); }, []);
  const of = schemas?.ModelEntry;
  const submit = async (event) => {
    event.preventDefault();
    try {
      await call("POST", "/v1/admin/models", entry);
      tell({text: `add ${entry.id}: requested`});
      setEntry({});
      setDrawn(drawn + 1);
    } catch (error) {
      tell({error});
    }
  };
  const field = (name) => html`<${SchemaField} key=${name + drawn} name=${name} schema=${FIRST.includes(name) ? {format: "name", ...of.properties[name]} : of.properties[name]} schemas=${schemas} required=${of.required.includes(name)}
    value=${entry[name]} onValue=${(value) => setEntry((before) => given({...before, [name]: value}))} />`;
  return html`<section aria-labelledby="add"><h2 id="add">Add a model</h2>
    ${of && html`<form onSubmit=${submit}>${FIRST.map(field)}<button>Add</button>
      <details class="whole"><summary>All fields of a model</summary><div class="fields">${Object.keys(of.properties).filter((name) => !FIRST.includes(name)).map(field)}</div></details></form>`}
    <p class="faint">The workers of its pool load it, now and when they start. It is no part of their file: remove takes it away again. The same by command: <code>penstock models add</code></p></section>`;
}

const given = (values) => Object.fromEntries(Object.entries(values).filter(([, value]) => value !== undefined));
