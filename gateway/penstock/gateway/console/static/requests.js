// The caller's requests, or those of a tenant: the newest on the first screen, and all of them, live, with commands for many.
import {useEffect, useMemo, useRef, useState} from "./vendor/hooks.js";
import {Act, Ago, Failure, Table, duration, html, requestLink, times, usePoll, words} from "./parts.js";
import {now} from "./api.js";
import {LiveList, MOST_ROWS, ofAll} from "./live.js";
import {Walk, start, useWalk} from "./walk.js";

const STATUSES = ["waiting", "unsuccessful", "accepted", "queued", "waiting_for_memory", "loading_model", "running", "retrying",
  "completed", "failed", "cancelled", "expired", "dead_lettered"];
const TASKS = ["text_generation", "embedding", "image_generation", "image_editing", "image_to_text", "image_processing",
  "summarization", "conversation_items"];
const CLASSES = ["high", "medium", "low"];
const AGES = {60: "1 min", 600: "10 min", 3600: "1 h", 86400: "1 d"};
const FILTERS = ["id_contains", "status", "waiting_for", "task", "model", "class", "older_than_s", "tenant"];
const COLUMNS = ["request", "status", "task", "class", "model", "accepted", "why"];
const POLL_MS = 3000;
/** As the style sheet has them. */
const ROW_PX = 30, BESIDE = 12, SPARE = 4;
const AT_ONCE = 200;
/** In place of a tenant, for operators. */
const ALL = "*";

const klass = (priority) => priority <= 3 ? "high" : priority <= 7 ? "medium" : "low";
const color = (one) => one.status === "completed" ? "good" : one.done && one.status !== "cancelled" ? "bad" : one.status === "running" ? "good" : "";

/** The reasons of `waiting_for`; one that is not here is shown as it is. */
const REASONS = {
  no_worker: "no live worker has its model", transaction: "an open transaction on its partition", paused: "its model or class is paused",
  conversation: "the turn before it in its conversation", memory: "memory", model_loading: "its model is loading",
  slack: "room that is kept for more urgent work", class: "more urgent and earlier requests", tenant_share: "another tenant's share",
  scheduled: "a later time to start",
};
export const waitsFor = (reason) => REASONS[reason] ?? words(reason);

/** Why it waits or failed, in words. */
export function why(one) {
  if (one.done) return one.error?.message ?? "";
  const {reason, estimated_start_at: at} = one.waiting_for ?? {};
  const waits = reason === "scheduled" ? `starts in ${duration(Math.max(0, (Date.parse(at) - now()) / 1000))}, at ${at}` : reason ? waitsFor(reason) : "";
  const place = one.position === null || one.position === undefined ? "" : one.position === 0 ? "next in the queue" : `place ${one.position}`;
  return [one.detail ?? waits, place].filter(Boolean).join(", ");
}

/** A row of a list; `all`: of all tenants. */
const cells = (one, all = false) => [requestLink(one.request_id, one.tenant), ...all ? [html`<bdi>${one.tenant}</bdi>`] : [], html`<span class=${color(one)}>${words(one.status)}</span>`, words(one.task),
  `${klass(one.priority)}\u00a0${one.priority}`, html`<bdi>${one.model ?? ""}</bdi>`, html`<${Ago} at=${one.created_at} />`, why(one)];

const columns = (all) => all ? [COLUMNS[0], "tenant", ...COLUMNS.slice(1)] : COLUMNS;

/** The filters of an address, by name; others are left out. */
const filtersOf = (query) => Object.fromEntries(FILTERS.map((name) => [name, query.get(name)]).filter(([, value]) => value));

/** A search form. What is typed in it stays until the address has other filters. */
function Filters({filters, may}) {
  const search = (event) => {
    event.preventDefault();
    const given = [...new FormData(event.target)].map(([name, value]) => [name, `${value}`.trim()]).filter(([, value]) => value);
    location.hash = `#/requests?${new URLSearchParams(given)}`;
  };
  const choice = (name, label, options) => html`<label>${label} <select name=${name} value=${filters[name] ?? ""}><option value="">any</option>${
    options.map(([value, shown]) => html`<option value=${value}>${shown}</option>`)}</select></label>`;
  const text = (name, label, size) => html`<label>${label} <input name=${name} size=${size} autocomplete="off" value=${filters[name] ?? ""} /></label>`;
  const named = (names) => names.map((one) => [one, words(one)]);
  return html`<form class="filters" onSubmit=${search}>${text("id_contains", "Id", 20)}${choice("status", "Status", named(STATUSES))}
    ${choice("waiting_for", "Waits for", Object.entries(REASONS))}${choice("task", "Task", named(TASKS))}${text("model", "Model", 14)}${choice("class", "Class", named(CLASSES))}
    ${choice("older_than_s", "Older than", Object.entries(AGES))}${may("admin") && text("tenant", "Tenant", 10)}
    <button>Search</button>${Object.keys(filters).length > 0 && html`<a href="#/requests">All</a>`}
    ${may("admin") && filters.tenant !== ALL && html`<a href=${`#/requests?${new URLSearchParams({...filters, tenant: ALL})}`}>All tenants</a>`}</form>`;
}

