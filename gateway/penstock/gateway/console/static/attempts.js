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

/** What is granted on a device and what other processes hold, as parts of its limit; with `told` in words too. */
export function Memory({of, told: shown = false}) {
  if (!of?.limit_bytes) return null;
  const {limit_bytes: limit, reserved_bytes: reserved = 0, measured_bytes: measured, foreign_bytes: foreign, engine_bytes: engine} = of;
  const share = (bytes) => ({width: `${Math.min(100, 100 * (bytes ?? 0) / limit)}%`});
  const told = [`${gib(reserved ?? 0)} of ${gib(limit)} reserved`, known("measured", measured), known("of it this engine", engine),
    known("of other processes", foreign)].filter(Boolean).join(", ");
  return html`<div class="bar" role="img" aria-label=${told} title=${told}>
      <i style=${share(reserved)}></i><i class="foreign" style=${share(foreign)}></i></div>${shown && html`<span class="faint">${told}</span>`}`;
}

const known = (name, bytes) => bytes === null || bytes === undefined ? "" : `${gib(bytes)} ${name}`;
