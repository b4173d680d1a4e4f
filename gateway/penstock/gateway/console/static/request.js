// One request: its course to scale, what it waits for, its stream, what was asked and answered, and what can be done with it.
import {useState} from "./vendor/hooks.js";
import {Act, Ago, Code, Due, Facts, Failure, Table, count, duration, gib, html, requestLink, times, useFocus, usePoll, words} from "./parts.js";
import {Attempts} from "./attempts.js";
import {call, get, now, part} from "./api.js";
import {Calls, useFollow} from "./asking.js";
import {Snippets, curl, python} from "./snippets.js";
import {Again, why} from "./requests.js";

const POLL_MS = 1000, SLOW_MS = 5000;
const WIDE = 1000;
const FIRST_VALUES = 8;
const exact = (ms) => ms < 1000 ? `${Math.round(ms)} ms` : ms < 60_000 ? `${(ms / 1000).toFixed(2)} s` : duration(ms / 1000);

/** `#/requests/ID`, for operators `?tenant=` too: a request of the key's tenant as its callers see it, of others where it stands. */
export function Request({id, query, may, tell, keyed, tenant: own}) {
  const asked = query.get("tenant"), foreign = asked && asked !== own;
  const [one, error] = usePoll(foreign ? `/v1/admin/requests/${part(id)}?tenant=${part(asked)}` : `/v1/requests/${part(id)}`, POLL_MS, {object: true});
  const path = `/v1/requests/${part(id)}`, kept = useFocus();
  return html`<section aria-labelledby="request"><h2 id="request">Request <code><bdi>${id}</bdi></code></h2>
      <${Failure} error=${error} />
      ${error?.status === 404 && !asked && may("admin") && html`<p><a href=${`#/requests/${part(id)}?tenant=*`}>Look for it among all tenants</a></p>`}
      ${one && html`<${State} one=${one} />
        <div class="tools" role="group" aria-label="Commands" tabindex="-1" ...${kept}><${Live} one=${one} may=${may} tell=${tell} />
          ${foreign ? html`<${Again} one=${one} tell=${tell} /><${CopyLink} tell=${tell} />
            <span class="faint">Of the tenant <bdi>${one.tenant}</bdi>: what it holds is for its callers.</span>`
            : html`<${Own} path=${path} may=${may} tell=${tell} keyed=${keyed} />`}</div>
        <${Course} one=${one} />
        <${About} one=${one} may=${may} />`}</section>
    ${one && !foreign && html`<${Answer} one=${one} />
      <${OnDemand} title="What was asked" path=${`${path}/input`} final=${true} show=${(found) => html`<${Input} found=${found} keyed=${keyed} may=${may} />`} />
      <${OnDemand} title="Webhook" path=${`${path}/deliveries`} show=${(found) => html`<${Deliveries} found=${found} />`} />`}
    ${one && html`<section><details><summary>As the API has it</summary><pre>${JSON.stringify(one, shortened, 2)}</pre></details>
      <p>The same by command: <code>penstock requests show ${id}${foreign ? ` --tenant ${one.tenant}` : ""}</code></p>
      <p><a href="#/requests">All requests</a></p></section>`}`;
}

function State({one}) {
  const kind = one.status === "completed" || one.status === "running" ? "good" : one.done ? "bad" : "warn";
  const start = one.waiting_for?.reason !== "scheduled" && one.waiting_for?.estimated_start_at;
  return html`<p class="summary"><span class=${kind} role="status">${words(one.status)}, attempt ${one.attempt}</span></p>
    ${why(one) && html`<p>${why(one)}${one.done && one.error ? html` (<${Code} of=${one.error.code} />)` : ""}</p>`}
    ${!one.done && start && html`<p>It may start in about ${duration(Math.max(0, (Date.parse(start) - now()) / 1000))}, by what was measured so far.</p>`}
    ${!one.done && one.waiting_for?.need_bytes && html`<p class="faint">${gib(one.waiting_for.need_bytes)} needed, ${gib(one.waiting_for.free_bytes ?? 0)} free</p>`}
    ${one.progress && html`<p><label>step ${one.progress.step} of ${one.progress.steps} <progress max=${one.progress.steps} value=${one.progress.step}></progress></label></p>`}`;
}

