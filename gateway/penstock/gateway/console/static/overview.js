// The first screen: is it well, and if not, why.
import {Act, Ago, Failure, age, count, duration, gib, html, times, usePoll, words} from "./parts.js";
import {useState} from "./vendor/hooks.js";
import {Memory} from "./attempts.js";
import {part} from "./api.js";
import {Charts, RANGES, ended} from "./charts.js";
import {Orders, load} from "./models.js";
import {Tenants, Waiting} from "./waiting.js";
import {Counts, live as serving} from "./workers.js";

const POLL_MS = 2000, DEVICES_MS = 4000;

export function Overview({may, tell}) {
  const [problems, failed] = usePoll("/v1/admin/problems", POLL_MS);
  const [stats, no_stats, , at] = usePoll("/v1/admin/stats", POLL_MS);
  const [devices, no_devices] = usePoll("/v1/admin/devices", DEVICES_MS);
  const [range, choose] = useState("1 h"), {path, poll_ms} = RANGES[range];
  const [history, no_history] = usePoll(path, poll_ms);
  const workers = (stats?.workers ?? []).filter((one) => one.state !== "stopped");
  const live = serving(stats, at);
  return html`
    <${Problems} found=${problems} error=${failed} tell=${tell}
      counts=${stats && html`<${Counts} processes=${stats.processes} workers=${workers} live=${live} />`} />
    <section aria-labelledby="pipeline"><h2 id="pipeline">Pipeline</h2>
      <${Failure} error=${no_stats ?? no_devices} />
      ${stats && html`<${Pipeline} stats=${stats} workers=${workers} live=${live} devices=${devices?.data ?? []}
        history=${history} range=${range} tell=${tell} />`}</section>
    <${Waiting} may=${may} /><${Tenants} />
    <${Charts} history=${history} error=${no_history} range=${range} choose=${choose} />
    ${stats && html`<${Models} workers=${live} models=${stats.models} tell=${tell} />`}`;
}

function Problems({found, error, tell, counts}) {
  const well = found?.data.length === 0;
  const [state, figures] = (error ? "The gateway does not answer" : found ? found.summary : "Asking…").split(/(:.*)/);
  return html`<section aria-label="State">
    <p class=${`summary ${error ? "warn" : well ? "good" : "bad"}`}><span role="status">${state}</span>${figures}</p>
    ${!error && counts}
    <${Failure} error=${error} />
    ${!error && found?.data.map((one) => html`<${Problem} key=${JSON.stringify([one.problem, one.subject, one.pool])} one=${one} tell=${tell} />`)}
  </section>`;
}

/** The page that lists what a problem is about. */
const LISTS = {
  dead_letters: (reason) => `#/dead-letters?reason=${part(reason)}`,
  dead_letters_unreadable: (reason) => `#/dead-letters?reason=${part(reason)}`,
  tenant_floods: (tenant) => `#/requests?tenant=${part(tenant)}`,
  tenant_near_limit: (tenant) => `#/requests?tenant=${part(tenant)}`,
};

function Problem({one, tell}) {
  const {label, command, call} = one.action;
  const pool = one.pool !== null && one.pool !== one.subject ? ` in the pool ${one.pool}` : "";
  const list = one.subject && (/_(silent|unwell)$/.test(one.problem) ? "#/workers" : LISTS[one.problem]?.(one.subject));
  return html`<article class="problem">
    <p><strong><code>${one.problem}</code> <bdi>${one.subject}${pool}</bdi></strong>
      <span class="faint"><${Ago} at=${one.since} /></span></p>
    <p>${one.cause}</p>
    <p class="faint">Affects: ${one.affects} ${list && html`<a href=${list}>see them</a>`}</p>
    <p class="row"><code>${command}</code>
      ${call && html`<${Act} label=${label} about=${`${label} ${one.subject ?? ""}${pool}`} path=${call.path}
        body=${call.body} tell=${tell} confirm=${label !== "resume" && `${label}: ${command}?`} />`}</p>
  </article>`;
}

