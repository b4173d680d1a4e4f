// The first screen: is it well, and if not, why.
import {Act, Ago, Failure, age, count, duration, gib, html, rate, times, usePoll, words} from "./parts.js";
import {useState} from "./vendor/hooks.js";
import {Memory} from "./attempts.js";
import {part} from "./api.js";
import {Charts, RANGES, ended, last, newest, rates} from "./charts.js";
import {Orders, load} from "./models.js";
import {waitsFor} from "./requests.js";
import {Tenants, Waiting, listed, stuck} from "./waiting.js";
import {Counts, live as serving} from "./workers.js";

const POLL_MS = 3000;

export function Overview({tell}) {
  const [found, failed, , at] = usePoll("/v1/admin/overview", POLL_MS), {problems, stats, devices, waiting, tenants} = found ?? {};
  const [range, choose] = useState("1 h"), {path, poll_ms} = RANGES[range];
  const [history, no_history] = usePoll(path, poll_ms);
  const workers = (stats?.workers ?? []).filter((one) => one.state !== "stopped");
  const live = serving(stats, at);
  return html`
    <${Problems} found=${problems} error=${failed} tell=${tell}
      counts=${stats && html`<${Counts} processes=${stats.processes} workers=${workers} live=${live} />`} />
    <section aria-labelledby="pipeline"><h2 id="pipeline">Pipeline</h2>
      ${stats && html`<${Pipeline} stats=${stats} workers=${workers} live=${live} devices=${devices.data}
        history=${history} range=${range} waiting=${waiting} tell=${tell} />`}</section>
    <${Waiting} found=${waiting} all=${true} /><${Tenants} found=${tenants} />
    <${Charts} history=${history} error=${no_history} range=${range} choose=${choose} />
    ${stats && html`<${Models} workers=${live} models=${stats.models} tell=${tell} />`}`;
}

function Problems({found, error, tell, counts}) {
  const well = found?.data.length === 0;
  const [state, figures] = (error ? "The gateway does not answer" : found ? found.summary : "Asking…").split(/(:.*)/);
  return html`<section aria-label="State">
    <p class=${`summary ${error ? "warn" : well ? "good" : "bad"}`}><span role="status">${state}</span>${figures}</p>
    ${!error && found?.summary && html`<p><bdi>${location.host}</bdi>${found.data.every((one) => one.problem !== "not_judged") && Object.entries(NEEDED).map(([name, codes]) => found.data.some((one) => codes.includes(one.problem))
      ? html` · <span class="bad">${name} not ok</span>` : ` · ${name} ok`)}${counts && html` · ${counts}`}</p>`}
    <${Failure} error=${error} />
    ${!error && found?.data.map((one) => html`<${Problem} key=${JSON.stringify([one.problem, one.subject, one.pool])} one=${one} tell=${tell} />`)}
  </section>`;
}

/** What the system cannot do without, and the problems that say that it is not ok. */
const NEEDED = {Kafka: ["kafka_away", "gateway_behind"], artifacts: ["artifacts_unusable"]};

const of_model = (model) => listed(model && {model});
/** The page that lists what a problem is about. */
const LISTS = {
  no_worker: () => listed({waiting_for: "no_worker"}), nothing_runs: () => listed(), pool_without_worker: () => listed(),
  class_paused: (name) => listed({class: name}), device_short: () => listed({waiting_for: "memory"}),
  model_paused: of_model, model_failed: of_model, model_too_large: of_model, model_without_worker: of_model, model_unknown: of_model,
  dead_letters: (reason) => `#/dead-letters?reason=${part(reason)}`,
  dead_letters_unreadable: (reason) => `#/dead-letters?reason=${part(reason)}`,
  tenant_floods: (tenant) => `#/requests?tenant=${part(tenant)}`,
  tenant_near_limit: (tenant) => `#/requests?tenant=${part(tenant)}`,
};

function Problem({one, tell}) {
  const {label, command, call} = one.action;
  const pool = one.pool !== null && one.pool !== one.subject ? ` in the pool ${one.pool}` : "";
  const list = /_(silent|unwell)$/.test(one.problem) ? "#/workers" : LISTS[one.problem]?.(one.subject);
  return html`<article class="problem">
    <p><strong><code>${one.problem}</code> <bdi>${one.subject}${pool}</bdi></strong>
      <span class="faint"><${Ago} at=${one.since} /></span></p>
    <p>${one.cause}</p>
    <p class="faint">Affects: ${one.affects} ${list && html`<a href=${list}>see them</a>`}</p>
    <p class="row">${!call && html`<span class="faint">${label}:</span>`}<code>${command}</code>
      ${call && html`<${Act} label=${label} about=${`${label} ${one.subject ?? ""}${pool}`} path=${call.path}
        body=${call.body} tell=${tell} confirm=${label !== "resume" && `${label}: ${command}?`} />`}</p>
  </article>`;
}

