// Workers, gateways, and the processes beside them: since when each is there, and what it lacks.
import {Memory} from "./attempts.js";
import {Ago, Failure, Table, count, gib, html, times, usePoll} from "./parts.js";

const POLL_MS = 2000;
const WORKERS = ["worker", "state", "last heard", "models", "devices", "partitions", "since", "runs on"];
const PROCESSES = ["process", "state", "last heard", "lag", "clients", "view", "since", "runs on"];
const NAMES = {webhooks: "webhook sender"};
const WELL = ["running", "ready"];
const CLIENTS = {http_requests: "HTTP request", streams: "stream", sockets: "socket"};

/** Whether a worker had stopped to report when the gateway gave these figures, at `at`: nobody becomes silent because the gateway is. */
export const isSilent = (one, stats, at) => one.state !== "stopped" && Date.parse(at) - Date.parse(one.updated_at) > 1000 * stats.worker_late_s;
/** The workers that serve and are not silent. */
export const live = (stats, at) => stats?.workers.filter((one) => one.state !== "stopped" && !isSilent(one, stats, at)) ?? [];

export function Workers() {
  const [stats, no_stats, , at] = usePoll("/v1/admin/stats", POLL_MS);
  const [gateways, no_gateways] = usePoll("/v1/admin/gateways", POLL_MS);
  return html`<section aria-labelledby="workers"><h2 id="workers">Workers</h2>
      <${Failure} error=${no_stats} />
      ${stats && html`<${Table} name="List of workers" columns=${WORKERS} rows=${stats.workers.map((one) => worker(one, isSilent(one, stats, at)))}
        keys=${stats.workers.map((one) => one.worker_id)}
        empty=${html`None. <code>penstock worker</code> starts one.`} />`}
      <p class="faint">A worker is silent when it has not reported for ${stats ? `${stats.worker_late_s} s` : "a while"}. A stopped one leaves this list after a
        minute, a silent one too, or after an hour while nobody has taken over its partitions.</p></section>
    <section aria-labelledby="gateways"><h2 id="gateways">Gateways and the processes beside them</h2>
      <${Failure} error=${no_gateways} />
      ${gateways && html`<${Table} name="List of gateways" columns=${PROCESSES} rows=${gateways.data.map(process)} keys=${gateways.data.map((one) => one.id)}
        empty=${html`None has reported. The log of a gateway that may not write its reports says <code>reports.refused</code>.`} />`}
      <p class="faint">Each reports every 2 s. One that stops in order leaves this list at once; one that is silent after a minute if another of
        its kind is alive, else after an hour.</p></section>`;
}

function worker(one, silent) {
  return [html`<bdi>${one.worker_id}</bdi><br /><span class="faint">${one.pool === null ? "common pool" : html`pool <bdi>${one.pool}</bdi>`}</span>`,
    html`<${State} of=${one} word=${silent ? "silent" : one.state} /><div class="faint">${silent ? "as last reported: " : ""}${times(one.running, "request")}${drains(one.state)}</div>`,
    html`<${Ago} at=${one.updated_at} />`,
    models(one), list(one.devices.map(device)),
    html`<${Partitions} one=${one} />`, html`<${Ago} at=${one.started_at} />`, html`<${Home} one=${one} />`];
}

/** What one that was told to stop still does. */
const drains = (state) => state === "stopping" ? " to end or hand back" : state === "draining" ? "lets its clients end or go to another" : "";

function process(one) {
  return [html`<bdi>${one.id}</bdi><br /><span class="faint">${one.kind}</span>`,
    html`<${State} of=${one} word=${one.alive ? one.status : "silent"} /><div class="faint">${drains(one.status)}</div>`, html`<${Ago} at=${one.reported_at} />`,
    list(Object.entries(one.lag).map(([topic, records]) => html`<bdi>${topic}</bdi> <span class="warn">${times(records, "record")} behind</span>`),
      one.kind === "gateway" ? "none" : ""),
    list([...Object.entries(CLIENTS).filter(([name]) => one[name] != null).map(([name, shown]) => times(one[name], shown)),
      one.oldest_waiting_at && html`oldest webhook <${Ago} at=${one.oldest_waiting_at} />`].filter(Boolean), ""),
    one.view_bytes === null ? "" : `${count(Math.ceil(one.view_bytes / 2 ** 20))} MiB`, html`<${Ago} at=${one.started_at} />`, html`<${Home} one=${one} />`];
}

function models({models: all}) {
  const absent = all.filter((one) => one.state === "absent").length;
  return list([...all.filter((one) => one.state !== "absent").map((one) => html`<bdi>${one.model}</bdi> <span class=${
    one.state === "failed" ? "bad" : one.state === "ready" ? "good" : "warn"}>${one.state}</span>`),
    absent && html`<span class="faint">${count(absent)} not loaded</span>`].filter(Boolean));
}

function device(one) {
  const limit_bytes = one.limit_bytes ?? one.total_bytes;
  return html`${one.device} ${gib(one.reserved_bytes)} of ${gib(limit_bytes)}<${Memory} of=${{...one, limit_bytes}} />`;
}

/** The state in a word, and what it lacks. Silent processes report nothing that still holds. */
function State({of, word}) {
  const lacks = [word !== "silent" && of.reason, of.paused?.length && `paused: ${of.paused.join(", ")}`].filter(Boolean);
  return html`<span class=${WELL.includes(word) ? "good" : word === "silent" ? "bad silent" : word === "unavailable" ? "bad" : "warn"}>${word}</span>
    ${lacks.map((one) => html`<div class="lacks"><bdi>${one}</bdi></div>`)}`;
}

/** How many it has, and of each how far it is. */
function Partitions({one}) {
  if (!one.assigned.length) return "none";
  const behind = Object.values(one.lag).reduce((sum, records) => sum + records, 0);
  return html`<details><summary>${count(one.assigned.length)}, ${behind ? `lag ${times(behind, "record")}` : "no lag"}</summary>
    ${list(one.assigned.map((place) => html`<bdi>${place}</bdi> <span class="faint">${place in one.committed ? `committed ${count(one.committed[place])}` : ""}${
      one.lag[place] ? `, lag ${times(one.lag[place], "record")}` : ""}</span>`))}</details>`;
}

function Home({one}) {
  return html`${one.host && html`<bdi>${one.host}</bdi>`}${one.pid ? ` pid ${one.pid}` : ""}
    <div class="faint">${one.version ? `Penstock ${one.version}` : "an earlier release"}${one.url && html`, <bdi>${one.url}</bdi>`}</div>`;
}

const list = (lines, empty = "none") => lines.length ? lines.map((line) => html`<div>${line}</div>`) : html`<span class="faint">${empty}</span>`;

/** "2 gateways · 3/3 workers · 1 bridge": how many of each kind are alive. */
export function Counts({processes, workers, live}) {
  const {gateway, ...beside} = processes ?? {};
  const shown = [gateway && alive(gateway, "gateway"), `${live.length}/${times(workers.length, "worker")}`,
    ...Object.entries(beside).map(([kind, one]) => alive(one, NAMES[kind] ?? kind))].filter(Boolean);
  return html`<a href="#/workers">${shown.join(" · ")}</a>`;
}

const alive = (one, name) => `${one.alive === one.known ? "" : `${one.alive}/`}${times(one.known, name)}`;
