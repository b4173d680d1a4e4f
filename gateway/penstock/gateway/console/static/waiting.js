// What waits, in lines by class, model and tenant, and the tenants: who has what ran, and who is near a limit.
import {Failure, Table, count, duration, html, rate, times, usePoll, words} from "./parts.js";
import {waitsFor} from "./requests.js";

const POLL_MS = 6000;
const NEAR = 0.9;
/** The task of the line that requests of a tenant share beyond its first 200 lines. */
const OTHERS = "others";
/** A line that waits for nothing else is not worked off: what leaves it has expired or was cancelled. */
const HALTS = ["no_worker", "paused", "transaction"];
const halts = ({reasons}) => Object.keys(reasons).length > 0 && Object.keys(reasons).every((one) => HALTS.includes(one));
const SHOWN_TENANTS = 12;
const percent = (part) => `${part > 0 && part < 0.01 ? "<\u00a01" : Math.round(100 * part)}\u00a0%`;

/** How many requests of a class wait in lines that are not worked off. */
export const stuck = (found, name) => (found?.data ?? []).filter((line) => line.class === name && halts(line)).reduce((sum, line) => sum + line.depth, 0);

/** Requests that wait, of all tenants, in the list of requests. */
export const listed = (filters = {}) => `#/requests?${new URLSearchParams({tenant: "*", status: "waiting", ...filters})}`;

/** The lines of the caller's tenant. */
export function OwnWaiting() {
  const [found, error] = usePoll("/v1/waiting", POLL_MS);
  return html`<${Waiting} found=${found} error=${error} />`;
}

export function Waiting({found, error = null, all = false}) {
  const columns = ["waiting", "class", "model", all && "tenant", "oldest", "accepted", "left", "empty", "mostly for"].filter(Boolean);
  return html`<section aria-labelledby="waiting"><h2 id="waiting">Waiting${found?.depth ? `: ${times(found.depth, "request")}` : ""}</h2>
    <${Failure} error=${error} />
    ${found && html`<${Table} name="Lines of waiting requests" columns=${columns} rows=${found.data.map((line) => cells(line, all))}
      keys=${found.data.map((line) => JSON.stringify([line.tenant, line.class, line.task, line.model, line.pool]))}
      empty="Nothing waits. Requests that cannot start at once are shown here by class, model and tenant." />
      ${found.omitted > 0 && html`<p class="faint">${times(found.omitted, "shorter line")} not shown</p>`}`}</section>`;
}

function cells(line, all) {
  const {tenant, task, model, pool, depth, oldest_age_s: age_s, rates, reasons} = line;
  const shared = task === OTHERS, asked = shared ? "further models" : model ?? `any for ${words(task)}`;
  const named = {...all && {tenant}, class: line.class, ...!shared && {task}, ...model !== null && {model}, status: "waiting"};
  const [[reason, number] = [null, 0]] = Object.entries(reasons);
  return [html`<a href=${`#/requests?${new URLSearchParams(named)}`} aria-label=${`${times(depth, "request")} of class ${line.class}, ${asked}${pool === null ? "" : `, pool ${pool}`}${all ? `, tenant ${tenant}` : ""}`}>${count(depth)}</a>`,
    line.class, html`<bdi>${asked}</bdi>${pool === null ? "" : html` in <bdi>${pool}</bdi>`}`,
    ...all ? [html`<bdi>${tenant}</bdi>`] : [], age_s === null ? "" : duration(age_s), rate(rates.accepted_per_s), rate(rates.left_per_s), forecast(line),
    reason && html`<a href=${`#/requests?${new URLSearchParams({...named, waiting_for: reason})}`}>${waitsFor(reason)}${number < depth ? ` (${count(number)})` : ""}</a>`];
}

/** When nothing will wait in a line, at the rates of the last seconds. */
function forecast(line) {
  const {empty_in_s: seconds, rates} = line;
  if (seconds !== null) return seconds < 1 ? "at once" : `in ${duration(seconds)}`;
  return html`<span class="warn">${halts(line) ? "stands still" : trend(rates)}</span>`;
}

/** How a line that will not be empty goes on. */
export const trend = ({accepted_per_s: accepted, left_per_s: left}) => left === 0 ? "stands still" : accepted > left ? "grows" : "steady";

/** Who uses the system. One tenant without a limit says nothing. */
export function Tenants({found}) {
  const shown = found?.data.slice(0, SHOWN_TENANTS) ?? [], others = found && found.data.length + found.omitted - shown.length;
  if (shown.length < 2 && !shown.some((one) => Object.keys(one.limits).length)) return null;
  return html`<section aria-labelledby="tenants"><h2 id="tenants">Tenants</h2>
    <div class="columns tenants">${shown.map((one) => html`<${Tenant} key=${one.tenant} one=${one} />`)}</div>
    ${others > 0 && html`<p class="faint">${times(others, "tenant")} not shown, with less</p>`}</section>`;
}

function Tenant({one}) {
  const near = Object.entries(one.limits).filter(([, {used, limit}]) => used >= NEAR * limit);
  return html`<div><div class="row"><a href=${`#/requests?${new URLSearchParams({tenant: one.tenant})}`}><bdi>${one.tenant}</bdi></a>
      <span class="figure">${percent(one.share)}</span><span class="faint">${count(one.outstanding - one.waiting)} running, ${count(one.waiting)} waiting</span></div>
    <meter value=${one.share} max="1" aria-label=${`Share of ${one.tenant} in what ran in the last minute`}></meter>
    ${near.map(([name, {used, limit}]) => html`<p class="warn">near a limit: ${words(name)} ${percent(used / limit)} (${count(used)} of ${count(limit)})</p>`)}</div>`;
}