function Pipeline({stats, workers, live, devices, history, range, tell}) {
  const pausing = (name) => new Set(live.filter((one) => one.paused.includes(`class/${name}`)).map((one) => one.pool));
  const reasons = {};
  for (const one of live)
    for (const [reason, number] of Object.entries(one.waiting)) reasons[reason] = (reasons[reason] ?? 0) + number;
  const why = Object.entries(reasons).sort((a, b) => b[1] - a[1]);
  return html`<div class="pipeline">
    <div><h3>Topics: ${stats.rates.accepted_per_s.toFixed(1)} requests/s</h3>
      ${Object.entries(stats.queues).map(([name, one]) => html`<${Queue} name=${name} one=${one}
        pools=${pausing(name)} tell=${tell} />`)}
      <p class="faint">${why.length ? `At the front waits: ${
        why.map(([reason, number]) => `${count(number)} ${words(reason)}`).join(", ")}` : "Nothing waits at the front"}</p>
    </div>
    <div><h3>Workers: ${live.length}</h3>
      ${workers.length ? workers.map((one) => html`<${Worker} key=${one.worker_id} one=${one} silent=${!live.includes(one)} />`)
        : html`<p class="faint">None. <code>penstock worker</code> starts one.</p>`}</div>
    <div><h3>Devices</h3>${devices.filter((one) => live.some((worker) => worker.worker_id === one.worker_id))
      .map((one) => html`<${Device} key=${one.worker_id + one.device} one=${one} />`)}</div>
    <div><h3>Results: ${stats.rates.ended_per_s.toFixed(1)} requests/s</h3>
      ${Object.entries(history ? ended(history) : {}).map(([name, number]) => html`<p class="row"><span>${words(name)}</span>
        <span class=${`figure ${name === "completed" ? "" : "warn"}`}>${count(number)}</span></p>`)}
      <p class="faint">${count(stats.inflight)} under way, ${times(stats.clients.connected, "client")} connected. Ended in the last ${range}</p></div>
  </div>`;
}

/** A class. `pools`: where it is paused; null is the common pool, whose state is shown first. */
function Queue({name, one, pools, tell}) {
  const paused = pools.has(null), word = paused ? "resume" : "pause", path = `/v1/admin/classes/${name}`;
  return html`<div class="row"><span>${name}</span>
    <span class=${`figure ${paused ? "bad" : ""}`}>${count(one.depth)}</span>
    <span class="faint">${one.depth ? `oldest ${duration(one.oldest_age_s)}` : "empty"}${paused ? ", paused" : ""}</span>
    <${Act} label=${word} about=${`${word} the class ${name}`} path=${`${path}/${word}`} tell=${tell}
      confirm=${!paused && `Pause the class ${name}?`} />
  </div>
  ${[...pools].filter((pool) => pool !== null).map((pool) => html`<p class="row" key=${pool}><span class="faint">paused in the pool <bdi>${pool}</bdi></span>
    <${Act} label="resume" about=${`resume the class ${name} in the pool ${pool}`} path=${`${path}/resume?pool=${part(pool)}`} tell=${tell} /></p>`)}`;
}

function Worker({one, silent}) {
  if (silent) return html`<div class="row"><bdi>${one.worker_id}</bdi> <span class="warn">silent for ${duration(age(one.updated_at))}</span></div>`;
  return html`<div class="row"><bdi>${one.worker_id}</bdi>
    <span class=${one.state === "running" ? "good" : "warn"}>${one.state}</span>
    <span>${one.running} running</span>
    <span class="faint">${times(one.assigned.length, "partition")}, heard <${Ago} at=${one.updated_at} /></span></div>`;
}

function Device({one}) {
  return html`<div><div class="row"><bdi>${one.worker_id}</bdi> ${one.device}
      <span class="figure">${gib(one.reserved_bytes)}</span><span class="faint">of ${gib(one.limit_bytes)}</span></div>
    <${Memory} of=${one} /></div>`;
}

/** One entry a model and pool, with its replicas on all live workers. */
function Models({workers, models, tell}) {
  const known = models.map(({model, pool, tasks}) => {
    const there = workers.filter((worker) => worker.pool === pool);
    const replicas = there.flatMap(({worker_id, models: all}) => all.filter((one) => one.model === model).map((one) => ({...one, worker_id})));
    return {id: model, pool, tasks, replicas, pinned: replicas.some((one) => one.pinned), paused: there.some((one) => one.paused.includes(`model/${model}`))};
  });
  return html`<section aria-labelledby="models"><h2 id="models"><a href="#/models">Models</a></h2><div class="columns">
    ${known.length ? known.map((one) => html`<${Model} key=${JSON.stringify([one.id, one.pool])} one=${one} tell=${tell} />`)
      : html`<p class="faint">No worker reports a model. <code>penstock models add</code> serves one.</p>`}</div></section>`;
}

function Model({one, tell}) {
  const states = [...new Set(one.replicas.map((replica) => replica.state))];
  const loading = one.replicas.find((replica) => replica.progress !== null && replica.state === "loading");
  const failed = one.replicas.find((replica) => replica.reason)?.reason;
  return html`<div><div class="row"><strong><bdi>${one.id}</bdi></strong>
      <span class=${states.includes("failed") ? "bad" : states.includes("ready") ? "good" : "faint"}>${
        states.join(", ").replace("absent", "not loaded") || "on no worker"}${loading ? ` ${Math.round(100 * loading.progress)} %` : ""}${one.pinned ? ", pinned" : ""}</span></div>
    <p class="faint">${one.pool === null ? "" : html`in <bdi>${one.pool}</bdi>, `}${one.tasks.map(words).join(", ")}</p>
    <div class="row"><span>${load(one.replicas)}${one.paused ? ", paused" : ""}</span><${Orders} one=${one} tell=${tell} /></div>
    ${failed && html`<p class="bad"><bdi>${words(failed)}</bdi></p>`}</div>`;
}
