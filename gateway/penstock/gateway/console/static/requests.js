// The caller's requests, and one of them.
import {Act, Ago, Failure, Table, duration, html, usePoll} from "./parts.js";
import {part} from "./api.js";

const STATUSES = ["accepted", "queued", "waiting_for_memory", "loading_model", "running", "retrying",
  "completed", "failed", "cancelled", "expired", "dead_lettered"];
const POLL_MS = 2000;
const link = (id) => html`<a href=${`#/requests/${part(id)}`}><code><bdi>${id}</bdi></code></a>`;

/** Why it waits or failed, in words. */
export function why(one) {
  if (one.done) return one.error?.message ?? "";
  const reason = one.waiting_for?.reason?.replaceAll("_", " ") ?? "";
  const place = one.position === null || one.position === undefined ? "" : `, place ${one.position}`;
  return [one.detail ?? reason].filter(Boolean).join("") + place;
}

/** The newest, by the filters in the page's address, which a search changes. */
export function Requests({query, limit = 20}) {
  const wanted = [...query].map(([name, value]) => `&${name}=${part(value)}`);
  const [found, error] = usePoll(`/v1/requests?limit=${limit}${wanted.join("")}`, POLL_MS);
  const search = (event) => {
    event.preventDefault();
    const {id, ...filters} = /** @type {Record<string, string>} */ (Object.fromEntries(new FormData(event.target)));
    const given = Object.entries(filters).map(([name, value]) => [name, value.trim()]).filter(([, value]) => value);
    location.hash = id.trim() ? `#/requests/${part(id.trim())}` : `#/requests?${new URLSearchParams(given)}`;
  };
  const rows = (found?.data ?? []).map((one) => [link(one.request_id), one.task.replaceAll("_", " "), one.status,
    one.model ?? "", html`<${Ago} at=${one.created_at} />`, why(one)]);
  return html`<section aria-labelledby="requests"><h2 id="requests">Requests</h2>
    <form onSubmit=${search}>
      <label>Id <input name="id" size="20" autocomplete="off" /></label>
      <label>Status <select name="status"><option value="">any</option>${
        STATUSES.map((one) => html`<option selected=${one === query.get("status")}>${one}</option>`)}</select></label>
      <label>Model <input name="model" size="14" autocomplete="off" value=${query.get("model") ?? ""} /></label>
      <button>Search</button></form>
    <${Failure} error=${error} />
    ${found && html`<${Table} name="Requests found" columns=${["request", "task", "status", "model", "accepted", "why"]}
      rows=${rows} empty="None. The form below sends one; so does: penstock submit 'Hello'" />`}</section>`;
}

export function Request({id, may, tell}) {
  const [one, error] = usePoll(`/v1/requests/${part(id)}`, POLL_MS);
  return html`<section aria-labelledby="request"><h2 id="request">Request <code><bdi>${id}</bdi></code></h2>
    <${Failure} error=${error} />
    ${one && html`<${Course} one=${one} />
      ${!one.done && may("cancel") && html`<${Act} label="cancel" about=${`cancel ${id}`}
        path=${`/v1/requests/${part(id)}/cancel`} tell=${tell} confirm=${`Cancel ${id}?`} />`}
      <details><summary>As the API tells it</summary><pre>${JSON.stringify(one, null, 2)}</pre></details>
      <p>The same by command: <code>penstock requests show ${id}</code></p>`}
    <p><a href="#/">Back</a></p></section>`;
}

/** What has become of it so far, in order. */
function Course({one}) {
  const rows = [["accepted", html`<${Ago} at=${one.created_at} />`, `priority ${one.priority}`]];
  for (const attempt of one.history ?? [])
    rows.push([`attempt ${attempt.attempt}`, html`<${Ago} at=${attempt.at} />`, [attempt.worker_id, attempt.device, attempt.reason, attempt.message].filter(Boolean).join(", ")]);
  const last = one.done ? one.error?.message ?? "" : why(one);
  rows.push([`${one.status.replaceAll("_", " ")}, attempt ${one.attempt}`, one.done ? html`<${Ago} at=${one.finished_at} />` : "now", [one.model, last].filter(Boolean).join(": ")]);
  const spans = Object.entries(one.timings ?? {}).filter(([name, value]) => name.endsWith("_ms") && value !== null)
    .map(([name, value]) => `${name.slice(0, -3).replaceAll("_", " ")} ${duration(value / 1000)}`);
  return html`<${Table} name="Course" columns=${["what", "when", "why"]} rows=${rows} />
    ${spans.length ? html`<p class="faint">${spans.join(", ")}</p>` : ""}`;
}
