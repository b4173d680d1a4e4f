"""What the console costs a gateway, how soon it is there, and whether its list of requests stays smooth.

Chats a second with no page open, one, and 50, by turns. Then a real browser with 10,000 live requests, of which 200
change each second: frames a second while somebody scrolls, by the browser's own trace, and its memory over `--minutes`.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from backlog import WARM, cpu_seconds, warm
from common import Figures, Row, Steal, broker, options, rotate, save, system
from confluent_kafka import Producer
from gateway import costs
from overhead import NOOP
from playwright.sync_api import sync_playwright

from penstock.common.reader import read_to_end
from penstock.schemas.codec import default_codec
from penstock.schemas.records import STATUS_RANKS, InferenceRequest, Origin, ResultEvent, StatusEvent, WaitingFor
from stock_clients import tool
from system import Process, System

MODELS = [NOOP, *({**NOOP, "id": f"other-{number}"} for number in range(20))]
LIVE = 10_000
CHANGES_PER_S = 200
ENDED_SHARE = 0.05
TRACED_S = 10.0
PAGES = Path(__file__).with_name("console_pages.py")
BODY = '{"task": "text_generation", "payload": {"prompt": "p"}, "priority": 9}\n'
CATEGORIES = ["disabled-by-default-devtools.timeline.frame", "devtools.timeline"]
LOAD_ALL = """async () => {
    const box = document.querySelector(".requests");
    while (document.body.innerText.includes("scroll for older ones")) {
        box.scrollTop = box.scrollHeight;
        await new Promise((then) => setTimeout(then, 20));
    }
    return Number(document.getElementById("loaded").innerText.replace(/\\D/g, ""));
}"""
SCROLL = """(ms) => new Promise((then) => {
    const box = document.querySelector(".requests"), end = performance.now() + ms;
    let frames = 0, last = performance.now(), longest = 0, step = 9;
    const move = (now) => {
        frames++;
        longest = Math.max(longest, now - last);
        last = now;
        if (box.scrollTop < 100) step = 9;
        if (box.scrollTop > box.scrollHeight - 2000) step = -9;
        box.scrollTop += step;
        if (now < end) requestAnimationFrame(move);
        else then([frames, longest]);
    };
    requestAnimationFrame(move);
})"""


@contextmanager
def open_pages(gateway: Process, count: int) -> Iterator[None]:
    """So many consoles, whose calls come from another process."""
    if not count:
        yield
        return
    asking = subprocess.Popen([sys.executable, str(PAGES), "127.0.0.1", str(gateway.port), str(count)])
    time.sleep(3.5)
    try:
        yield
        assert asking.poll() is None, "the pages ended"
    finally:
        asking.kill()
        asking.wait()


def chats(gateway: Process, worker: Process, seconds: float, pages: int) -> Figures:
    with open_pages(gateway, pages):
        return costs(gateway.url, seconds, gateway.popen.pid, worker.popen.pid)


def idle(gateway: Process, seconds: float, pages: int) -> Figures:
    """The share of a core that the gateway takes while nobody chats. Other work on the machine hardly changes it."""
    with open_pages(gateway, pages):
        before, began = cpu_seconds(gateway.popen.pid), time.monotonic()
        time.sleep(seconds)
        return {"share": 100 * (cpu_seconds(gateway.popen.pid) - before) / (time.monotonic() - began)}


def cost_of_pages(bootstrap: str, rounds: int, *, quick: bool) -> list[Row]:
    seconds = 2 if quick else 4
    with system(bootstrap, models=MODELS) as whole:
        worker, gateway = whole.worker(), whole.gateway()
        worker.wait_ready()
        gateway.wait_ready()
        warm(whole, worker, 2_000 if quick else WARM)
        chats(gateway, worker, seconds, 0)
        sides: dict[str, Callable[[], Figures]] = {
            str(count): partial(chats, gateway, worker, seconds, count) for count in (0, 1, 50)
        }
        results, steals = rotate(rounds, sides)
        idles = {count: [idle(gateway, 2 * seconds, count)["share"] for _ in range(3)] for count in (0, 1, 50)}
        size = len(httpx.get(f"{gateway.url}/v1/admin/stats").content)
    closed, main = results["0"], "gateway's main thread"
    rows: list[Row] = []
    for count, words in (("1", "one console open"), ("50", "50 consoles open")):
        shown = results[count]
        whose = f"{words} (floor: none; /v1/admin/stats has {size:,} bytes)"
        rows.append(Row(f"chats with {whose}", "requests/s", shown["rate"], closed["rate"], steals, "≥ 0.95"))
        whose = f"main thread of the gateway a chat, {words} (floor: none)"
        rows.append(Row(whose, "µs", shown[main], closed[main], steals, "reported"))
        whose = f"gateway without chats, {words} (floor: none)"
        rows.append(Row(whose, "% of a core", idles[int(count)], idles[0], steals, "reported"))
    return rows


def first_view(bootstrap: str, rounds: int) -> list[Row]:
    """From the address to the sentence that all is well, with an empty cache; the floor: `/docs`."""
    shown: dict[str, list[float]] = {"": [], "docs": []}
    with system(bootstrap, models=[NOOP]) as whole, sync_playwright() as playwright, Steal() as steal:
        whole.worker().wait_ready()
        gateway = whole.gateway().wait_ready()
        browser = playwright.chromium.launch(executable_path=tool("chromium"), args=["--no-sandbox"])
        for _ in range(rounds):
            for place, text in (("", "All well"), ("docs", "Penstock")):
                page = browser.new_context().new_page()
                began = time.monotonic()
                page.goto(f"{gateway.url}/{place}")
                page.get_by_text(text).first.wait_for()
                shown[place].append(1_000 * (time.monotonic() - began))
                page.context.close()
        browser.close()
    what = "first view: the first screen says that all is well (floor: /docs is there)"
    return [Row(what, "ms", shown[""], shown["docs"], [steal.share], "≤ 1,000")]


class Changing:
    """Requests that live, and what workers would say of them: places in the queue, new ones, and some outcomes."""

    def __init__(self, whole: System, gateway: Process) -> None:
        self._whole, self._gateway = whole, gateway
        self._producer = Producer({"bootstrap.servers": whole.bootstrap, "linger.ms": 5})
        self._over = threading.Event()
        self._ended: set[str] = set()
        self.submit(LIVE)
        self._read()

    def _read(self) -> None:
        """All requests of the topic that have not ended."""
        topic = self._whole.names.request("text_generation", 9)
        self._live: list[tuple[InferenceRequest, Origin]] = []
        for record in read_to_end(self._whole.kafka, topic):
            request = default_codec().decode(record.value or b"", InferenceRequest)
            place = {"topic": topic, "partition": record.partition, "offset": record.offset}
            if request.request_id not in self._ended:
                self._live.append((request, Origin(**place, append_time_ms=record.timestamp_ms)))

    def submit(self, count: int) -> None:
        lines = {"content": BODY * count, "headers": {"content-type": "application/x-ndjson"}}
        answer = httpx.post(f"{self._gateway.url}/v1/requests/bulk", **lines, timeout=300)
        assert answer.text.count("request_id") == count, answer.text[:300]

    def run(self) -> None:
        """Until `stop`. Each second as many end as come."""
        ended = int(CHANGES_PER_S * ENDED_SHARE)
        due = time.monotonic()
        while not self._over.is_set():
            self.submit(ended)
            if len(self._live) < LIVE // 2:
                self._read()
            for _ in range(ended):
                request, origin = self._live.pop(random.randrange(len(self._live)))
                self._ended.add(request.request_id)
                self._put(self._whole.names.result, request, origin, self._outcome)
            for _ in range(CHANGES_PER_S - 2 * ended):
                self._put(self._whole.names.status, *random.choice(self._live), self._status)
            self._producer.flush(10)
            due += 1
            self._over.wait(max(0.0, due - time.monotonic()))

    def stop(self) -> None:
        self._over.set()

    def _put(self, topic: str, request: InferenceRequest, origin: Origin, make: Callable[..., Any]) -> None:
        named = {"request_id": request.request_id, "tenant": request.tenant, "origin": origin, "worker_id": "bench"}
        record = make(**named, attempt=1, epoch=1, created_at=time.time_ns() // 10**6)
        self._producer.produce(topic, default_codec().encode(record), key=request.request_id)

    def _status(self, **named: Any) -> StatusEvent:
        place = random.randrange(LIVE)
        why = WaitingFor(reason="class", position=place)
        return StatusEvent(
            status="queued", rank=STATUS_RANKS["queued"], done=False, position=place, waiting_for=why, **named
        )

    def _outcome(self, **named: Any) -> ResultEvent:
        made = {"kind": "terminal", "status": "completed", "text_generation": {"text": "done"}}
        return ResultEvent(task="text_generation", **made, **named)


def frames_per_s(trace: bytes) -> float:
    """Frames that the browser drew, by its trace, between the first and the last."""
    at_us = sorted(one["ts"] for one in json.loads(trace)["traceEvents"] if one["name"] == "DrawFrame")
    return (len(at_us) - 1) / ((at_us[-1] - at_us[0]) / 1e6)


def heap_mib(page: Any) -> float:
    """What the page holds after its garbage was collected."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    used = session.send("Runtime.getHeapUsage")["usedSize"]
    session.detach()
    return used / 2**20


