// Charts of the last hours, from GET /v1/admin/history.
import {useEffect, useRef, useState} from "./vendor/hooks.js";
import UPlot from "./vendor/uplot.js";
import {Failure, count, duration, gib, html, rate, times as number_of} from "./parts.js";

/** The ranges that can be chosen: what is asked for, and how often. */
export const RANGES = {
  "1 h": {path: "/v1/admin/history?range_s=3600&step_s=60", poll_ms: 10_000},
  "6 h": {path: "/v1/admin/history?range_s=21600&step_s=120", poll_ms: 20_000},
  "48 h": {path: "/v1/admin/history?range_s=172800&step_s=900", poll_ms: 60_000},
};
const FAILED = ["failed", "dead_lettered", "expired"];
const HEIGHT = 150;
/** A rate is of so many seconds at least: a last step that has just begun is taken together with the one before it. */
const ENOUGH_S = 20;
const MOST_DEVICES = 8;
const TONES = {high: "amber", medium: "blue", low: "green"};

const known = (list) => list.filter((value) => value != null);
const sum = (list) => known(list).reduce((all, one) => all + one, 0);
const most = (list) => Math.max(0, ...known(list));
export const last = (list) => list.at(-1) ?? 0;
/** The sum of lists by step, where `like` is known. */
const plus = (lists, like) => like.map((value, at) => value === null ? null : sum(lists.map((one) => one[at])));
const seconds = (ms) => ms < 1000 ? `${Math.round(ms)} ms` : ms < 10_000 ? `${Number((ms / 1000).toPrecision(2))} s` : duration(ms / 1000);
const clock = (s) => new Date(s * 1000).toLocaleTimeString("en", {hour: "2-digit", minute: "2-digit", hourCycle: "h23"});
const day = (s) => new Date(s * 1000).toLocaleDateString("en", {day: "numeric", month: "short"});
/** @param {(number | null)[]} list */
const in_gib = (list) => list.map((bytes) => bytes === null ? null : bytes / 2 ** 30);

/** What the newest figures are of: a step holds the most of its time. */
export const newest = ({step_s}) => `in the last ${step_s > 60 ? duration(step_s) : "minute"}`;

/** How many ended in the whole range, by status. */
export const ended = (history) => Object.fromEntries(Object.entries(history.ended).map(([status, list]) => [status, sum(list)]));

/** Counts by step, by the second. */
export function rates({step_s, times, until}, counts) {
  const lasted = Date.parse(until) / 1000 - times.at(-1), before = lasted < ENOUGH_S ? counts.at(-2) ?? null : null;
  return counts.map((number, at) => number === null ? null : at < times.length - 1 ? number / step_s
    : before === null ? number / Math.max(ENOUGH_S, lasted) : (number + before) / (step_s + lasted));
}

/** The places of values that no line reaches: nothing is known right before and behind them. */
export const alone = (values) => [...values.keys()].filter((at) => values[at] != null && values[at - 1] == null && values[at + 1] == null);

/** `history`: what the gateway answered for `range`, or null. */
export function Charts({history, error, range, choose}) {
  const live = history?.devices.filter((one) => known(one.limit_bytes.slice(-2)).length).slice(0, MOST_DEVICES) ?? [];
  const others = history && history.devices.length + history.devices_omitted - live.length;
  return html`<section aria-labelledby="history"><div class="row"><h2 id="history">Last hours</h2>
      <fieldset class="choice"><legend>Range</legend>${Object.keys(RANGES).map((name) => html`<label><input type="radio" name="range"
        checked=${name === range} onChange=${() => choose(name)} />${name}</label>`)}</fieldset></div>
    <${Failure} error=${error} />
    ${history && html`<div class="columns charts">
      <${Throughput} history=${history} range=${range} />
      <${Outputs} history=${history} range=${range} />
      <${Times} history=${history} />
      <${Queues} history=${history} />
      ${live.map((one) => html`<${Memory} key=${one.worker_id + one.device} history=${history} one=${one} />`)}
      </div>
      ${others > 0 && html`<p class="faint">Not shown: ${number_of(others, "device")}, of workers that have gone or beyond the first ${MOST_DEVICES} (<code>GET /v1/admin/history</code>)</p>`}`}</section>`;
}

function Throughput({history, range}) {
  const {times, accepted} = history, ends = plus(Object.values(history.ended), accepted);
  const failed = plus(FAILED.map((status) => history.ended[status] ?? []), accepted);
  const text = sum(accepted) + sum(ends) === 0
    ? html`No request in the last ${range}. <code>penstock submit "Hello"</code> sends one.`
    : `${count(sum(accepted))} accepted in the last ${range}, at most ${rate(most(rates(history, accepted)))}; ${count(sum(failed))} failed, dead-lettered or expired.`;
  return html`<${Chart} title="Throughput" text=${text} times=${times} show=${rate} lines=${[
    {name: "accepted", tone: "blue", values: rates(history, accepted)},
    {name: "ended", tone: "green", values: rates(history, ends)},
    {name: "failed", tone: "red", values: rates(history, failed)}]} />`;
}

