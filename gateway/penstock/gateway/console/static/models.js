// Models and devices: what is loaded where and why not, what holds the memory, what was loaded and unloaded, and orders about models.
import {Act, Ago, Failure, Table, age, duration, gib, html, times, usePoll, words} from "./parts.js";
import {useState} from "./vendor/hooks.js";
import {Memory} from "./attempts.js";
import {SchemaField} from "./fields.js";
import {call, now, part} from "./api.js";
import {live} from "./workers.js";

const POLL_MS = 2000, EVENTS_MS = 5000;
/** What is asked before. */
const CONFIRMED = {unload: "", pause: "", remove: " Requests that wait for it fail; those that run end as usual, then it is unloaded. A model of the configuration stays away until it is added again."};
/** States in which a replica has memory, or is getting it. */
const HELD = ["loading", "ready", "draining"];
const HOUR_MS = 3_600_000, WIDE = 1000, HIGH = 8;
const SHOWN_EVENTS = 50;
const percent = (part) => `${Math.round(100 * part)} %`;
const place = ({worker_id, device}) => html`<bdi>${worker_id}</bdi>${device ? ` ${device}` : ""}`;
const TONES = {loaded: "good", failed: "bad", evicted: "warn"};

export function Models({tell}) {
  const [models, error] = usePoll("/v1/admin/models", POLL_MS);
  const [devices, no_devices] = usePoll("/v1/admin/devices", POLL_MS);
  const [stats, no_stats, , at] = usePoll("/v1/admin/stats", POLL_MS);
  const [events, no_events] = usePoll("/v1/admin/model-events?limit=1000", EVENTS_MS);
  const serving = live(stats, at).map((one) => one.worker_id), shown = devices?.data.filter((one) => serving.includes(one.worker_id));
  return html`<section aria-labelledby="models"><h2 id="models">Models</h2><${Failure} error=${error} />
      ${models && html`<${Table} name="List of models" columns=${["model", "orders", "where", "requests"]}
        rows=${models.data.map((one) => cells(one, tell))} keys=${models.data.map((one) => JSON.stringify([one.id, one.pool]))}
        empty="There is none. The form below adds one; so does: penstock models add" />`}</section>
    <section aria-labelledby="devices"><h2 id="devices">Memory of devices</h2><${Failure} error=${no_devices ?? no_stats} />
      ${stats && shown && html`<div class="columns">${shown.map((one) => html`<${Device} key=${one.worker_id + one.device} one=${one} />`)}</div>
        ${!shown.length && html`<p class="faint">No live worker reports a device. <code>penstock worker</code> starts one.</p>`}`}</section>
    <section aria-labelledby="events"><h2 id="events">Loads, unloads and evictions</h2><${Failure} error=${no_events} />
      ${events && stats && html`<${Timeline} events=${events.data} held=${held(stats, serving)} /><${Events} events=${events.data} />`}</section>
    <${Add} tell=${tell} />`;
}

// -- what is loaded, and orders

function cells(one, tell) {
  const there = one.replicas.filter(({device, state, reason, cause}) => device || reason || cause || state !== "absent");
  return [html`<strong><bdi>${one.id}</bdi></strong>${one.pool === null ? "" : html` in <bdi>${one.pool}</bdi>`}
      <div><${State} one=${one} /></div>
      <div class="faint">${one.engine}: ${one.tasks.map(words).join(", ")}${one.aliases.length ? html`; also <bdi>${one.aliases.join(", ")}</bdi>` : ""}</div>`,
    html`<${Orders} one=${one} tell=${tell} all=${true} />`,
    there.length ? there.map((replica) => html`<${Replica} one=${replica} />`) : html`<span class="faint">nowhere</span>`, load(one.replicas)];
}

/** A replica on a worker: its state, memory, and why it is not loaded. */
function Replica({one}) {
  const memory = bytes(one);
  return html`<div>${place(one)}${one.replica ? ` (${one.replica})` : ""}: <${StateOf} state=${one.state} />${memory && `, ${memory}`}<${Why} of=${one} /></div>`;
}

function StateOf({state}) {
  const tone = state === "ready" ? "good" : state === "failed" ? "bad" : "faint";
  return html`<span class=${tone}>${state === "absent" ? "not loaded" : words(state)}</span>`;
}

function Why({of: {state, reason, cause}}) {
  if (!reason && !cause) return null;
  return html`<div class=${state === "failed" ? "bad" : "faint"}><bdi>${[reason && words(reason), cause].filter(Boolean).join(": ")}</bdi></div>`;
}

const sum = (numbers) => numbers.reduce((all, one) => all + one, 0);
/** How many requests run and wait. A worker reports one number of those that wait with each of its replicas. */
export const load = (replicas) => `${sum(replicas.map((one) => one.running))} running, ${
  sum(Object.values(Object.fromEntries(replicas.map((one) => [one.worker_id, one.queued]))))} waiting`;
