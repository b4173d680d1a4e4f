// What all views are made of.
import {h} from "./vendor/preact.js";
import {useEffect, useRef, useState} from "./vendor/hooks.js";
import htm from "./vendor/htm.js";
import {call, get, now, part} from "./api.js";

export const html = htm.bind(h);

/** @type {[number, string][]} */
const UNITS = [[86400, "d"], [3600, "h"], [60, "min"]];
/** A length of time: 12 s, 3 min, 2 h. */
export function duration(seconds) {
  for (const [size, unit] of UNITS) if (seconds >= size) return `${Math.floor(seconds / size)} ${unit}`;
  return seconds >= 10 || seconds === 0 ? `${Math.round(seconds)} s` : `${seconds.toFixed(1)} s`;
}
export const count = (number) => number.toLocaleString("en");
/** 12/s, 0.25/s. */
export const rate = (per_s) => `${per_s >= 10 ? count(Math.round(per_s)) : Number(per_s.toPrecision(2))}/s`;
/** @param {number} bytes */
export const gib = (bytes) => `${(bytes / 2 ** 30).toFixed(bytes < 2 ** 30 ? 2 : 1)} GiB`;
export const times = (number, one, more = `${one}s`) => `${count(number)} ${number === 1 ? one : more}`;
/** A code in words. A sentence may hold names such as gpu_1, and stays as it is. */
export const words = (code) => /^[a-z_]+$/.test(code) ? code.replaceAll("_", " ") : code;

/** Seconds since a time. */
export const age = (at) => Math.max(0, (now() - Date.parse(at)) / 1000);

/** How long ago something was; the exact time on hover. */
export function Ago({at}) {
  if (!at) return null;
  return html`<time datetime=${at} title=${at}>${duration(age(at))} ago</time>`;
}

/** When something will be, or how long ago it was due; the exact time on hover. */
export function Due({at}) {
  const ahead = (Date.parse(at) - now()) / 1000;
  return ahead > 0 ? html`<time datetime=${at} title=${at}>in ${duration(ahead)}</time>` : html`<${Ago} at=${at} />`;
}

/** A time, RFC 3339 or Unix seconds, as a field of this browser's time zone shows it. */
export function local(time) {
  const at = new Date(/^\d+$/.test(time ?? "") ? 1000 * Number(time) : time ?? NaN);
  return Number.isNaN(at.getTime()) ? "" : new Date(at.getTime() - 60_000 * at.getTimezoneOffset()).toISOString().slice(0, 19);
}

/** A link to a request; the key's own tenant needs no name. */
export const requestLink = (id, tenant = null) =>
  id && html`<a href=${`#/requests/${part(id)}${tenant ? `?tenant=${part(tenant)}` : ""}`}><code><bdi>${id}</bdi></code></a>`;

/** Codes of this page, which the table of the gateway does not have. */
const OWN = ["unreachable", "no_session", "not_copied", "unknown"];
/** The code of an error, as a link to what it means. */
export const Code = ({of}) => OWN.includes(of) || typeof of !== "string" ? html`<code>${of}</code>` : html`<a href=${`/docs#${of}`}><code>${of}</code></a>`;

/** An error of the API, whole, and how old the figures are that are shown still. */
export function Failure({error}) {
  return error && html`<div class=${error.status === 0 && "away"}><p class="bad" role="alert">${error.message} (<${Code} of=${error.code} />).</p>
    ${error.shown_at && html`<p class="faint">What is shown here is as of <${Ago} at=${error.shown_at} /></p>`}</div>`;
}

/**
 * [what a path answers, the newest error, ask at once, when it answered], asked again every `ms` while the page is looked at.
 * It ends with an answer that is final: any if `once`, a request that is done, what the key may not see, 410, and 404 if the path is of one `object`.
 * Nothing that another path has answered is ever shown under this one.
 * @returns {[any, any, () => void, string]}
 */