/** Tokens and images count when their request ends. */
function Outputs({history, range}) {
  const {times, prompt_tokens: prompt, completion_tokens: made, images = []} = history;
  const chart = (title, lines, text) => html`<${Chart} title=${title} text=${text} times=${times} show=${rate}
    lines=${lines.map(([name, tone, counts]) => ({name, tone, values: rates(history, counts)}))} />`;
  const text = `${count(sum(made))} generated in the last ${range}, at most ${rate(most(rates(history, made)))}; ${count(sum(prompt))} of prompts.`;
  return html`${chart("Tokens", [["generated", "blue", made], ["of prompts", "amber", prompt]], text)}
    ${sum(images) > 0 && chart("Images", [["made", "blue", images]], `${number_of(sum(images), "image")} in the last ${range}, at most ${rate(most(rates(history, images)))}.`)}`;
}

function Times({history}) {
  const {times, wait_ms: wait, first_token_ms: first} = history;
  const text = known(wait.p95).length
    ? `At most, p95 of the wait was ${seconds(most(wait.p95))}${known(first.p95).length ? `, and of the first token ${seconds(most(first.p95))} from a worker's taking the request` : ""}.`
    : "No run has ended.";
  return html`<${Chart} title="Wait and first token" text=${text} times=${times} show=${seconds} lines=${[
    {name: "wait p50", tone: "amber", values: wait.p50}, {name: "wait p95", tone: "amber", values: wait.p95, dash: true},
    {name: "first token p50", tone: "blue", values: first.p50}, {name: "first token p95", tone: "blue", values: first.p95, dash: true}]} />`;
}

function Queues({history}) {
  const classes = Object.entries(history.queues);
  const text = `${classes.map(([name, one]) => `${name} ${count(last(one.depth))} ${newest(history)}, at most ${count(most(one.depth))}`).join("; ")}.`;
  return html`<${Chart} title="Waiting requests" text=${text} times=${history.times} least=${4} show=${(value) => count(Math.round(value))}
    lines=${classes.map(([name, one]) => ({name, tone: TONES[name], values: one.depth}))} />`;
}

function Memory({history, one}) {
  const {reserved_bytes: reserved, limit_bytes: limit, foreign_bytes: foreign} = one;
  const text = `At most ${gib(most(reserved))} of ${gib(most(limit))} reserved; other processes held at most ${gib(most(foreign))}.`;
  return html`<${Chart} title=${`Memory of ${one.device} on ${one.worker_id}`} text=${text} times=${history.times} show=${(value) => `${Number(value.toPrecision(3))} GiB`} lines=${[
    {name: "reserved", tone: "blue", values: in_gib(reserved)}, {name: "other processes", tone: "amber", values: in_gib(foreign)},
    {name: "limit", tone: "grey", values: in_gib(limit), dash: true}]} />`;
}

/**
 * A chart with its legend; the text says the same in words. A gap is where nothing is known.
 * A line's colour is that of its entry in the legend. The legend shows the figures under the pointer, else the newest.
 */
function Chart({title, text, times, lines, show, least = 0}) {
  const place = useRef(/** @type {any} */ (null)), plot = useRef(/** @type {any} */ (null));
  const [at, setAt] = useState(/** @type {number | null} */ (null));
  const data = [times, ...lines.map((line) => line.values)];
  const names = lines.map((line) => line.name).join();
  useEffect(() => {
    const box = place.current, keys = [...box.parentElement.querySelectorAll(".key i")];
    const colour = (element) => getComputedStyle(element).color;
    const grid = {stroke: () => getComputedStyle(box).borderTopColor, width: 1};
    const axis = {stroke: () => colour(box), grid, ticks: {show: false}, font: "11px system-ui"};
    const made = plot.current = new UPlot({
      width: box.clientWidth, height: HEIGHT, legend: {show: false}, cursor: {y: false, drag: {x: false, y: false}},
      scales: {x: {range: (_, from, to) => [from, to]}, y: {range: (_, __, high) => [0, Math.max(least, high > 0 ? high * 1.1 : 1)]}},
      axes: [{...axis, values: (_, marks) => marks.map((mark) => clock(mark) === "00:00" ? day(mark) : clock(mark))}, {...axis, size: 64, values: (_, marks) => marks.map((value) => value === null ? "" : show(value))}],
      series: [{}, ...lines.map(({dash}, number) => ({stroke: () => colour(keys[number]), width: 1.5, dash: dash ? [4, 3] : undefined,
        points: {show: false, size: 4, filter: (chart, line) => alone(chart.data[line])}}))],
      hooks: {setCursor: [(chart) => setAt(chart.cursor.idx ?? null)]},
    }, data, box);
    const sized = new ResizeObserver(() => made.setSize({width: box.clientWidth, height: HEIGHT}));
    sized.observe(box);
    const scheme = matchMedia("(prefers-color-scheme: dark)"), repaint = () => made.redraw();
    scheme.addEventListener("change", repaint);
    return () => { sized.disconnect(); scheme.removeEventListener("change", repaint); made.destroy(); };
  }, [names]);
  useEffect(() => plot.current.setData(data), [times]);
  const shown = at ?? times.length - (lines[0].values.at(-1) === null ? 2 : 1);
  return html`<figure><figcaption><h3>${title}</h3>
      <p class="keys">${lines.map(({name, tone, values, dash}) => html`<span class="key"><i class=${`${tone} ${dash ? "dashed" : ""}`}></i>
        ${name} <b class="figure">${values[shown] == null ? "–" : show(values[shown])}</b></span>`)}
        <span class="faint">${shown === times.length - 1 ? newest({step_s: times[1] - times[0]}) : `${day(times[shown])} ${clock(times[shown])}`}</span></p></figcaption>
    <div class="chart" ref=${place} aria-hidden="true"></div>
    <p class="faint">${text}</p></figure>`;
}
