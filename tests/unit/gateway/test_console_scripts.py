"""Scripts of the console, run by Node without a browser: what the live list holds, and the times of a request."""

from __future__ import annotations

import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

from stock_clients import tool

LIST = """
import {LiveList, MOST_ROWS} from "./live.js";
const row = (number) => ({request_id: `r${number}`, created_at: String(number).padStart(9, "0")});
const rows = (from, to) => Array.from({length: from - to}, (_, at) => row(from - at));
const answers = [];
globalThis.fetch = async (path) => {
  const answer = answers.shift();
  if (answer === undefined) throw new Error(path);
  return {ok: true, status: 200, headers: new Headers(), text: async () => JSON.stringify(answer)};
};
const page = (data, has_more) => ({data, has_more, last_id: data.at(-1)?.request_id, cursor: "c", left: []});
const list = new LiveList("/v1/requests", () => {});
const holds = (number, last) => {
  assert.deepEqual([list.rows.length, list.rows.at(-1).request_id], [number, last]);
  assert.deepEqual(new Set(list.known.keys()), new Set(list.rows.map((one) => one.request_id)));
};
"""
SPANS = """
import {spans} from "./request.js";
const at = (second) => new Date(second * 1000).toISOString();
const error = {code: "c", message: "m"};
const attempt = (attempt, from, to) => ({attempt, worker_id: "w", started_at: at(from), ended_at: to && at(to), error});
const shown = (history) => spans({created_at: at(100), done: false, status: "queued", priority: 5, history}, 150_000)
  .map(([name, from, to]) => [name, from / 1000, to && to / 1000]);
"""
LOADS = """
import {acts, courses, load} from "./models.js";
const time = (second) => new Date(second * 1000).toISOString();
const event = (event, second) => ({event, model: "m", worker_id: "w", replica: 0, at: time(second)});
const until = (second, ...names) => new Map(names.map((name) => [name, 1000 * second]));
const bars = (there, ...events) => courses(events.reverse(), there, 100_000, 200_000)
  .map(([name, bars]) => [name, ...bars.map(([kind, from, to]) => [kind, from / 1000, to / 1000])]);
"""
WORKERS = """
import {words} from "./parts.js";
import {stuck, trend} from "./waiting.js";
import {live} from "./workers.js";
const time = (second) => new Date(second * 1000).toISOString();
"""
CHARTS = """
import {alone, rates} from "./charts.js";
const shown = (lasted_s, ...counts) => rates({step_s: 60, times: counts.map((_, at) => 60 * at),
  until: new Date(1000 * (60 * (counts.length - 1) + lasted_s)).toISOString()}, counts).at(-1);
"""
SNIPPETS = """
globalThis.location = {origin: "http://gateway"};
const {python} = await import("./snippets.js");
const messages = [{role: "user", content: "Hi"}];
const chat = (payload) => python({task: "text_generation", payload: {messages, ...payload}}, false);
"""
WAITS = """
import {why} from "./requests.js";
"""
SCRIPTS = {
    LIST: {
        "a row that is behind the last of a full list is not held": """
        rows(20_000, 20_000 - MOST_ROWS).forEach((one) => list.put(one, true));
        list.put(row(5), true);
        holds(MOST_ROWS, "r10001");
        list.put(row(20_001));
        holds(MOST_ROWS, "r10002");
        """,
        "a full list has more": """
        rows(20_000, 20_050 - MOST_ROWS).forEach((one) => list.put(one, true));
        list.more = true;
        answers.push(page(rows(20_050 - MOST_ROWS, 19_950 - MOST_ROWS), true));
        await list.next();
        holds(MOST_ROWS, "r10001");
        assert(list.more);
        """,
        "rows behind those that are read after a reset stay, and one that has left goes when it is looked at": """
        rows(2000, 1000).forEach((one) => list.put(one, true));
        list.cursor = "old";
        answers.push({reset: true}, ...[0, 1, 2, 3, 4].map((at) => page(rows(2000 - 100 * at, 1900 - 100 * at), true)));
        await list.again();
        assert.deepEqual([list.error, answers], [null, []]);
        holds(1000, "r1001");
        Object.assign(list, {top: 700, refreshed_at: 0});
        answers.push(page([], false), page(rows(1299, 1199), true));
        await list.again();
        assert.equal(list.error, null);
        holds(999, "r1001");
        """,
        "a list that is held is asked for again when it has failed": """
        answers.push(page(rows(200, 100), true));
        await list.again();
        list.live = false;
        await list.next();
        assert(list.error);
        answers.push(page([], false));
        await list.again();
        assert.equal(list.error, null);
        """,
    },
    SPANS: {
        "attempts of the request that it was redriven from are no part of its times": """
        assert.deepEqual(shown([attempt(1, 10, 20), attempt(2, 30, null), attempt(3, 110, 120)]),
          [["accepted", 100, 100], ["waiting", 100, 110], ["attempt 3", 110, 120], ["waiting", 120, 150]]);
        """,
        "the wait after an attempt whose worker was killed begins with it": """
        assert.deepEqual(shown([attempt(1, 110, null)]).at(-1), ["waiting", 110, 150]);
        """,
        "the last attempt shows what its worker measured, and an attempt that was killed ends where that begins": """
        const timings = {queued_ms: 4000, load_ms: 3000, admission_ms: 1000, run_ms: 12_000, first_token_ms: 9000};
        const end = {created_at: at(100), finished_at: at(150), done: true, status: "completed", timings};
        const ended = (...history) => spans({...end, history}, 0)
          .map(([name, from, to]) => [name, from / 1000, to && to / 1000]).slice(1, -1);
        assert.deepEqual(ended(attempt(1, 110, null), attempt(1, 138, 150)),
          [["waiting", 100, 110], ["attempt 1, killed", 110, 130], ["queued", 130, 134],
            ["loading the model", 134, 137], ["being admitted", 137, 138],
            ["attempt 1", 138, 150], ["first token", 139, 139]]);
        assert.deepEqual(ended(attempt(1, 131, 133), attempt(2, 138, 150)),
          [["waiting", 100, 131], ["attempt 1", 131, 133], ["waiting", 133, 138],
            ["attempt 2", 138, 150], ["first token", 139, 139]]);
        """,
    },
    LOADS: {
        "a model is loading, loaded and unloaded, and loaded again until now": """
        const before = [event("loading", 110), event("loaded", 120), event("evicted", 150)];
        assert.deepEqual(bars(until(200, "m on w"), ...before, event("loading", 170), event("loaded", 180)),
          [["m on w", ["load", 110, 120], ["run", 120, 150], ["load", 170, 180], ["run", 180, 200]]]);
        """,
        "what was loaded before the first event is drawn apart, and what nothing happened to, too": """
        assert.deepEqual(bars(until(200, "n on w"), event("unloaded", 150)),
          [["m on w", ["before", 100, 150]], ["n on w", ["before", 100, 200]]]);
        """,
        "what a silent worker had loaded ends at its last report": """
        assert.deepEqual(bars(until(140, "m on w", "n on w"), event("loading", 110), event("loaded", 120)),
          [["m on w", ["load", 110, 120], ["run", 120, 140]], ["n on w", ["before", 100, 140]]]);
        """,
        "what waits on a worker counts once, however many replicas it has": """
        const replica = (worker_id, queued) => ({worker_id, queued, running: 1});
        assert.equal(load([replica("a", 5), replica("a", 5), replica("b", 2)]), "3 running, 7 waiting");
        """,
        "a pinned model is not unloaded, and a pause that is unknown is not offered": """
        const offered = (state, pinned, paused) =>
          Object.values(acts({replicas: [{state: "absent"}, {state}], pinned, paused}, false)).filter(Boolean);
        assert.deepEqual(offered("draining", false, false), ["unload", "pause"]);
        assert.deepEqual(offered("loading", true, null), []);
        assert.deepEqual(offered("failed", true, true), ["load", "resume"]);
        """,
        "a load that failed, and one that goes on": """
        assert.deepEqual(bars(until(200, "m on w"), event("loading", 110), event("failed", 130), event("loading", 190)),
          [["m on w", ["load", 110, 130], ["bad", 130, 130], ["load", 190, 200]]]);
        """,
        "nobody knows how long a worker that has gone had it loaded": """
        assert.deepEqual(bars(until(200), event("loading", 110), event("loaded", 120)),
          [["m on w", ["load", 110, 120], ["run", 120, 120]]]);
        """,
    },
    WORKERS: {
        "lines stand still of which all requests wait for what does not come by itself": """
        const line = (depth, ...reasons) =>
          ({class: "low", depth, reasons: Object.fromEntries(reasons.map((one) => [one, 1]))});
        const lines = (...data) => stuck({data}, "low");
        assert.equal(lines(line(3, "no_worker", "paused"), line(5, "paused", "memory"), line(7)), 3);
        assert.equal(stuck({data: [line(3, "paused")]}, "high") + stuck(null, "low"), 0);
        """,
        "a worker becomes silent by an answer, not while the gateway does not answer": """
        const stats = {worker_late_s: 5, workers: [{worker_id: "w", state: "running", updated_at: time(100)}]};
        const alive = (at) => live(stats, time(at)).map((one) => one.worker_id);
        assert.deepEqual([alive(104), alive(106), live(null, null)], [["w"], [], []]);
        """,
        "a line in which nothing leaves stands still": """
        const shown = (accepted_per_s, left_per_s) => trend({accepted_per_s, left_per_s});
        assert.deepEqual([shown(1, 0), shown(2, 1), shown(1, 1)], ["stands still", "grows", "steady"]);
        """,
        "codes are shown as words, sentences as they are": """
        assert.deepEqual([words("no_worker"), words("gpu_1 is lost")], ["no worker", "gpu_1 is lost"]);
        """,
    },
    CHARTS: {
        "the newest rate is known from the first second of a minute on, and steady where it is": """
        assert.deepEqual([shown(5, 0, 130), shown(5, 60, 5), shown(30, 0, 60), shown(5, null, 10), shown(5, 60, null)],
          [2, 1, 2, 0.5, null]);
        """,
        "a minute between two of which nothing is known is drawn as a point": """
        assert.deepEqual(alone([1, null, 2, null, null, 3, 4, null, 0]), [0, 2, 8]);
        """,
    },
    SNIPPETS: {
        "a chat for OpenAI's client keeps the fields that this has, and others go by HTTP": """
        const kept = chat({max_tokens: 200, stop: ["."]});
        assert(kept.includes(`create(model="default", max_tokens=200, stop=["."], messages=messages)`), kept);
        assert(chat({top_k: 5}).includes(`"top_k": 5`), chat({top_k: 5}));
        """,
    },
    WAITS: {
        "a request that starts later says in how long, and at which time": """
        const at = new Date(Date.now() + 600_500).toISOString();
        assert.equal(why({waiting_for: {reason: "scheduled", estimated_start_at: at}}), `starts in 10 min, at ${at}`);
        """,
    },
}
CASES = {
    name: 'import assert from "node:assert";' + begin + script
    for begin, scripts in SCRIPTS.items()
    for name, script in scripts.items()
}


@pytest.mark.parametrize("case", CASES)
def test_a_script_of_the_console(case: str, tmp_path: Path) -> None:
    static = Path(str(files("penstock.gateway.console") / "static"))
    shutil.copytree(static, tmp_path, dirs_exist_ok=True)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "case.js").write_text(CASES[case])
    ran = subprocess.run([tool("node"), "case.js"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
