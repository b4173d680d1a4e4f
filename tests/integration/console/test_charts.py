"""The console's charts in a real browser, on a real system: what they show, in which range, and in words."""

from __future__ import annotations

from typing import Any

import httpx

from kit.console import PHONE, Opener, gone, told, violations, wider_than
from support import wait_until
from system import Process
from worker_requests import engine

GB = 10**9
SYSTEM = {
    "models": [{**engine(tokens=10, delay_ms=50), "device": "simulated", "vram_bytes": GB // 2, "max_batch_size": 4}],
    "devices": [{"kind": "simulated", "name": "sim0", "total_bytes": GB}],
    "worker_options": {"state_interval_s": 0.5},
}
LINES = """(chart) => {
    const {data} = chart.getContext("2d").getImageData(0, 0, chart.width, chart.height);
    const colours = [...chart.closest("figure").querySelectorAll(".key i:not(.grey)")]
        .map((key) => getComputedStyle(key).color.match(/\\d+/g).map(Number));
    const is = (at) => (one) => one.every((part, of) => Math.abs(data[at + of] - part) < 4);
    for (let at = 0; at < data.length; at += 4) if (data[at + 3] > 100 && colours.some(is(at))) return true;
    return false;
}"""
"""Whether anything is drawn on a canvas in the colours of its lines. Axes are grey."""


def lines(page: Any) -> list[bool]:
    return [chart.evaluate(LINES) for chart in page.locator("figure canvas").all()]


def only(figures: Any, step: int | None) -> Any:
    """A history in which each figure is 1 in one step, and unknown in all others."""
    if isinstance(figures, dict):
        return {name: one if name == "times" else only(one, step) for name, one in figures.items()}
    if isinstance(figures, list):
        return [
            only(one, step) if isinstance(one, dict) else 1 if at == step else None for at, one in enumerate(figures)
        ]
    return figures


def test_the_charts_show_what_the_history_knows_and_say_it_in_words(gateway: Process, open_page: Opener) -> None:
    page = open_page(gateway)
    told(page, "No request in the last 1 h")
    told(page, "penstock submit")
    told(page, "No run has ended")
    for request_id in [gateway.submit(stream=True) for _ in range(3)]:
        assert gateway.request(request_id, wait=30)["status"] == "completed"
    late = gateway.submit(execution_timeout_ms=50, max_attempts=1)
    wait_until(lambda: gateway.request(late)["done"], 30, "it has ended")
    told(page, "1 failed, dead-lettered or expired", 30)
    told(page, "4 accepted in the last 1 h")
    told(page, "At most, p95 of the wait was")
    told(page, "of the first token")
    told(page, "high 0 in the last minute, at most 0; medium 0 in the last minute")
    told(page, "generated in the last 1 h")
    told(page, "of 4 slots")
    told(page, "Memory of sim0")
    told(page, "At most 0.47 GiB of 0.93 GiB reserved")
    results = page.locator(".pipeline > div").last.inner_text()
    assert "completed\n3" in results
    assert "Ended in the last 1 h" in results
    assert lines(page) == [True] * page.locator("figure").count()
    page.locator(".u-over").first.hover()
    legend = page.locator(".keys").first
    wait_until(lambda: "in the last minute" not in legend.inner_text(), 10, "the legend shows what the pointer is over")
    page.get_by_role("radio", name="1 h").focus()
    page.keyboard.press("ArrowRight")
    told(page, "4 accepted in the last 6 h")
    page.keyboard.press("ArrowRight")
    told(page, "4 accepted in the last 48 h")
    page.emulate_media(color_scheme="dark")
    assert violations(page) == []
    assert wider_than(page, PHONE) == []
    assert violations(page) == []


def test_what_is_unknown_is_not_drawn_and_what_is_known_of_one_step_alone_is(
    gateway: Process, open_page: Opener
) -> None:
    page, step = open_page(gateway), None

    def with_one_step(route: Any) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, json=only(answer.json(), step))

    page.route("**/v1/admin/history*", with_one_step)
    page.get_by_role("radio", name="6 h").check()
    told(page, "No request in the last 6 h")
    wait_until(lambda: lines(page) == [False] * 4, 10, "nothing is drawn")
    step = 30
    page.get_by_role("radio", name="48 h").check()
    told(page, "1 image in the last 48 h")
    wait_until(lambda: lines(page) == [True] * 5, 10, lambda: str(lines(page)))
    page.unroute_all(behavior="wait")


def test_a_history_that_cannot_be_told_is_said(gateway: Process, open_page: Opener) -> None:
    page = open_page(gateway)
    told(page, "in the last 1 h")
    error = {"code": "overloaded", "message": "this gateway is catching up"}
    page.route("**/v1/admin/history*", lambda route: route.fulfill(status=503, json={"error": error}))
    page.get_by_role("radio", name="6 h").check()
    told(page, "this gateway is catching up")
    gone(page, "in the last 1 h")
    page.unroute_all(behavior="wait")
    told(page, "accepted in the last 6 h", 30)
    assert httpx.get(f"{gateway.url}/console/vendor/uplot.css").headers["content-type"].startswith("text/css")
    open_page.expect("503")
