// The attempts of a request, each with the memory of its device as it ended.
import {Ago, Code, Table, duration, gib, html, times} from "./parts.js";

const COLUMNS = ["attempt", "worker, device", "started", "ran for", "error", "memory of the device"];

export function Attempts({history, dropped}) {
  const rows = history.map((one) => [one.attempt, html`<bdi>${one.worker_id}</bdi> ${one.device}`, html`<${Ago} at=${one.started_at} />`,
    ran(one), one.error ? html`<${Code} of=${one.error.code} /> ${one.error.message}` : "completed", html`<${Memory} of=${one.memory} told=${true} />`]);
  return html`<${Table} name="List of attempts" columns=${COLUMNS} rows=${rows} empty="None is recorded." />
    ${dropped ? html`<p class="faint">${times(dropped, "earlier attempt")} not shown</p>` : ""}`;
}

function ran({started_at, ended_at}) {
  if (!ended_at) return "its worker was killed";
  return started_at ? duration((Date.parse(ended_at) - Date.parse(started_at)) / 1000) : "";
}

/**
 * Of a device's limit, what is reserved, pale where it is not measured, and what other processes hold, as parts of a bar; with `told` in
 * words too. A part for each of its holders, if they are known.
 */
export function Memory({of, told: shown = false}) {
  if (!of?.limit_bytes) return null;
  const {limit_bytes: limit, measured_bytes: measured, foreign_bytes: foreign, engine_bytes: engine, holders} = of, reserved = of.reserved_bytes ?? 0;
  const share = (bytes, whole = limit) => ({width: `${Math.min(100, 100 * (bytes ?? 0) / whole)}%`});
  const told = [`${gib(reserved)} of ${gib(limit)} reserved`, known("measured", measured), known("of it this engine", engine),
    known("of other processes", foreign)].filter(Boolean).join(", ");
  const rest = reserved - (holders ?? []).reduce((sum, one) => sum + one.bytes, 0);
  const parts = [...holders ?? [], {model: holders ? "runs" : "reserved", bytes: rest, measured_bytes: holders ? null : measured}].filter((one) => one.bytes > 0);
  return html`<div class="bar" role="img" aria-label=${told} title=${told}>
      ${parts.map((one) => html`<i style=${share(one.bytes)} title=${[`${one.model}: ${gib(one.bytes)} reserved`, known("measured", one.measured_bytes)].filter(Boolean).join(", ")}><b
        style=${share(one.measured_bytes ?? one.bytes, one.bytes)}></b></i>`)}
      <i class="foreign" style=${share(foreign)} title=${known("of other processes", foreign)}></i></div>${shown && html`<span class="faint">${told}</span>`}`;
}

const known = (name, bytes) => bytes === null || bytes === undefined ? "" : `${gib(bytes)} ${name}`;