const bytes = ({memory_bytes: measured, reserved_bytes: reserved, peak_bytes: peak}) => Object.entries({reserved, measured, "at most": peak})
  .filter(([, of]) => typeof of === "number").map(([name, of]) => `${gib(of)} ${name}`).join(", ");

/** The state of a model, how far its load is, and why it is not loaded. */
function State({one}) {
  const {state, progress} = one;
  return html`<${StateOf} state=${state} />${one.pinned ? ", pinned" : ""}${one.paused ? html`, <span class="warn">paused</span>` : ""}
    ${progress !== null && state !== "ready" && html`<label>${percent(progress)} <progress max="1" value=${progress}></progress></label>`}
    ${!one.replicas.some(({reason, cause}) => reason || cause) && html`<${Why} of=${one} />`}
    ${one.missing_on.length > 0 && html`<div class="faint">not served by <bdi>${one.missing_on.join(", ")}</bdi></div>`}
    ${one.waiting_workers.length > 0 && html`<div class="faint">the last order is not observed yet by <bdi>${one.waiting_workers.join(", ")}</bdi></div>`}`;
}

/** What can be ordered of a model: a pinned one is not unloaded, and what is unknown is not changed. `all`: also what is rarely wanted. */
export function acts({replicas, pinned, paused}, all) {
  const is_held = replicas.some((one) => HELD.includes(one.state));
  return {load: is_held ? !pinned && "unload" : "load", pin: all && (pinned ? "unpin" : "pin"),
    pause: paused !== null && (paused ? "resume" : "pause"), remove: all && "remove"};
}

export function Orders({one, tell, all = false}) {
  const path = `/v1/admin/models/${part(one.id)}`, pool = one.pool === null ? "" : `?pool=${part(one.pool)}`;
  const about = (act) => `${act} the model ${one.id}${one.pool === null ? "" : ` in the pool ${one.pool}`}`;
  return html`<span class="acts">${Object.entries(acts(one, all)).filter(([, act]) => act).map(([slot, act]) => html`<${Act} key=${slot} label=${act} about=${about(act)}
    method=${act === "remove" ? "DELETE" : "POST"} path=${`${path}${act === "remove" ? "" : `/${act}`}${pool}`} danger=${act === "remove"} tell=${tell}
    confirm=${act in CONFIRMED && `${about(act)}?${CONFIRMED[act]}`} />`)}</span>`;
}

// -- the memory of devices

function Device({one}) {
  const rows = (one.holders ?? []).map((holder) => [html`<bdi>${holder.model}</bdi>`, gib(holder.bytes), holder.measured_bytes === null ? "" : gib(holder.measured_bytes)]);
  return html`<div><div class="row"><strong>${place(one)}</strong><span class="figure">${gib(one.reserved_bytes)}</span><span class="faint">of ${gib(one.limit_bytes)} reserved</span></div>
    <${Memory} of=${one} />
    <p class="faint">${gib(one.measured_bytes)} measured of engines${one.foreign_bytes === null ? "" : `, ${gib(one.foreign_bytes)} held by other processes`}</p>
    <${Table} name=${`Holders of ${one.device} on ${one.worker_id}`} columns=${["model", "reserved", "measured"]} rows=${rows} empty="No model holds memory here." /></div>`;
}

// -- what happened

/**
 * When each model was loading and loaded on each worker, from `begin_ms` on: [name, [[kind, from, to], …]].
 * `events`: newest first. `there`: what is loading or loaded by the last report of its worker, and when that was.
 * `before`: loaded, since before what is known. A worker that has gone is known until its last event.
 */
export function courses(events, there, begin_ms, end_ms) {
  const bars = new Map(), open = new Map(), heard = new Map(), seen = new Set();
  const add = (name, kind, from, to) => { if (to > begin_ms) bars.set(name, [...bars.get(name) ?? [], [kind, Math.max(from, begin_ms), Math.min(to, end_ms)]]); };
  const close = (name, at, unknown = /** @type {string | null} */ (null)) => {
    const {kind = unknown, from = begin_ms} = open.get(name) ?? {};
    open.delete(name);
    if (kind) add(name, kind, from, at);
  };
  for (const one of [...events].reverse()) {
    const name = course(one), at = Date.parse(one.at), ends = ["unloaded", "evicted"].includes(one.event);
    heard.set(one.worker_id, at);
    close(name, at, ends && !seen.has(name) ? "before" : null);
    seen.add(name);
    if (one.event === "failed") add(name, "bad", at, at);
    else if (!ends) open.set(name, {kind: one.event === "loading" ? "load" : "run", from: at, worker_id: one.worker_id});
  }
  for (const [name, {from, worker_id}] of [...open]) close(name, Math.max(from, there.get(name) ?? heard.get(worker_id)));
  for (const [name, until] of there) if (!seen.has(name)) add(name, "before", begin_ms, until);
  return [...bars].sort(([a], [b]) => a < b ? -1 : 1);
}

