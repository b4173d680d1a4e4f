// What operators did, newest first.
import {Ago, Failure, Table, html, local, usePoll} from "./parts.js";

const POLL_MS = 5000;
const PAGE = "20";
const FILTERS = ["action", "key_id", "since"];
const to = (filter) => `#/audit?${new URLSearchParams(filter)}`;

export function Audit({query}) {
  const filter = Object.fromEntries(FILTERS.map((name) => [name, query.get(name)]).filter(([, value]) => value));
  const after = query.get("after");
  const [found, error] = usePoll(`/v1/admin/audit?${new URLSearchParams({...filter, limit: PAGE, ...after && {after}})}`, POLL_MS);
  const older = found?.has_more && html`<a href=${to({...filter, after: found.last_id})}>Older</a>`;
  return html`<section aria-labelledby="audit"><h2 id="audit">Actions of operators</h2>
    <${Filters} key=${JSON.stringify(filter)} filter=${filter} />
    <${Failure} error=${error} />
    ${found && html`<${Actions} found=${found.data} filtered=${Object.keys(filter).length > 0} older=${older} />
      <p class="row">${after && html`<a href=${to(filter)}>Newest</a>`}${older}</p>`}
    <p class="faint">Each is recorded before it is done. The same by command: <code>penstock audit</code></p></section>`;
}

function Filters({filter}) {
  const search = (event) => {
    event.preventDefault();
    const given = [...new FormData(event.target)].map(([name, value]) => [name, `${value}`.trim()]).filter(([, value]) => value);
    location.hash = to(given.map(([name, value]) => [name, name === "since" ? new Date(value).toISOString() : value]));
  };
  return html`<form onSubmit=${search}><label>What <input name="action" size="24" placeholder="/v1/admin/keys" autocomplete="off" value=${filter.action ?? ""} /></label>
    <label>Id of the key <input name="key_id" size="14" autocomplete="off" value=${filter.key_id ?? ""} /></label>
    <label>Since <input name="since" type="datetime-local" step="1" value=${local(filter.since)} /></label>
    <button>Filter</button>${Object.keys(filter).length > 0 && html`<a href="#/audit">All</a>`}</form>`;
}

function Actions({found, filtered, older}) {
  const rows = found.map((one) => [html`<${Ago} at=${one.at} />`, html`<${Who} of=${one} />`, html`<code>${one.action}</code>`, html`<bdi>${one.target ?? ""}</bdi>`,
    html`<${Outcome} status=${one.status} />`, html`<bdi>${one.address ?? ""}</bdi>`,
    html`<details><summary aria-label=${`Record ${one.offset}`}>record</summary><pre>${JSON.stringify(one, null, 2)}</pre></details>`]);
  const none = older ? "None in this part of the log. There are older records." : filtered ? "No action matches the filter."
    : "None yet. Every change by a key with the scope admin is listed here, and commands that write to Kafka: penstock models pause MODEL is one.";
  return html`<${Table} name="List of actions" columns=${["when", "who", "what", "of what", "outcome", "from", "all of it"]} rows=${rows} keys=${found.map((one) => one.offset)} empty=${none} />`;
}

/** The key that acted, as a link to what else it did; the user of a command. */
function Who({of: {key_id, key_name, user, tenant}}) {
  if (!key_id) return user ? html`user <bdi>${user}</bdi>` : html`<span class="faint">no key</span>`;
  return html`<a href=${to({key_id})}><bdi>${key_name ?? key_id}</bdi></a>${tenant && html` of <bdi>${tenant}</bdi>`}`;
}

function Outcome({status}) {
  if (status === null) return html`<span class="warn">cut off, or under way</span>`;
  return html`<span class=${status < 400 ? "good" : "bad"}>${status < 400 ? "done" : "refused"} (${status})</span>`;
}