function Pipeline({stats, workers, live, devices, history, range, waiting, tell}) {
  const pausing = (name) => new Set(live.filter((one) => one.paused.includes(`class/${name}`)).map((one) => one.pool));
  const sum = (numbers) => numbers.reduce((all, one) => all + one, 0);
  const queues = Object.entries(stats.queues).map(([name, one]) => ({name, ...one, stuck: Math.min(one.depth, stuck(waiting, name))}));
  const depth = sum(queues.map((one) => one.depth)), stand = sum(queues.map((one) => one.stuck));
  const ends = Object.entries(history ? ended(history) : {});
  const all = (status) => `#/requests?${new URLSearchParams({tenant: "*", ...status && {status}})}`;
  return html`<div class="pipeline">
    <div><h3><a href=${listed()}>Topics: ${stats.rates.accepted_per_s.toFixed(1)} requests/s</a></h3>
      ${queues.map((one) => html`<${Queue} key=${one.name} one=${one} pools=${pausing(one.name)} tell=${tell} />`)}
      <${Front} live=${live} /></div>
    <p class=${`flow ${stand ? "bad" : ""}`}>${count(depth)} waiting${stand > 0 && html`<br />${count(stand)} stand still`}</p>
    <div><h3><a href="#/workers">Workers: ${live.length}</a></h3>
      ${workers.length ? workers.map((one) => html`<${Worker} key=${one.worker_id} one=${one} silent=${!live.includes(one)} />`)
        : html`<p class="faint">None. <code>penstock worker</code> starts one.</p>`}</div>
    <p class=${`flow ${depth && !live.length ? "bad" : ""}`}>${count(sum(live.map((one) => one.running)))} running</p>
    <div><h3><a href="#/models">Devices</a></h3>${devices.map((one) => ({one, worker: live.find((worker) => worker.worker_id === one.worker_id)})).filter(({worker}) => worker)
      .map(({one, worker}) => html`<${Device} key=${one.worker_id + one.device} one=${one} worker=${worker} models=${stats.models} />`)}</div>
    <p class="flow">${history && html`tokens ${rate(last(rates(history, history.completion_tokens)))}<br />images ${
      rate(last(rates(history, history.images ?? [])))}${history.step_s > 60 && html`<br />${newest(history)}`}`}</p>
    <div><h3><a href=${all()}>Results: ${stats.rates.ended_per_s.toFixed(1)} requests/s</a></h3>
      ${ends.map(([name, number]) => html`<p class="row"><a href=${all(name)}>${words(name)}</a>
        <span class=${`figure ${name === "completed" ? "" : "warn"}`}>${count(number)}</span></p>`)}
      <p class="faint">${count(stats.inflight)} under way, ${times(stats.clients.connected, "client")} connected. ${ends.length ? "Ended" : "Nothing ended"} in the last ${range}</p></div>
  </div>`;
}

/** What the requests at the front of the queues wait for. */
function Front({live}) {
  const reasons = {};
  for (const one of live)
    for (const [reason, number] of Object.entries(one.waiting)) reasons[reason] = (reasons[reason] ?? 0) + number;
  const why = Object.entries(reasons).sort((a, b) => b[1] - a[1]);
  if (!why.length) return html`<p class="faint">Nothing waits at the front</p>`;
  return html`<p class="faint">At the front: ${why.map(([reason, number], at) => html`${at > 0 && ", "}<a href=${listed({waiting_for: reason})}>${
    waitsFor(reason)} (${count(number)})</a>`)}</p>`;
}

/** A class. `pools`: where it is paused; null is the common pool, whose state is shown first. */
function Queue({one: {name, depth, oldest_age_s, stuck: still}, pools, tell}) {
  const paused = pools.has(null), word = paused ? "resume" : "pause", path = `/v1/admin/classes/${name}`;
  return html`<div class="row"><a href=${listed({class: name})}>${name}</a>
    <span class=${`figure ${paused || still ? "bad" : ""}`}>${count(depth)}</span>
    <span class="faint">${depth ? `oldest ${duration(oldest_age_s)}` : "empty"}${paused ? ", paused" : ""}</span>
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

/** `models`: what is known of them beside, as how many requests a replica runs at once. */
function Device({one, worker, models}) {
  const there = worker.models.filter(({device, state}) => device === one.device && state === "ready");
  const slots = there.map(({model}) => models.find((known) => known.model === model && known.pool === worker.pool)?.max_batch_size ?? null);
  const [running, free] = [there.map((replica) => replica.running), slots].map((numbers) => numbers.reduce((all, number) => all + number, 0));
  return html`<div><div class="row"><bdi>${one.worker_id}</bdi> ${one.device}
      <span class="figure">${gib(one.reserved_bytes)}</span><span class="faint">of ${gib(one.limit_bytes)} reserved${
        one.foreign_bytes ? `, ${gib(one.foreign_bytes)} of other processes` : ""}</span>
      ${there.length > 0 && html`<span>${slots.includes(null) ? `${running} running` : `${running} of ${times(free, "slot")}`}</span>`}</div>
    <${Memory} of=${one} /></div>`;
}

/** One entry a model and pool, with its replicas on all live workers. */
function Models({workers, models, tell}) {
  const known = models.map(({model, pool, tasks}) => {
    const there = workers.filter((worker) => worker.pool === pool);
    const replicas = there.flatMap(({worker_id, models: all}) => all.filter((one) => one.model === model).map((one) => ({...one, worker_id})));
    return {id: model, pool, tasks, replicas, ready: replicas.filter((one) => one.state === "ready").length, pinned: replicas.some((one) => one.pinned), paused: there.some((one) => one.paused.includes(`model/${model}`))};
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
    <p class="faint">${one.ready ? `${times(one.ready, "replica")}: ` : ""}${one.pool === null ? "" : html`in <bdi>${one.pool}</bdi>, `}${one.tasks.map(words).join(", ")}</p>
    <div class="row"><span>${load(one.replicas)}${one.paused ? ", paused" : ""}</span><${Orders} one=${one} tell=${tell} /></div>
    ${failed && html`<p class="bad"><bdi>${words(failed)}</bdi></p>`}</div>`;
}
