// A request that the page submits and follows to its end.
import {useEffect, useRef, useState} from "./vendor/hooks.js";
import {Act, html, usePoll} from "./parts.js";
import {follow, part, submit} from "./api.js";

const NOTHING = {id: null, busy: false, state: "", text: "", calls: [], progress: null, preview: null, result: null};
const MODELS_MS = 30_000;

/** What is shown of the newest request, and a function that submits one; while one is under way it does nothing. */
export function useAsk(may) {
  const [shown, setShown] = useState(/** @type {any} */ (NOTHING));
  const end = useRef(() => {});
  useEffect(() => () => end.current(), []);
  const ask = (request) => {
    if (shown.busy) return;
    setShown({...NOTHING, state: "sent", busy: true});
    end.current = (may("read") ? follow : submit)(request, (frame) => setShown((now) => told(now, frame)));
  };
  return [shown, ask];
}

/** What is shown of a request that is there, as it goes on. */
export function useFollow(id) {
  const [shown, setShown] = useState(/** @type {any} */ (NOTHING));
  useEffect(() => follow(null, (frame) => setShown((now) => told(now, frame)), id), [id]);
  return shown;
}

/** What is shown after one more frame. */
function told(now, frame) {
  const id = frame.request_id ?? now.id;
  switch (frame.type) {
    case "chunk": return {...now, id, text: now.text + frame.text, calls: joined(now.calls, frame.tool_calls), state: "running"};
    case "snapshot": return {...now, id, text: frame.text};
    case "restarted": return {...now, id, text: "", calls: [], state: "it runs again"};
    case "status": return {...now, id, state: frame.detail ?? frame.status};
    case "progress": return {...now, id, progress: frame, state: "running"};
    case "preview": return {...now, id, preview: frame};
    case "result": return {...now, id, busy: false, result: frame.result, calls: frame.result?.tool_calls?.map(flat) ?? now.calls,
      text: now.text || (frame.result?.text ?? ""), state: frame.error?.message ?? frame.status};
    case "error": return {...now, id, busy: false, state: `${frame.error.message} (${frame.error.code})`};
    case "away": return {...now, state: `the connection has ended (${frame.code}${frame.reason && `: ${frame.reason}`})`};
    default: return {...now, id};
  }
}

/** Calls of tools with more pieces of them. */
function joined(calls, pieces) {
  const found = [...calls];
  for (const {index, name, arguments: more} of pieces ?? [])
    found[index] = {name: name ?? found[index]?.name, arguments: (found[index]?.arguments ?? "") + (more ?? "")};
  return found;
}

const flat = (call) => call.function;

/** The calls of tools in an answer. */
export const Calls = ({calls}) => calls.filter(Boolean).map((one) => html`<p>calls <code><bdi>${one.name}</bdi></code></p><pre>${pretty(one.arguments)}</pre>`);

/** JSON text with indents; other text as it stands. */
export function pretty(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}

/** Where a request stands, with a link to it, and a button that ends it. */
export function Standing({of, may, tell}) {
  return html`<p class="row"><span class="faint" role="status">${of.state} ${of.progress && of.busy ? `, step ${of.progress.step} of ${of.progress.steps}` : ""}</span>
    ${of.id && (!may || may("read")) && html`<a href=${`#/requests/${part(of.id)}`}>the request</a>`}
    ${of.id && of.busy && may?.("cancel") && html`<${Act} label="cancel" about="cancel this request" path=${`/v1/requests/${part(of.id)}/cancel`} tell=${tell} />`}</p>`;
}

/** Models for a task, as the field `model` of a form; the first choice leaves it to the worker. */
export function ModelField({task, onChange}) {
  const [found] = usePoll(`/v1/models?task=${task}`, MODELS_MS);
  return html`<label>Model <select name="model" onChange=${(event) => onChange?.(event.target.value)}><option value="">the best for the task</option>${
    (found?.data ?? []).map((one) => html`<option value=${one.id}>${one.id}</option>`)}</select></label>`;
}
