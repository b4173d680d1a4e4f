// What requests used in the last 30 days: by day, and by model, key or tenant.
import {useState} from "./vendor/hooks.js";
import {Failure, Table, count, duration, html, usePoll} from "./parts.js";

const POLL_MS = 10_000;
const FIGURES = ["requests", "unsuccessful", "tokens in", "tokens out", "images", "device time"];
/** What can be grouped by, and the field that names a group. */
const FIELDS = {model: "model", key: "key_id", tenant: "tenant"};

export function Usage({may}) {
  const [by, setBy] = useState("model"), all = may("admin");
  const path = `/v1/${all ? "admin/" : ""}usage?limit=100&group_by=`;
  const [days, no_days] = usePoll(`${path}day`, POLL_MS);
  const [groups, no_groups] = usePoll(path + by, POLL_MS);
  return html`<section aria-labelledby="usage"><h2 id="usage">Usage of ${all ? "all tenants" : "this tenant"}, last 30 days</h2>
      <${Failure} error=${no_days ?? no_groups} />
      <p><label>By <select value=${by} onChange=${({target}) => setBy(target.value)}>
        ${Object.keys(FIELDS).filter((one) => all || one !== "tenant").map((one) => html`<option>${one}</option>`)}</select></label></p>
      ${groups && html`<${Groups} name=${`Usage by ${by}`} found=${groups} column=${by} field=${FIELDS[by]} />`}
      ${days && html`<${Groups} name="Usage by day" found=${days} column="day (UTC)" field="day" />`}
      <p class="faint">A request counts on the day of its outcome. Requests that run together count each their own device time.</p></section>`;
}

/** A row for each group, with its share of the most requests as a bar. */
function Groups({name, found, column, field}) {
  const most = Math.max(1, ...found.data.map((one) => one.requests));
  const rows = found.data.map((one) => [html`<bdi>${one[field] ?? "none"}</bdi>`,
    html`<div class="bar" aria-hidden="true"><b style=${{width: `${100 * one.requests / most}%`}}></b></div>`, count(one.requests),
    count(one.requests - one.completed), count(one.input_tokens), count(one.output_tokens), count(one.images), duration(one.device_seconds)]);
  return html`<${Table} name=${name} columns=${[column, "share", ...FIGURES]} rows=${rows} keys=${found.data.map((one) => one.id)} empty="No request has ended." />
    ${found.has_more && html`<p class="faint">The first 100 are shown; <code>penstock stats usage</code> prints all.</p>`}`;
}