/** A vector as its first values. */
const shortened = (_, value) => Array.isArray(value) && value.length > FIRST_VALUES && typeof value[0] === "number"
  ? [...value.slice(0, FIRST_VALUES), `… ${times(value.length - FIRST_VALUES, "more value")}`] : value;

/** Commands for one that has not ended. Of another tenant it is named as one of many. */
function Live({one, may, tell}) {
  const [priority, setPriority] = useState(null);
  if (one.done || !may("cancel")) return null;
  const path = one.tenant ? "/v1/requests" : `/v1/requests/${part(one.request_id)}`, named = one.tenant && {ids: [one.request_id], tenant: one.tenant};
  return html`<${Act} label="cancel" about=${`cancel ${one.request_id}`} path=${`${path}/cancel`} body=${named} tell=${tell} confirm=${`Cancel ${one.request_id}?`} />
    <label>Priority <select onChange=${({target}) => setPriority(Number(target.value))}>${[...Array(10).keys()].map((number) =>
      html`<option value=${number} selected=${number === (priority ?? one.priority)}>${number}</option>`)}</select></label>
    <${Act} label="set" about="set the priority" path=${`${path}/reprioritize`} body=${{...named, priority: priority ?? one.priority}} tell=${tell} then=${() => setPriority(null)} />`;
}

/** What a request's own tenant can do with it, whether it has ended or not. */
function Own({path, may, tell, keyed}) {
  const again = async () => {
    if (!window.confirm("Submit the same once more?")) return;
    try {
      const {request} = await get(`${path}/input`);
      location.hash = `#/requests/${part((await call("POST", "/v1/requests", request)).request_id)}`;
    } catch (error) {
      tell({error});
    }
  };
  return html`${may("submit") && html`<button type="button" onClick=${again}>run again</button>`}
    <${CopyLink} tell=${tell} />
    <${Copy} label="copy as curl" of=${async () => curl((await get(`${path}/input`)).request, keyed)} tell=${tell} />
    <${Copy} label="copy as Python" of=${async () => python((await get(`${path}/input`)).request, keyed)} tell=${tell} />`;
}

/** Copies a text. Where the browser lets no page copy (plain HTTP of another machine), it is shown to be marked. */
export function Copy({label, of, tell}) {
  const copy = async () => {
    try {
      const copied = await of();
      if (navigator.clipboard) await navigator.clipboard.writeText(copied);
      tell({text: navigator.clipboard ? `${label}: done` : html`<pre>${copied}</pre>`});
    } catch (error) {
      tell({error: error.code ? error : {code: "not_copied", message: error.message}});
    }
  };
  return html`<button type="button" onClick=${copy}>${label}</button>`;
}

const CopyLink = ({tell}) => html`<${Copy} label="copy the link" of=${async () => location.href} tell=${tell} />`;

// -- its course

/**
 * The parts of its course: [name, when it began, when it ended or null, what is said of it, the class of its bar], in ms since the epoch.
 * Where attempts are recorded they are shown with the waits between them; else the times of the only one are counted back from its end.
 */
export function spans(one, at_ms) {
  const began = Date.parse(one.created_at), end = one.done ? Date.parse(one.finished_at) : at_ms;
  const found = [["accepted", began, began, `priority ${one.priority}`, "mark"], ...one.history ? attempts(one, began, end) : one.timings ? only(one, began, end) : []];
  if (!one.done) found.push(...underway(one, found.at(-1)?.[2] ?? found.at(-1)?.[1] ?? began, end));
  if (one.done) found.push([words(one.status), end, end, one.error?.message ?? "", "mark"]);
  return found;
}

