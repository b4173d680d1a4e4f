// Fields of a form: those that a JSON Schema describes, images that are uploaded as artifacts, and JSON.
import {useRef, useState} from "./vendor/hooks.js";
import {Failure, html} from "./parts.js";
import {call, part} from "./api.js";

const KEPT_S = 86_400;
const valid = (text) => { try { JSON.parse(text); return true; } catch { return false; } };

/** A text of JSON; `onValue` gets what it says, undefined while it says nothing or is no JSON. */
export function JsonField({label, hint, start, onValue, required}) {
  const typed = ({target}) => {
    const text = target.value.trim(), good = !text || valid(text);
    target.setCustomValidity(good ? "" : "Not valid JSON.");
    onValue(text && good ? JSON.parse(text) : undefined);
  };
  return html`<label class="wide">${label} <textarea rows="3" spellcheck="false" required=${required} placeholder="JSON" title=${hint}
    onInput=${typed}>${start === undefined ? "" : JSON.stringify(start, null, 2)}</textarea></label>`;
}

/** Images by their artifacts: `ids` of this tenant, uploaded here or named. One, unless `many`. */
export function ImagesField({label, ids, onIds, many = false, required = false}) {
  const newest = useRef(ids);
  newest.current = ids;
  const [error, setError] = useState(null);
  const upload = async ({target}) => {
    setError(null);
    try {
      const made = [];
      for (const file of target.files) made.push((await call("POST", `/v1/artifacts?ttl_s=${KEPT_S}`, file)).artifact_id);
      onIds(many ? [...newest.current, ...made] : made.slice(0, 1));
    } catch (failure) {
      setError(failure);
    }
    target.value = "";
  };
  return html`<div><label>${label} <input type="file" accept="image/*" multiple=${many} required=${required && !ids.length} onChange=${upload} /></label>
    <p class="row">${ids.map((id) => html`<img class="small" src=${`/v1/artifacts/${part(id)}/content`} alt=${`${label} ${id}`} />
      <button type="button" aria-label=${`remove ${label} ${id}`} onClick=${() => onIds(ids.filter((one) => one !== id))}>remove</button>`)}</p>
    <${Failure} error=${error} /></div>`;
}

/** A schema without null and references: {kind, of} with what a field needs. */
export function plain(schema, schemas) {
  const forms = (schema.anyOf ?? [schema]).filter((one) => one.type !== "null");
  const [of] = forms;
  if (of.$ref) return {kind: of.$ref.endsWith("/ImageInput") ? "image" : "json", of: schemas[of.$ref.split("/").at(-1)]};
  if (of.enum) return {kind: "choice", of};
  if (of.type === "boolean") return {kind: "choice", of: {enum: [true, false]}};
  if (of.type === "integer" || of.type === "number") return {kind: "number", of};
  if (of.type !== "string") return {kind: "json", of};
  if (forms.some((one) => one.type === "array" && one.items.type === "string")) return {kind: "lines", of};
  return {kind: of.maxLength || of.pattern || of.format ? "text" : "long", of};
}

/** As browsers take it, in whose classes of characters a hyphen is escaped. */
const pattern = ({pattern: of}) => of?.replaceAll("-]", "\\-]");

/** The field of one property. `onValue` gets undefined for a field that is left empty; what was typed stays as it was typed. */
export function SchemaField({name, schema, schemas, value, onValue, required}) {
  const {kind, of} = plain(schema, schemas);
  const label = name.replaceAll("_", " "), hint = schema.description ?? of.description;
  const typed = (read) => ({target}) => onValue(target.value === "" ? undefined : read(target.value));
  const said = html`${label}${hint && html` <span class="faint">${hint}</span>`}`;
  switch (kind) {
    case "image": return html`<${ImagesField} label=${label} ids=${value?.artifact_id ? [value.artifact_id] : []} required=${required}
      onIds=${([id]) => onValue(id && {artifact_id: id})} />`;
    case "json": return html`<${JsonField} label=${said} hint=${hint} start=${value} onValue=${onValue} required=${required} />`;
    case "choice": return html`<label>${said} <select required=${required} onChange=${typed((text) => of.enum.find((one) => `${one}` === text))}>
      <option value=""></option>${of.enum.map((one) => html`<option selected=${one === value}>${`${one}`}</option>`)}</select></label>`;
    case "number": return html`<label>${said} <input type="number" min=${of.minimum} max=${of.maximum} step=${of.type === "integer" ? 1 : "any"}
      required=${required} defaultValue=${value} onInput=${typed(Number)} /></label>`;
    case "lines": return html`<label class="wide">${label} <span class="faint">One a line</span> <textarea rows="4" required=${required} defaultValue=${lines(value)}
      onInput=${typed(unlined)}></textarea></label>`;
    case "long": return html`<label class="wide">${said} <textarea rows="2" required=${required} value=${value ?? ""} onInput=${typed(String)}></textarea></label>`;
    default: return html`<label>${said} <input maxlength=${of.maxLength} pattern=${pattern(of)} required=${required} value=${value ?? ""}
      autocomplete="off" onInput=${typed(String)} /></label>`;
  }
}

const lines = (value) => Array.isArray(value) ? value.join("\n") : value ?? "";

function unlined(text) {
  const some = text.split("\n");
  return some.length === 1 ? text : some.filter((line) => line.trim());
}