const course = ({model, worker_id, replica}) => `${model} on ${worker_id}${replica ? ` (${replica})` : ""}`;

/** The `there` of `courses`: what workers hold, those that serve until now, silent ones until their last report. */
function held({workers}, serving) {
  return new Map(workers.filter((one) => one.state !== "stopped").flatMap(({worker_id, updated_at, models}) =>
    models.filter((one) => HELD.includes(one.state) && (one.state !== "loading" || one.device))
      .map((one) => [course({...one, worker_id}), serving.includes(worker_id) ? now() : Date.parse(updated_at)])));
}

function Timeline({events, held: there}) {
  const end = now(), begin = end - HOUR_MS;
  const rows = courses(events, there, begin, end);
  if (!rows.length) return null;
  const pale = rows.some(([, bars]) => bars.some(([kind]) => kind === "before"));
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Timeline of the last hour"><table class="course loads">
    ${pale && html`<caption>Pale: loaded since before what is known</caption>`}
    <thead><tr><th scope="col">model</th><th scope="col" class="of-course">1 h ago to now</th></tr></thead>
    <tbody>${rows.map(([name, bars]) => html`<tr><th scope="row"><bdi>${name}</bdi></th><td title=${spoken(bars)}><svg viewBox=${`0 0 ${WIDE} 12`} preserveAspectRatio="none" role="img" aria-label=${spoken(bars)}>
      ${bars.map(([kind, from, to]) => html`<rect class=${kind} x=${WIDE * (from - begin) / HOUR_MS} y="2" height=${HIGH} width=${Math.max(3, WIDE * (to - from) / HOUR_MS)} />`)}</svg></td></tr>`)}</tbody></table></div>`;
}

const SPOKEN = {load: "loading", run: "loaded", bad: "failed"};
const ago = (ms) => `${duration(age(new Date(ms).toISOString()))} ago`;
const spoken = (bars) => bars.map(([kind, from, to]) => kind === "before" ? `loaded since before what is known, until ${ago(to)}`
  : `${SPOKEN[kind]} ${ago(from)} for ${duration((to - from) / 1000)}`).join(", ");

function Events({events}) {
  const rows = events.slice(0, SHOWN_EVENTS).map((one) => [html`<${Ago} at=${one.at} />`, html`<span class=${TONES[one.event] ?? ""}>${one.event}</span>`, html`<bdi>${one.model}</bdi>`, place(one),
    html`<bdi>${[one.load_seconds !== null && `in ${duration(one.load_seconds)}`, one.reason && words(one.reason), one.cause].filter(Boolean).join(": ")}</bdi>`]);
  return html`<${Table} name="List of loads and unloads" columns=${["when", "what", "model", "where", "why"]} rows=${rows}
      empty="None is known. Loads, unloads and evictions of all workers are shown here." />
    ${events.length > rows.length && html`<p class="faint">${times(events.length - rows.length, "older one")} not shown (<code>GET /v1/admin/model-events</code>)</p>`}`;
}

// -- one more model

const FIRST = ["id", "source", "engine"];

/** A form from the schema of a `[[models]]` table. The list above shows how far its download and its load are. */
function Add({tell}) {
  const [found, error] = usePoll("/openapi.json", EVENTS_MS, {once: true}), schemas = found?.components.schemas, of = schemas?.ModelEntry;
  const [entry, setEntry] = useState(/** @type {any} */ ({})), [busy, setBusy] = useState(false);
  const submit = async (event) => {
    event.preventDefault();
    if (busy) return;
    const form = event.target;
    setBusy(true);
    try {
      await call("POST", "/v1/admin/models", entry);
      tell({text: `add ${entry.id}: requested`});
      setEntry({});
      form.reset();
    } catch (failure) {
      tell({error: failure});
    }
    setBusy(false);
  };
  const field = (name) => html`<${SchemaField} key=${name} name=${name} schema=${FIRST.includes(name) ? {format: "name", ...of.properties[name]} : of.properties[name]} schemas=${schemas} required=${of.required.includes(name)}
    value=${entry[name]} onValue=${(value) => setEntry((before) => given({...before, [name]: value}))} />`;
  return html`<section aria-labelledby="add"><h2 id="add">Add a model</h2><${Failure} error=${error} />
    ${of && html`<form onSubmit=${submit}>${FIRST.map(field)}<button aria-disabled=${busy}>Add</button>
      <details class="whole"><summary>All fields of a model</summary><div class="fields">${Object.keys(of.properties).filter((name) => !FIRST.includes(name)).map(field)}</div></details></form>`}
    <p class="faint">The workers of its pool load it, now and when they start. It is no part of their file: remove takes it away again. The same by command: <code>penstock models add</code></p></section>`;
}

const given = (values) => Object.fromEntries(Object.entries(values).filter(([, value]) => value !== undefined));