function attempts(one, began, end) {
  let free = began;
  const own = one.history.filter(({started_at, ended_at}) => !(Date.parse(ended_at ?? started_at) < began));
  const measured = one.done && one.timings;
  return own.flatMap((attempt, at) => {
    const from = attempt.started_at ? Date.parse(attempt.started_at) : free, killed = !attempt.ended_at;
    const last = measured && at === own.length - 1 && counted(one, free, end);
    const noticed = measured && at === own.length - 2 ? counted(one, began, end).arrived : from;
    const to = !killed ? Date.parse(attempt.ended_at) : noticed > from ? noticed : null;
    const said = [where(attempt), attempt.error ? `${attempt.error.code}: ${attempt.error.message}` : "completed",
      killed && to !== null && "another worker had it from then on"];
    const waited = last && last.arrived >= free ? last.before : from > free ? [["waiting", free, from, "", "wait"]] : [];
    free = to ?? Math.min(end, from);
    return [...waited, [`attempt ${attempt.attempt}${killed ? ", killed" : ""}`, from, to, said.filter(Boolean).join(", "), attempt.error || killed ? "bad" : "run"],
      ...last ? last.first : []];
  });
}

/** What the last worker measured, counted back from the end: when it had the request, what came before its run, and its first token. */
function counted({timings, model}, free, end) {
  const {queued_ms, admission_ms, load_ms, run_ms, first_token_ms} = timings;
  const ran = end - run_ms, admitted = ran - admission_ms, loaded = admitted - load_ms, arrived = loaded - queued_ms;
  const before = [["queued", Math.max(free, arrived), Math.max(free, loaded), "", "wait"],
    load_ms && ["loading the model", loaded, admitted, model ?? "", "load"], admission_ms && ["being admitted", admitted, ran, "", "wait"]].filter(Boolean);
  const first = Math.min(end, arrived + first_token_ms);
  return {arrived, ran, before, first: first_token_ms === null ? [] : [["first token", first, first, "", "mark"]]};
}

function only(one, began, end) {
  const {ran, before, first} = counted(one, began, end);
  const run = one.timings.run_ms ? [["running", ran, end, [where(one), one.model].filter(Boolean).join(", "), "run"]] : [];
  return [...before, ...run, ...first];
}

/** What it does now; `free`: since when it has waited. */
function underway(one, free, at_ms) {
  const runs = one.status === "running", since = runs ? Date.parse(one.status_at) : at_ms;
  const waited = ["waiting", free, since, runs ? "" : why(one), "wait"];
  const first = Date.parse(one.first_token_at);
  return !runs ? [waited] : [waited, ["running", since, at_ms, [where(one), one.model].filter(Boolean).join(", "), "run"],
    ...first ? [["first token", first, first, "", "mark"]] : []];
}

const where = ({worker_id, device}) => [worker_id, device].filter(Boolean).join(" on ");

