// Dead letters of all tenants: counts, one of them, and redriving many.
import {useState} from "./vendor/hooks.js";
import {Act, Ago, Facts, Failure, Table, count, html, local, requestLink, times, usePoll} from "./parts.js";
import {now, part} from "./api.js";
import {Attempts} from "./attempts.js";
import {Walk, start, useWalk} from "./walk.js";

const POLL_MS = 3000;
const PAGE = 50;
const ROUTE = "/v1/admin/dlq";
const FILTERS = ["reason", "model", "tenant", "request_id", "since"];
const to = (filter) => `#/dead-letters?${new URLSearchParams(filter)}`;

export function DeadLetters({query}) {
  const filter = Object.fromEntries(FILTERS.map((name) => [name, query.get(name)]).filter(([, value]) => value));
  const after = query.get("after");
  const [found, error] = usePoll(`${ROUTE}?${new URLSearchParams({...filter, limit: `${PAGE}`, ...after && {after}})}`, POLL_MS);
  return html`<${Groups} />
    <section aria-labelledby="letters"><h2 id="letters">Letters</h2>
      <${Filters} filter=${filter} />
      <${Failure} error=${error} />
      ${found && html`<${Letters} found=${found} filter=${filter} after=${after} />`}</section>
    <${Many} filter=${filter} />`;
}

function Groups() {
  const [found, error] = usePoll(`${ROUTE}/groups`, POLL_MS);
  const rows = (found?.data ?? []).map((one) => [html`<a href=${to({reason: one.reason})}><code>${one.reason}</code></a>`,
    one.model === null ? html`<span class="faint">none</span>` : html`<a href=${to({reason: one.reason, model: one.model})}><bdi>${one.model}</bdi></a>`,
    count(one.letters), count(one.redrivable),
    html`<${Ago} at=${one.newest_at} />`, html`<${Ago} at=${one.oldest_at} />`]);
  return html`<section aria-labelledby="groups"><h2 id="groups">Dead letters</h2>
    <p class="faint">Records that no worker could complete, of all tenants, without those that were redriven.</p>
    <${Failure} error=${error} />
    ${found && html`<${Table} name="By reason and model" columns=${["reason", "model", "letters", "redrivable", "newest", "oldest"]} rows=${rows}
      empty="None. A request becomes a dead letter when its attempts are used up, and a record when it cannot be read." />`}</section>`;
}

function Filters({filter}) {
  const search = (event) => {
    event.preventDefault();
    const given = [...new FormData(event.target)].map(([name, value]) => [name, `${value}`.trim()]).filter(([, value]) => value);
    location.hash = to(given.map(([name, value]) => [name, name === "since" ? new Date(value).toISOString() : value]));
  };
  const field = (name, label, size) => html`<label>${label} <input name=${name} size=${size} autocomplete="off" value=${filter[name] ?? ""} /></label>`;
  return html`<form onSubmit=${search}>${field("reason", "Reason", 14)}${field("model", "Model", 14)}${field("tenant", "Tenant", 10)}
    ${field("request_id", "Request id", 20)}
    <label>Since <input name="since" type="datetime-local" step="1" value=${local(filter.since)} /></label>
    <button>Filter</button>${Object.keys(filter).length > 0 && html`<a href="#/dead-letters">All</a>`}</form>`;
}

function Letters({found, filter, after}) {
  const rows = found.data.map((one) => [html`<a href=${`#/dead-letters/${one.id}`}><code>${one.id}</code></a>`,
    html`<${Ago} at=${one.created_at} />`, html`<code>${one.reason}</code>`, one.error, html`<bdi>${one.model ?? ""}</bdi>`,
    html`<bdi>${one.tenant ?? ""}</bdi>`, one.attempts, state(one)]);
  return html`<${Table} name="List of letters" columns=${["partition/offset", "written", "reason", "error", "model", "tenant", "attempts", "state"]} rows=${rows}
      empty=${Object.keys(filter).length ? "No dead letter matches the filter." : "None. penstock dlq list shows the same."} />
    <p class="row">${after && html`<a href=${to(filter)}>Newest</a>`}
      ${found.has_more && html`<a href=${to({...filter, after: found.last_id})}>Older</a>`}</p>`;
}