export function usePoll(path, ms, {once = false, object = false, read = get} = {}) {
  const [state, setState] = useState(/** @type {any} */ ({path, found: null, error: null, at: null}));
  const again = useRef(() => {});
  useEffect(() => {
    let timer, ended = false, final = false;
    const ask = async () => {
      if (!final && !document.hidden) {
        try {
          const found = await read(path);
          final = once || found?.done === true;
          if (!ended) setState({path, found, error: null, at: new Date(now()).toISOString()});
        } catch (error) {
          final = error.code === "forbidden" || error.status === 410 || object && error.status === 404;
          if (!ended) setState((before) => failed(before.path === path ? before : {path, found: null, at: null}, error));
        }
      }
      clearTimeout(timer);
      if (!ended && !final) timer = setTimeout(ask, ms);
    };
    again.current = () => { final = false; ask(); };
    const seen = () => document.hidden || ask();
    document.addEventListener("visibilitychange", seen);
    ask();
    return () => { ended = true; clearTimeout(timer); document.removeEventListener("visibilitychange", seen); };
  }, [path, ms]);
  const shown = state.path === path ? state : {found: null, error: null, at: null};
  return [shown.found, shown.error, () => again.current(), shown.at];
}

const failed = (before, error) => ({...before, error: Object.assign(error, {shown_at: before.at})});

/** What a redrive or a purge did. Others are done at once for conversations; else they ask for what comes later. */
function outcome({object, redriven, purged, skipped, error, remaining, count: commanded}) {
  if (commanded === 0) return "nothing to do: it has ended, runs already, or has this priority";
  if (purged !== undefined) return `${times(purged, "letter")} purged`;
  if (redriven === undefined) return object?.startsWith("conversation") ? "done" : "requested";
  return [`${times(redriven, "request")} redriven`, skipped.length && `${count(skipped.length)} skipped (${skipped[0].message})`,
    error?.message, remaining && `${count(remaining)} left`].filter(Boolean).join(", ");
}

/** A button that calls the API; `tell` hears what came of it, and `then` its answer. It keeps the focus meanwhile. */
export function Act({label, about, method = "POST", path, body, tell, confirm, then, danger = false}) {
  const [busy, setBusy] = useState(false);
  const act = async () => {
    if (busy || (confirm && !window.confirm(confirm))) return;
    setBusy(true);
    try {
      const answer = await call(method, path, body);
      tell({text: `${about ?? label}: ${outcome(answer)}`});
      then?.(answer);
    } catch (error) {
      tell({error});
    }
    setBusy(false);
  };
  return html`<button type="button" class=${danger && "danger"} aria-disabled=${busy} aria-label=${about ?? label} onClick=${act}>${label}</button>`;
}

/** Properties of an element that gets the focus when what had it inside has left. */
export function useFocus() {
  const box = useRef(/** @type {any} */ (null)), focused = useRef(/** @type {any} */ (null));
  useEffect(() => {
    if (!focused.current || focused.current.isConnected) return;
    focused.current = null;
    if (document.activeElement === document.body) box.current?.focus();
  });
  return {ref: box, onFocusIn: ({target}) => { focused.current = target; }};
}

/**
 * A table that scrolls on its own; `rows` are arrays of cells. `keys` name the rows, so that the focus stays in its row when others come.
 * When the row with the focus leaves, the table has the focus.
 */
export function Table({name, columns, rows, empty, keys = undefined}) {
  const kept = useFocus();
  if (!rows.length) return html`<p class="faint" tabindex="-1" ...${kept}>${empty}</p>`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${name} ...${kept}><table>
    <thead><tr>${columns.map((one) => html`<th scope="col">${one}</th>`)}</tr></thead>
    <tbody>${rows.map((row, at) => html`<tr key=${keys?.[at] ?? at}>${row.map((cell) => html`<td>${cell}</td>`)}</tr>`)}</tbody>
  </table></div>`;
}

/** Names and values in two columns; what is null or empty is left out. */
export function Facts({of}) {
  return html`<dl>${Object.entries(of).filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}</dl>`;
}
