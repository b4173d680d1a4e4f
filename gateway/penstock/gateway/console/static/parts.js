// What all views are made of.
import {h} from "./vendor/preact.js";
import {useEffect, useRef, useState} from "./vendor/hooks.js";
import htm from "./vendor/htm.js";
import {call, get} from "./api.js";

export const html = htm.bind(h);

const UNITS = [[86400, "d"], [3600, "h"], [60, "min"]];
/** A length of time: 12 s, 3 min, 2 h. */
export function duration(seconds) {
  for (const [size, unit] of UNITS) if (seconds >= size) return `${Math.floor(seconds / size)} ${unit}`;
  return seconds >= 10 || seconds === 0 ? `${Math.round(seconds)} s` : `${seconds.toFixed(1)} s`;
}
export const count = (number) => number.toLocaleString("en");
export const gib = (bytes) => `${(bytes / 2 ** 30).toFixed(bytes < 2 ** 30 ? 2 : 1)} GiB`;
export const times = (number, one, more = `${one}s`) => `${count(number)} ${number === 1 ? one : more}`;

/** How long ago something was; the exact time on hover. */
export function Ago({at}) {
  if (!at) return null;
  const seconds = Math.max(0, (Date.now() - Date.parse(at)) / 1000);
  return html`<time datetime=${at} title=${at}>${duration(seconds)} ago</time>`;
}

/** An error of the API, whole. */
export function Failure({error}) {
  return error && html`<p class="bad" role="alert">${error.message} (<code>${error.code}</code>).${" "}
    <a href="/docs">The routes and their errors</a></p>`;
}

/**
 * [what a path answers, the newest error, ask at once], asked again every `ms` while the page is looked at.
 * Nothing that another path has answered is ever shown under this one.
 */
export function usePoll(path, ms) {
  const [state, setState] = useState({path, found: null, error: null});
  const again = useRef(() => {});
  useEffect(() => {
    let timer, ended = false;
    const ask = async () => {
      clearTimeout(timer);
      if (path !== null && !document.hidden) {
        try {
          const found = await get(path);
          if (!ended) setState({path, found, error: null});
        } catch (error) {
          if (!ended) setState((before) => ({path, found: before.path === path ? before.found : null, error}));
        }
      }
      if (!ended) timer = setTimeout(ask, ms);
    };
    again.current = ask;
    const seen = () => document.hidden || ask();
    document.addEventListener("visibilitychange", seen);
    ask();
    return () => { ended = true; clearTimeout(timer); document.removeEventListener("visibilitychange", seen); };
  }, [path, ms]);
  const now = state.path === path ? state : {found: null, error: null};
  return [now.found, now.error, () => again.current()];
}

/** A button that calls the API; `tell` hears what came of it. */
export function Act({label, about, path, body, tell, confirm}) {
  const [busy, setBusy] = useState(false);
  const act = async () => {
    if (confirm && !window.confirm(confirm)) return;
    setBusy(true);
    try {
      await call("POST", path, body);
      tell({text: `${about ?? label}: asked for`});
    } catch (error) {
      tell({error});
    }
    setBusy(false);
  };
  return html`<button type="button" disabled=${busy} aria-label=${about ?? label} onClick=${act}>${label}</button>`;
}

/** A table that scrolls on its own; `rows` are arrays of cells. */
export function Table({name, columns, rows, empty}) {
  if (!rows.length) return html`<p class="faint">${empty}</p>`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${name}><table>
    <thead><tr>${columns.map((one) => html`<th scope="col">${one}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr>${row.map((cell) => html`<td>${cell}</td>`)}</tr>`)}</tbody>
  </table></div>`;
}