const NEWEST = {newest: "", "newest that failed": "unsuccessful"};

/** Runs a dead letter of any tenant again. One that was refused as invalid holds no request. */
export const Again = ({one, tell}) => one.status === "dead_lettered" && one.error?.type !== "invalid_request_error" && html`<${Act} label="run again" about=${`run ${one.request_id} of ${one.tenant} again`}
  path="/v1/admin/dlq/redrive" body=${{filter: {request_id: one.request_id, tenant: one.tenant}}} tell=${tell} confirm=${`Run ${one.request_id} again?`} />`;

/** The newest on the first screen, for operators those of all tenants, with what redrives a dead letter. */
export function Newest({may, tell}) {
  const all = may("admin"), [chosen, choose] = useState("newest"), filters = all ? {tenant: ALL} : {};
  const asked = new URLSearchParams({...filters, limit: 20, ...NEWEST[chosen] && {status: NEWEST[chosen]}});
  const [found, error] = usePoll(`${all ? "/v1/admin/requests" : "/v1/requests"}?${asked}`, POLL_MS);
  const row = (one) => [...cells(one, all), ...all ? [html`<${Again} one=${one} tell=${tell} />`] : []];
  return html`<section aria-labelledby="requests"><div class="row"><h2 id="requests">Requests${all ? " of all tenants" : ""}</h2>
      <fieldset class="choice"><legend>Shown</legend>${Object.keys(NEWEST).map((name) => html`<label><input type="radio" name="shown" checked=${name === chosen} onChange=${() => choose(name)} />${name}</label>`)}</fieldset>
      <a href=${`#/requests${all ? `?tenant=${ALL}` : ""}`}>All requests, live</a></div>
    <${Filters} filters=${filters} may=${may} />
    <${Failure} error=${error} />
    ${found && html`<${Table} name="List of requests" columns=${[...columns(all), ...all ? ["action"] : []]} rows=${found.data.map(row)} keys=${found.data.map(all ? ofAll : (one) => one.request_id)}
      empty=${NEWEST[chosen] ? "None has failed." : "None. The form below sends one; so does: penstock submit 'Hello'"} />`}</section>`;
}

/** All that match the filters in the page's address. */
export function Requests({query, may, tenant}) {
  const filters = filtersOf(query);
  const route = may("admin") ? "/v1/admin/requests" : "/v1/requests";
  const wanted = new URLSearchParams(Object.entries(filters).filter(([name]) => name !== "tenant" || may("admin")));
  const path = `${route}?${wanted}`.replace(/\?$/, "");
  const form = useMemo(() => html`<${Filters} filters=${filters} may=${may} />`, [path]);
  const named = may("admin") && filters.tenant || tenant, all = named === ALL;
  return html`<section aria-labelledby="requests"><h2 id="requests">Requests of ${all ? "all tenants" : html`<bdi>${named}</bdi>`}</h2>
      ${form}
      <${Rows} key=${path} path=${path} all=${all} /></section>
    ${may("cancel") && html`<${Many} key=${`many ${path}`} filters=${filters} may=${may} />`}`;
}

/** The first row that is in sight, and the one behind the last. */
const inSight = (box) => [Math.floor((box?.scrollTop ?? 0) / ROW_PX), Math.ceil(((box?.scrollTop ?? 0) + (box?.clientHeight || 600)) / ROW_PX)];

/**
 * A list that is kept up to date, and which of its rows are drawn: those in sight of the `box`, and some beside them.
 * What is looked at stays in its place when rows come above it; at the top of the list that is so while a row has the focus.
 */
function useRows(path, all) {
  const [, draw] = useState(0);
  const list = useRef(/** @type {any} */ (null)), box = useRef(/** @type {any} */ (null)), pending = useRef(0);
  const first = useRef(/** @type {any} */ (null)), drawn = useRef([0, 0]);
  const stay = () => {
    const {current} = box;
    if (!current || !first.current || current.scrollTop < ROW_PX && !current.querySelector(":focus")) return;
    const moved = list.current.place(first.current.row) - first.current.at;
    if (moved) current.scrollTop += moved * ROW_PX;
  };
  const redraw = () => { pending.current ||= requestAnimationFrame(() => { pending.current = 0; stay(); draw((number) => number + 1); }); };
  useEffect(() => {
    list.current = new LiveList(path, redraw, all ? ofAll : undefined);
    const end = list.current.start();
    return () => { end(); cancelAnimationFrame(pending.current); };
  }, [path]);
  const {rows = [], more = false, error = null} = list.current ?? {};
  const [seen, seen_to] = inSight(box.current);
  const top = Math.max(0, seen - BESIDE), shown = rows.slice(top, seen_to + BESIDE);
  drawn.current = [top, top + shown.length];
  if (list.current) {
    list.current.top = top;
    first.current = rows[seen] ? {row: rows[seen], at: seen} : null;
  }
  /** Rows beside those in sight are drawn too: scrolling draws anew only when few of them are left. */
  const scrolled = () => {
    const [from, to] = inSight(box.current), [first_drawn, end_drawn] = drawn.current;
    if (from < first_drawn + SPARE && first_drawn > 0 || to > end_drawn - SPARE && end_drawn < rows.length) redraw();
  };
  const near = more && top + shown.length + 2 * BESIDE >= rows.length;
  useEffect(() => { if (near && !error) list.current.next(); });
  return {list: list.current, box, top, shown, scrolled, redraw};
}

function Rows({path, all}) {
  const {list, box, top, shown, scrolled, redraw} = useRows(path, all);
  const {rows = [], more = false, error = null, loaded = false, live = true} = list ?? {};
  const names = columns(all);
  const hold = ({target}) => { list.live = target.checked; redraw(); list.again(); };
  const pad = (number) => html`<tr aria-hidden="true" style=${{height: `${number * ROW_PX}px`}}><td colspan=${names.length}></td></tr>`;
  return html`<div class="row"><label><input type="checkbox" checked=${live} onChange=${hold} /> live</label>
      <span class="faint" id="loaded">${loaded ? `${times(rows.length, "request")} here, newest first${!more ? "" : rows.length < MOST_ROWS ? "; scroll for older ones" : "; older ones need a filter"}` : "Asking…"}</span></div>
    <${Failure} error=${error} />
    ${loaded && rows.length === 0 && html`<p class="faint">No request matches. One is sent by: <code>penstock submit 'Hello'</code></p>`}
    <div class="scroll requests" ref=${box} tabindex="0" role="region" aria-label="List of requests" hidden=${rows.length === 0} onScroll=${scrolled}>
      <table aria-rowcount=${more ? -1 : rows.length + 1}><thead><tr>${names.map((one) => html`<th scope="col" class=${`of-${one}`}>${one}</th>`)}</tr></thead>
        <tbody>${pad(top)}${shown.map((one, at) => html`<${Line} key=${list.id(one)} one=${one} all=${all} index=${top + at + 2} />`)}
          ${pad(Math.max(0, rows.length - top - shown.length))}</tbody></table></div>`;
}

function Line({one, all, index}) {
  const shown = cells(one, all).slice(0, -1), reason = why(one);
  return html`<tr aria-rowindex=${index}>${shown.map((cell) => html`<td>${cell}</td>`)}<td title=${reason}><div class="why">${reason}</div></td></tr>`;
}

const COMMANDS = {
  cancel: {label: "cancel", path: "/v1/requests/cancel", body: {}},
  ...Object.fromEntries(CLASSES.map((one) => [one, {label: `give the priority ${one}`, path: "/v1/requests/reprioritize", body: {priority: one}}])),
};

/** Commands for all that match the filters and have not ended: a count first, then in parts, so that it shows how far it is. */
function Many({filters, may}) {
  const [chosen, setChosen] = useState("cancel");
  const walk = useWalk();
  if (!Object.keys(filters).length) return html`<section><p class="faint">Commands for many need a filter: choose one above.</p>
    ${walk && html`<${Walk} walk=${walk} />`}</section>`;
  const {tenant, ...own} = filters, {label, path, body} = COMMANDS[chosen];
  const where = {...own, ...own.older_than_s && {older_than_s: Number(own.older_than_s)}, ...tenant && may("admin") && {tenant}, ...body};
  const about = `requests ${chosen} ${JSON.stringify(filters)}`;
  const begin = (more, of) => start({path, body: {...where, ...more}, counted: "count", about, of, name: Object.values(filters).join(", "),
    said: (number, dry) => dry ? `${times(number, "request")} ${number === 1 ? "matches" : "match"}` : `${label}: requested for ${times(number, "request")}`});
  const next = walk && {label: `${label}: ${times(walk.done, "request")}`,
    act: () => begin({limit: AT_ONCE, accepted_before: walk.newest.accepted_before}, walk.done)};
  return html`<section aria-labelledby="many"><h2 id="many">All that match and have not ended</h2>
    <div class="row"><label>Command <select onChange=${({target}) => setChosen(target.value)} disabled=${walk?.busy}>${Object.entries(COMMANDS).map(([name, one]) =>
        html`<option value=${name} selected=${name === chosen}>${one.label}</option>`)}</select></label>
      <button type="button" aria-disabled=${walk?.busy} onClick=${() => begin({dry_run: true})}>Count them</button></div>
    ${walk && html`<${Walk} walk=${walk} about=${about} next=${next} />`}
    ${filters.status === "dead_lettered" && may("admin") && html`<p>These have ended. Their dead letters can be redriven:
      <a href=${`#/dead-letters?${new URLSearchParams(Object.entries(filters).filter(([name, value]) => name === "model" || name === "tenant" && value !== ALL))}`}>dead letters</a>.</p>`}</section>`;
}