function state(one) {
  if (one.redriven_as) return html`redriven as ${requestLink(one.redriven_as, one.tenant)}`;
  return one.redrivable ? "" : "holds no request";
}

const words = (filter) => Object.entries(filter).map(([name, value]) => `${name.replace("_id", "")} ${value}`).join(", ") || "all";

/** Redriving, or purging, what the filter chooses: counted first. */
function Many({filter}) {
  const [rate, setRate] = useState("");
  const [again, setAgain] = useState(false);
  const walk = useWalk();
  const options = {again, rate: Number(rate) || null};
  const about = `letters ${JSON.stringify([filter, again])}`;
  /** What is counted is what is taken: letters that were written up to the count. */
  const chosen = (dry_run) => ({filter: dry_run ? {...filter, until: new Date(now()).toISOString()} : walk.body.filter, dry_run});
  const walks = (counted, path, more) => (dry_run) => start({path: `${ROUTE}/${path}`, body: {...more, ...chosen(dry_run)}, counted, about, name: words(filter),
    said: (number, dry) => `${times(number, "letter")} ${dry ? "would be " : ""}${counted}`});
  const redrive = walks("redriven", "redrive", options), purge = walks("purged", "purge", {});
  const letters = walk && times(walk.done, "letter");
  const next = walk?.counted === "purged" ? {label: `Purge ${letters}`, kind: "danger",
    act: () => window.confirm(`Purge ${letters} (${words(filter)})? Nobody sees them from then on.`) && purge(false)}
    : {label: `Redrive ${letters}`, act: () => redrive(false)};
  return html`<section aria-labelledby="many"><h2 id="many">Redrive or purge</h2>
    <p>Letters: <bdi>${words(filter)}</bdi></p>
    <form onSubmit=${(event) => event.preventDefault()}>
      <label>Letters a second, at most <input type="number" min="0.1" max="10000" step="any" placeholder="as fast as it goes" value=${rate} onInput=${(event) => setRate(event.target.value)} /></label>
      <label class="check"><input type="checkbox" checked=${again} onChange=${(event) => setAgain(event.target.checked)} /> Include letters that were already redriven</label>
      <button type="button" aria-disabled=${walk?.busy} onClick=${() => redrive(true)}>Count what would be redriven</button>
      <button type="button" aria-disabled=${walk?.busy} onClick=${() => purge(true)}>Count what would be purged</button></form>
    ${walk && html`<${Walk} walk=${walk} about=${about} next=${next} />`}
    <p class="faint">Each becomes a new request whose deadline counts anew. The same by command: <code>${command(filter, options)}</code></p></section>`;
}

function command(filter, {rate, again}) {
  const given = Object.entries(filter).map(([name, value]) => ` --${name.replace("_id", "")} ${quoted(value)}`).join("");
  return `penstock dlq redrive${given || " --all"}${rate ? ` --rate ${rate}` : ""}${again ? " --again" : ""} --dry-run`;
}
const quoted = (value) => /^[\w.:-]+$/.test(value) ? value : `'${value.replaceAll("'", "'\\''")}'`;

export function DeadLetter({id, tell}) {
  const [one, error] = usePoll(`${ROUTE}/${id.split("/").map(part).join("/")}`, POLL_MS, {object: true});
  return html`<section aria-labelledby="letter"><h2 id="letter">Dead letter <code><bdi>${id}</bdi></code></h2>
      <${Failure} error=${error} />
      ${one && html`<${Letter} one=${one} tell=${tell} />`}
      <p><a href="#/dead-letters">All dead letters</a></p></section>
    ${one && html`<section aria-labelledby="attempts"><h2 id="attempts">Attempts</h2><${Attempts} history=${one.history} dropped=${one.history_dropped} /></section>
      <section aria-labelledby="record"><h2 id="record">The record</h2><${Original} one=${one} /></section>`}`;
}

