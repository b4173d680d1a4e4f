// Workers, gateways, and the processes beside them: since when each is there, and what it lacks.
import {Memory} from "./attempts.js";
import {Ago, Failure, Table, age, count, gib, html, times, usePoll} from "./parts.js";

const POLL_MS = 2000;
const WORKERS = ["worker", "state", "last heard", "models", "devices", "partitions", "since", "runs on"];
const PROCESSES = ["process", "state", "last heard", "lag", "clients", "view", "since", "runs on"];
const NAMES = {webhooks: "webhook sender"};
const WELL = ["running", "ready"];

export function Workers() {
  const [stats, no_stats] = usePoll("/v1/admin/stats", POLL_MS);
  const [gateways, no_gateways] = usePoll("/v1/admin/gateways", POLL_MS);
  const silent = (one) => one.state !== "stopped" && age(one.updated_at) > stats.worker_late_s;
  return html`<section aria-labelledby="workers"><h2 id="workers">Workers</h2>
      <${Failure} error=${no_stats} />
      ${stats && html`<${Table} name="List of workers" columns=${WORKERS} rows=${stats.workers.map((one) => worker(one, silent(one)))}
        empty=${html`None. <code>penstock worker</code> starts one.`} />`}
      <p class="faint">A worker is silent when it has not reported for ${stats ? `${stats.worker_late_s} s` : "a while"}. A stopped one leaves this list after a
        minute, a silent one too, or after an hour while nobody has taken over its partitions.</p></section>
    <section aria-labelledby="gateways"><h2 id="gateways">Gateways and the processes beside them</h2>
      <${Failure} error=${no_gateways} />
      ${gateways && html`<${Table} name="List of gateways" columns=${PROCESSES} rows=${gateways.data.map(process)}
        empty=${html`None has reported. The log of a gateway that may not write its reports says <code>reports.refused</code>.`} />`}
      <p class="faint">Each reports every 2 s. One that stops in order leaves this list at once; one that is silent after a minute if another of
        its kind is alive, else after an hour.</p></section>`;
}

function worker(one, silent) {
  return [html`<bdi>${one.worker_id}</bdi><br /><span class="faint">${one.pool === null ? "common pool" : html`pool <bdi>${one.pool}</bdi>`}</span>`,
    html`<${State} of=${one} word=${silent ? "silent" : one.state} /><div class="faint">${times(one.running, "request")}</div>`,
    html`<${Ago} at=${one.updated_at} />`,
    models(one), list(one.devices.map(device)),
    html`<${Partitions} one=${one} />`, html`<${Ago} at=${one.started_at} />`, html`<${Home} one=${one} />`];
}

function process(one) {
  return [html`<bdi>${one.id}</bdi><br /><span class="faint">${one.kind}</span>`,
    html`<${State} of=${one} word=${one.alive ? one.status : "silent"} />`, html`<${Ago} at=${one.reported_at} />`,
    list(Object.entries(one.lag).map(([topic, records]) => html`<bdi>${topic}</bdi> <span class="warn">${times(records, "record")} behind</span>`),
      one.kind === "gateway" ? "none" : ""),
    one.streams === null ? "" : list([times(one.http_requests, "request"), times(one.streams, "stream"), times(one.sockets, "socket")]),
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
  return html`<span class=${WELL.includes(word) ? "good" : word === "silent" || word === "unavailable" ? "bad" : "warn"}>${word}</span>
    ${lacks.map((one) => html`<div class="lacks"><bdi>${one}</bdi></div>`)}`;
}

/** How many it has, and of each how far it is. */
function Partitions({one}) {
  if (!one.assigned.length) return "none";
  const behind = Object.values(one.lag).reduce((sum, records) => sum + records, 0);
  return html`<details><summary>${count(one.assigned.length)}, ${behind ? `lag ${count(behind)}` : "no lag"}</summary>
    ${list(one.assigned.map((place) => html`<bdi>${place}</bdi> <span class="faint">${place in one.committed ? `committed ${count(one.committed[place])}` : ""}${
      one.lag[place] ? `, lag ${count(one.lag[place])}` : ""}</span>`))}</details>`;
}

function Home({one}) {
  return html`${one.host && html`<bdi>${one.host}</bdi>`}${one.pid ? ` pid ${one.pid}` : ""}
    <div class="faint">${one.version ? `Penstock ${one.version}` : "an earlier release"}${one.url && html`, <bdi>${one.url}</bdi>`}</div>`;
}

const list = (lines, empty = "none") => lines.length ? lines.map((line) => html`<div>${line}</div>`) : html`<span class="faint">${empty}</span>`;

/** "2 gateways · 3/3 workers · 1 bridge": how many of each kind are alive. */
export function Counts({processes, workers, live}) {
  const {gateway, ...beside} = processes;
  const shown = [gateway && alive(gateway, "gateway"), `${live.length}/${times(workers.length, "worker")}`,
    ...Object.entries(beside).map(([kind, one]) => alive(one, NAMES[kind] ?? kind))].filter(Boolean);
  return html`<p><a href="#/workers">${shown.join(" · ")}</a></p>`;
}

const alive = (one, name) => `${one.alive === one.known ? "" : `${one.alive}/`}${times(one.known, name)}`;