/** A waterfall to scale, as a table that can be read aloud: each bar stands beside its times. */
function Course({one}) {
  const found = spans(one, now());
  const began = found[0][1], whole = Math.max(1, ...found.map(([, from, to]) => (to ?? from) - began));
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Timeline"><table class="course">
    <caption>${one.done ? "Timeline" : "Timeline so far"}, ${exact(whole)} in all</caption>
    <thead><tr><th scope="col">what</th><th scope="col">after</th><th scope="col">took</th><th scope="col" class="of-course">0 to ${exact(whole)}</th><th scope="col">where, why</th></tr></thead>
    <tbody>${found.map(([name, from, to, said, kind], at) => html`<tr><th scope="row">${name}</th>
      <td>${exact(Math.max(0, from - began))}</td>
      <td>${kind === "mark" ? "" : to === null ? "?" : exact(Math.max(0, to - from))}</td>
      <td><svg viewBox=${`0 0 ${WIDE} 12`} preserveAspectRatio="none" aria-hidden="true"><${Bar} kind=${kind}
        from=${WIDE * (from - began) / whole} to=${WIDE * ((to ?? from) - began) / whole} /></svg></td>
      <td><bdi>${said}</bdi>${at === 0 && html`, <${Ago} at=${one.created_at} />`}</td></tr>`)}</tbody></table></div>`;
}

function Bar({kind, from, to}) {
  const x = Math.max(0, Math.min(WIDE - 3, from));
  return html`<rect class=${kind} x=${x} y=${kind === "mark" ? 0 : 2} width=${Math.max(3, Math.min(WIDE, to) - x)} height=${kind === "mark" ? 12 : 8} />`;
}

function About({one, may}) {
  return html`<${Facts} of=${{
    task: words(one.task), model: one.model && html`<bdi>${one.model}</bdi>${one.model_reason ? ` (${one.model_reason})` : ""}`, pool: one.pool,
    worker: one.worker_id && html`<bdi>${where(one)}</bdi>`,
    conversation: one.conversation_id && html`<a href=${`#/conversations/${part(one.conversation_id)}`}><bdi>${one.conversation_id}</bdi></a>`,
    user: one.user_id, session: one.session_id, "correlation id": one.correlation_id && html`<bdi>${one.correlation_id}</bdi>`,
    "redriven from": one.redriven_from && requestLink(one.redriven_from, one.tenant),
    "dead letter": one.status === "dead_lettered" && may("admin") ? html`<${Letter} one=${one} />` : null,
    "starts not before": one.start_after && html`<${Due} at=${one.start_after} />`,
    "time to live": one.ttl_ms && duration(one.ttl_ms / 1000),
  }} />
    ${one.history && html`<details><summary>Its attempts, with the memory of their devices</summary><${Attempts} history=${one.history} dropped=${one.history_dropped} /></details>`}`;
}

/** The letter of a request that no worker could complete, and the request as which it was redriven. */
function Letter({one}) {
  const [found, error] = usePoll(`/v1/admin/dlq?${new URLSearchParams({request_id: one.request_id, ...one.tenant && {tenant: one.tenant}})}`, SLOW_MS);
  const letter = found?.data[0];
  return html`<${Failure} error=${error} />${letter ? html`<a href=${`#/dead-letters/${letter.id}`}><code>${letter.id}</code></a>` : found && "none, or it was purged"}
    ${letter?.redriven_as && html`, redriven as ${requestLink(letter.redriven_as, one.tenant)}`}`;
}

// -- what was asked and answered

/** Its stream while it runs, and its output when it has ended. */
function Answer({one}) {
  if (!one.done) return html`<${Stream} id=${one.request_id} />`;
  if (one.status !== "completed") return null;
  return html`<section aria-labelledby="output"><h2 id="output">Output</h2>
    <details><summary>Show it</summary><${Output} result=${one.result} /></details></section>`;
}

function Stream({id}) {
  const {text, calls, preview, state} = useFollow(id);
  return html`<section aria-labelledby="stream"><h2 id="stream">Stream</h2>
    ${text && html`<p class="answer"><bdi>${text}</bdi></p>`}<${Calls} calls=${calls} />
    ${preview && html`<p><img class="made" src=${preview.image.url} alt=${`Preview after step ${preview.step} of ${preview.steps}`} /></p>`}
    <p class="faint">${state ? words(state) : "No text yet."}</p></section>`;
}

function Output({result}) {
  if (!result) return html`<p class="faint">The result topic does not hold it any more.</p>`;
  const {text: said, choices, embeddings, images, artifact, tool_calls, ...rest} = result;
  return html`${said !== undefined && said !== null && html`<pre><bdi>${said}</bdi></pre>`}
    ${(choices ?? []).map((one) => html`<pre><bdi>${one.text}</bdi></pre>`)}
    <${Calls} calls=${(tool_calls ?? []).map((one) => one.function)} />
    ${(embeddings ?? []).map((vector) => html`<p>${times(vector.length, "value")}: <code>${vector.slice(0, FIRST_VALUES).map((value) => value.toFixed(5)).join(", ")}${vector.length > FIRST_VALUES ? ", …" : ""}</code></p>`)}
    ${(images ?? []).map((image, at) => html`<${Picture} image=${image} name=${`output ${at + 1}`} />`)}
    ${artifact && html`<p><a href=${content(artifact.artifact_id)}>${count(artifact.size_bytes)} bytes, ${artifact.media_type}</a></p>`}
    <p class="faint">${Object.entries({finish: rest.finish_reason, ...rest.usage}).filter(([, value]) => value).map(([name, value]) => `${words(name)} ${value}`).join(", ")}</p>`;
}

const content = (id) => `/v1/artifacts/${part(id)}/content`;

function Picture({image, name}) {
  return html`<figure><img class="made" alt=${name} src=${content(image.artifact_id)} />
    <figcaption class="faint">${[name, image.width && `${image.width} × ${image.height}`].filter(Boolean).join(", ")}, <a href=${content(image.artifact_id)}>the file</a></figcaption></figure>`;
}

/** What a path answers, asked for when it is opened. */
function OnDemand({title, path, show, final = false}) {
  const [open, setOpen] = useState(false);
  return html`<section><details onToggle=${({target}) => setOpen(target.open)}><summary>${title}</summary>
    ${open && html`<${Asked} path=${path} show=${show} final=${final} />`}</details></section>`;
}

function Asked({path, show, final}) {
  const [found, error] = usePoll(path, SLOW_MS, {once: final, object: true});
  return html`<${Failure} error=${error} />${found ? show(found) : !error && html`<p class="faint">Asking…</p>`}`;
}

function Input({found, keyed, may}) {
  const {payload = {}} = found.request;
  const images = [...artifacts(payload)];
  return html`${payload.prompt && html`<pre><bdi>${payload.prompt}</bdi></pre>`}
    ${(payload.messages ?? []).map((one) => html`<h3>${one.role}</h3>${[one.content ?? ""].flat().map((piece) => piece.text ?? piece)
      .filter((said) => typeof said === "string").map((said) => html`<pre><bdi>${said}</bdi></pre>`)}`)}
    ${images.map((image, at) => html`<${Picture} image=${image} name=${`input ${at + 1}`} />`)}
    ${found.traceparent && html`<p>Trace <code>${found.traceparent.split("-")[1]}</code> <span class="faint">(traceparent <code>${found.traceparent}</code>)</span></p>`}
    <details><summary>All of it, as it can be submitted again</summary><pre>${JSON.stringify(found.request, null, 2)}</pre></details>
    <${Snippets} request=${found.request} keyed=${keyed} may=${may} />`;
}

/** What in a payload names an artifact. */
function* artifacts(value) {
  if (value === null || typeof value !== "object") return;
  if (typeof value.artifact_id === "string") yield value;
  for (const inner of Object.values(value)) yield* artifacts(inner);
}

function Deliveries({found}) {
  const rows = found.data.flatMap((one) => one.attempts.map((attempt) => [attempt.attempt, html`<${Ago} at=${attempt.at} />`,
    attempt.status_code ?? attempt.error, exact(attempt.duration_ms)]));
  const [one] = found.data;
  return html`${one && html`<p><span class=${one.state === "delivered" ? "good" : "warn"}>${one.state}</span> <bdi>${one.url}</bdi>
      ${one.next_at && html` next attempt <${Due} at=${one.next_at} />`}</p>`}
    <${Table} name="Attempts" columns=${["attempt", "when", "answer", "took"]} rows=${rows}
      empty=${one ? "No call has ended yet." : "None. A request has one if it was sent with callback_url."} />`;
}