function Letter({one, tell}) {
  const {origin} = one;
  const facts = {reason: html`<code>${one.reason}</code>`, error: html`<bdi>${one.error}</bdi>`, written: html`<${Ago} at=${one.created_at} />`,
    request: requestLink(one.request_id, one.tenant), tenant: one.tenant && html`<bdi>${one.tenant}</bdi>`, task: one.task?.replaceAll("_", " "),
    model: one.model && html`<bdi>${one.model}</bdi>`, worker: one.worker_id && html`<bdi>${one.worker_id}</bdi>`,
    "came from": origin && html`topic <code>${origin.topic}</code>, partition ${origin.partition}, offset ${count(origin.offset)}`,
    "redriven": one.redriven_as && html`as ${requestLink(one.redriven_as, one.tenant)}${one.redrives > 1 ? `, the newest of ${one.redrives}` : ""}`};
  const again = one.redriven_as !== null;
  return html`<${Facts} of=${facts} />
    <p class="row">${one.redrivable ? html`<${Act} label=${again ? "redrive again" : "redrive"} about=${`redrive ${one.id}`} path=${`${ROUTE}/redrive`}
        body=${{ids: [one.id], again}} tell=${tell} confirm=${again && `It was redriven before. Redrive ${one.id} again?`} />`
      : html`<span class="faint">It holds no valid request, so that it cannot be redriven.</span>`}
      <${Act} label="purge" about=${`purge ${one.id}`} path=${`${ROUTE}/purge`} body=${{ids: [one.id]}} tell=${tell}
        confirm=${`Purge ${one.id}? Nobody sees it from then on.`} then=${() => { location.hash = "#/dead-letters"; }} /></p>
    ${one.error_chain?.length > 0 && html`<h3>Errors, the outermost first</h3><ol>${one.error_chain.map((line) => html`<li><bdi>${line}</bdi></li>`)}</ol>`}`;
}

const SHOWN_BYTES = 4096;

/** The record that could not be worked on, for a key that may read what its tenant asks. */
function Original({one}) {
  if (one.original_omitted) return html`<p>${count(one.bytes)} bytes. The record itself is shown to a key of the tenant <bdi>${one.tenant}</bdi> with the scope <code>read</code>.</p>`;
  const bytes = raw(one);
  const rows = Object.entries(one.headers).map(([name, value]) => [html`<code><bdi>${name}</bdi></code>`, html`<bdi>${value}</bdi>`]);
  return html`${one.request && html`<details open><summary>The request in it</summary><pre>${JSON.stringify(one.request, null, 2)}</pre></details>`}
    <details open=${!one.request}><summary>Its ${count(one.bytes)} bytes</summary>
      <pre>${bytes ? dump(bytes) : one.original.slice(0, SHOWN_BYTES)}</pre>
      ${one.bytes > SHOWN_BYTES && html`<p class="faint">The first ${count(SHOWN_BYTES)}. All: <code>penstock dlq show ${one.id} --raw</code></p>`}</details>
    <h3>Headers</h3><${Table} name="List of headers" columns=${["header", "value"]} rows=${rows} empty="None." />`;
}

/** The bytes of an original that is no text, which the gateway writes as hex; null for a text. */
function raw({original, bytes}) {
  if (new TextEncoder().encode(original).length === bytes) return null;
  return (original.slice(4, 4 + 2 * SHOWN_BYTES).match(/../g) ?? []).map((pair) => parseInt(pair, 16));
}

/** Offset, hex and ASCII, 16 bytes a line. */
function dump(bytes) {
  const lines = [];
  for (let at = 0; at < bytes.length; at += 16) {
    const some = bytes.slice(at, at + 16);
    lines.push(`${at.toString(16).padStart(6, "0")}  ${some.map((byte) => byte.toString(16).padStart(2, "0")).join(" ").padEnd(47)}  ${
      some.map((byte) => byte > 31 && byte < 127 ? String.fromCharCode(byte) : ".").join("")}`);
  }
  return lines.join("\n");
}