def smooth_list(bootstrap: str, minutes: float) -> list[Row]:
    with system(bootstrap, models=[NOOP]) as whole, sync_playwright() as playwright, Steal() as steal:
        gateway = whole.gateway().wait_ready()
        changing = Changing(whole, gateway)
        thread = threading.Thread(target=changing.run, daemon=True)
        thread.start()
        browser = playwright.chromium.launch(executable_path=tool("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(f"{gateway.url}/#/requests")
        page.get_by_text("scroll for older ones").wait_for()
        loaded = page.evaluate(LOAD_ALL)
        print(f"  {loaded:,} requests in the page", file=sys.stderr, flush=True)
        frames: list[float] = []
        longest: list[float] = []
        memory = [heap_mib(page)]
        for _ in range(max(1, round(minutes))):
            browser.start_tracing(page=page, categories=CATEGORIES)
            longest.append(page.evaluate(SCROLL, 1000 * TRACED_S)[1])
            frames.append(frames_per_s(browser.stop_tracing()))
            page.wait_for_timeout(max(0.0, 60 * min(1.0, minutes) - TRACED_S) * 1000)
            memory.append(heap_mib(page))
            print(
                f"  {frames[-1]:.1f} frames/s, {longest[-1]:.0f} ms, {memory[-1]:.1f} MiB", file=sys.stderr, flush=True
            )
        browser.close()
        assert thread.is_alive(), "the requests changed to the end"
        changing.stop()
        thread.join(30)
    what = f"{loaded:,} requests, {CHANGES_PER_S} changes/s"
    after = f"memory of the page after {minutes:g} min (floor: at the start)"
    return [
        Row(f"frames while scrolling, {what}", "frames/s", frames, [], [steal.share], "≥ 50"),
        Row("longest time between two frames", "ms", longest, [], [steal.share], "reported"),
        Row(after, "MiB", memory[-1:], memory[:1], [steal.share], "flat"),
    ]


def main() -> None:
    chosen = options(__doc__, rounds=12)
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=0.2 if chosen.quick else 5)
    parser.add_argument("--only", choices=["chats", "view", "browser"])
    asked = parser.parse_known_args()[0]
    rows: list[Row] = []
    with broker() as bootstrap:
        if asked.only in (None, "chats"):
            rows += cost_of_pages(bootstrap, chosen.rounds, quick=chosen.quick)
        if asked.only in (None, "view"):
            rows += first_view(bootstrap, chosen.rounds)
        if asked.only in (None, "browser"):
            rows += smooth_list(bootstrap, asked.minutes)
    save("console", rows)


if __name__ == "__main__":
    main()
