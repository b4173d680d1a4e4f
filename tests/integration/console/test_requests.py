"""The console's pages of requests in a real browser: one from its place to its end, many live, those of others."""

from __future__ import annotations

import base64
import io
import subprocess
import sys
from typing import Any

import httpx
from PIL import Image

from kit.console import HOSTILE, PHONE, Opener, focused, told, violations, wider_than
from support import wait_until
from system import Process, System
from worker_requests import engine, send

SLOW = {**engine(tokens=80, delay_ms=50, slots=1), "tasks": ["text_generation", "embedding"]}
SYSTEM = {
    "models": [SLOW, {"id": "images", "source": "pillow", "engine": "imaging"}],
    "worker_options": {"state_interval_s": 0.5},
    "webhook_options": {"secret": "whsec_" + "a" * 32, "internal_hosts": ["127.0.0.1:9"]},
    "processes": ["w1", "g1", "h1"],
}
RUN_S = 30.0
MANY = 450
SHORT = {"max_tokens": 3}
BARS = """(rows) => rows.map((one) => [one.querySelector("th").innerText,
    ...["x", "width"].map((name) => Number(one.querySelector("rect").getAttribute(name)))])"""
TOP_ROW = """() => {
    const box = document.querySelector(".requests"), top = box.getBoundingClientRect().top + 60;
    const rows = [...box.querySelectorAll("tbody tr")];
    return rows.find((one) => one.getBoundingClientRect().bottom > top).innerText.split(/\\s/)[0];
}"""
DRAWN = "document.querySelectorAll('.requests tbody tr').length"


def show(open_page: Opener, gateway: Process, request_id: str, **options: Any) -> Any:
    return open_page(gateway, f"#/requests/{request_id}", **options)


def open_parts(page: Any, *names: str) -> None:
    for name in names:
        page.locator("summary", has_text=name).click()


def copied(page: Any, label: str) -> str:
    page.get_by_role("button", name=label).click()
    told(page, f"{label}: done")
    return page.evaluate("navigator.clipboard.readText()")


def test_a_request_is_followed_from_its_place_in_the_queue_to_its_end(gateway: Process, open_page: Opener) -> None:
    metadata, prompt = {"correlation_id": "order-7"}, f"tell me {HOSTILE}"
    page = open_page(gateway)  # before it runs: on a busy machine a browser starts no faster than it ends
    runs = gateway.submit(prompt, stream=True, metadata=metadata)
    waiting, doomed = [gateway.submit() for _ in range(3)][1:]
    page.goto(f"{gateway.url}/#/requests/{runs}")
    wait_until(lambda: page.locator(".answer").inner_text(), 20, "its stream is shown")
    told(page, "first token")
    now = gateway.request(runs)
    told(page, f"{now['worker_id']} on {now['device']}, noop")
    page.goto(f"{gateway.url}/#/requests/{waiting}")
    told(page, "more urgent and earlier requests")
    told(page, "It may start in about")
    page.get_by_role("combobox", name="Priority").select_option("2")
    page.get_by_role("button", name="set the priority").click()
    told(page, "set the priority: requested")
    wait_until(lambda: gateway.request(waiting)["priority"] == 2, 10, "it has another priority")
    page.on("dialog", lambda dialog: dialog.accept())
    page.goto(f"{gateway.url}/#/requests/{doomed}")
    page.get_by_role("button", name=f"cancel {doomed}").focus()
    page.keyboard.press("Enter")
    told(page, "cancelled, attempt")
    wait_until(lambda: focused(page) == "Commands", 10, "the focus has a place when its button has left")
    assert gateway.request(doomed)["status"] == "cancelled"
    page.goto(f"{gateway.url}/#/requests/{runs}")
    told(page, "completed, attempt", RUN_S)
    assert page.get_by_text("Stream").count() == 0
    done = gateway.request(runs)
    bars = {name: (x, width) for name, x, width in page.eval_on_selector_all(".course tbody tr", BARS)}
    assert next(iter(bars)) == "accepted"
    assert {"queued", "running", "first token", "completed"} <= bars.keys()
    whole_ms = sum(done["timings"][name] for name in ("queued_ms", "admission_ms", "load_ms", "run_ms"))
    assert abs(bars["running"][1] / 1000 - done["timings"]["run_ms"] / whole_ms) < 0.1, (bars, done["timings"])
    told(page, "order-7")
    told(page, done["worker_id"])
    open_parts(page, "Show it", "What was asked", "All of it")
    told(page, done["result"]["text"][:40])
    assert prompt in page.inner_text("main")
    assert page.locator("img").count() == 0
    trace = gateway_input(gateway, runs)["traceparent"].split("-")[1]
    told(page, trace)
    assert violations(page) == []
    assert wider_than(page, PHONE) == []


def pause_low(gateway: Process) -> None:
    """Pause the class, and wait until the worker knows."""
    order = httpx.post(f"{gateway.url}/v1/admin/classes/low/pause").json()
    observed = f"{gateway.url}/v1/admin/orders/{order['revision']}"
    wait_until(lambda: httpx.get(observed).json()["observed"], 20, "the worker has observed the order")


def gateway_input(gateway: Process, request_id: str) -> dict[str, Any]:
    return httpx.get(f"{gateway.url}/v1/requests/{request_id}/input", timeout=30).json()


def test_a_request_is_run_again_by_the_page_by_curl_and_by_python(gateway: Process, open_page: Opener) -> None:
    payload = {"prompt": f'it\'s \\ "quoted" {HOSTILE}', **SHORT}
    asked = gateway.submit(payload=payload, metadata={"note": "n"})
    page = show(open_page, gateway, asked, permissions=["clipboard-read", "clipboard-write"])
    told(page, "completed, attempt", RUN_S)
    assert copied(page, "copy the link") == f"{gateway.url}/#/requests/{asked}"
    for command in (["sh", "-c", copied(page, "copy as curl")], [sys.executable, "-c", copied(page, "copy as Python")]):
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "completed" in ran.stdout
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="run again").click()
    page.wait_for_url(lambda url: asked not in url)
    told(page, "completed, attempt", RUN_S)
    again = [one["request_id"] for one in httpx.get(f"{gateway.url}/v1/requests?limit=3").json()["data"]]
    assert page.url.rpartition("/")[2] == again[0]
    for one in again:
        assert gateway_input(gateway, one)["request"] == gateway_input(gateway, asked)["request"]


def test_attempts_webhooks_and_redrives_are_shown(gateway: Process, open_page: Opener) -> None:
    failing = {"execution_timeout_ms": 50, "max_attempts": 2, "callback_url": "http://127.0.0.1:9/hook"}
    late = gateway.submit(**failing)
    page = show(open_page, gateway, late, color_scheme="dark")
    told(page, "dead lettered, attempt", RUN_S)
    assert [row[0] for row in page.eval_on_selector_all(".course tbody tr", BARS)] == [
        *("accepted", "waiting", "attempt 1", "waiting", "attempt 2", "dead lettered")
    ]
    told(page, "execution_timeout")
    open_parts(page, "Webhook")
    told(page, "next attempt in", 20)
    assert violations(page) == []
    assert wider_than(page, PHONE) == []
    letter = httpx.get(f"{gateway.url}/v1/admin/dlq?request_id={late}").json()["data"][0]["id"]
    assert page.get_by_role("link", name=letter).get_attribute("href") == f"#/dead-letters/{letter}"
    again = httpx.post(f"{gateway.url}/v1/admin/dlq/redrive", json={"ids": [letter]}).json()["request_ids"][0]
    page.get_by_role("link", name=again).click()
    told(page, "redriven from")
    assert page.get_by_role("link", name=late).count() == 1


def test_images_and_vectors_are_shown(gateway: Process, open_page: Opener) -> None:
    drawn = io.BytesIO()
    Image.new("RGB", (60, 40), "red").save(drawn, "PNG")
    payload = {
        "image": {"data": base64.b64encode(drawn.getvalue()).decode()},
        "operations": [{"op": "thumbnail", "width": 30, "height": 30}],
    }
    body = {"task": "image_processing", "model": "images", "payload": payload}
    answer = httpx.post(f"{gateway.url}/v1/requests?wait=60", json=body, timeout=90)
    assert answer.json().get("status") == "completed", answer.text
    page = show(open_page, gateway, answer.json()["request_id"])
    told(page, "completed, attempt")
    open_parts(page, "Show it", "What was asked")
    shown = "[...document.images].filter((one) => one.complete && one.naturalWidth).map((one) => one.naturalWidth)"
    wait_until(lambda: page.evaluate(shown) == [30, 60], 10, "the output and the input are shown")
    assert violations(page) == []
    vectors = gateway.submit(task="embedding", payload={"input": ["a", "b"]})
    page.goto(f"{gateway.url}/#/requests/{vectors}")
    told(page, "completed, attempt", RUN_S)
    open_parts(page, "Show it")
    told(page, "2 values: 1.00000, 0.00000")


def test_a_list_follows_its_requests_by_the_filters_in_the_address(gateway: Process, open_page: Opener) -> None:
    page = open_page(gateway, "#/requests")
    pause_low(gateway)
    waits = gateway.submit(priority=8, payload={"prompt": "p", **SHORT})
    row = page.locator(".requests tr", has_text=waits)
    row.wait_for(timeout=5_000)
    told(page, "the class low is paused")
    page.get_by_role("textbox", name="Id").fill(waits[9:-4])
    page.get_by_role("combobox", name="Class").select_option("low")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/#/requests?id_contains={waits[9:-4]}&class=low")
    told(page, "1 request here")
    page.reload()
    row.wait_for(timeout=5_000)
    assert page.get_by_role("combobox", name="Class").input_value() == "low"
    page.goto(f"{gateway.url}/#/requests?class=low&status=queued")
    row.wait_for(timeout=10_000)
    httpx.post(f"{gateway.url}/v1/admin/classes/low/resume")
    row.wait_for(timeout=10_000, state="detached")
    told(page, "No request matches")
    page.goto(f"{gateway.url}/#/requests?older_than_s=86400")
    told(page, "No request matches")
    page.get_by_role("link", name="All", exact=True).click()
    row.get_by_text("completed").wait_for(timeout=1000 * RUN_S)
    page.get_by_role("checkbox", name="live").uncheck()
    unseen = gateway.submit(payload={"prompt": "p", **SHORT})
    page.wait_for_timeout(3_000)
    assert page.get_by_text(unseen).count() == 0
    page.get_by_role("checkbox", name="live").check()
    told(page, unseen)
    assert violations(page) == []
    assert wider_than(page, PHONE) == []


def test_many_are_scrolled_counted_moved_and_cancelled(gateway: Process, open_page: Opener) -> None:
    pause_low(gateway)
    body = '{"task": "text_generation", "payload": {"prompt": "p"}, "priority": 9, "model": "noop"}\n'
    sent = httpx.post(
        f"{gateway.url}/v1/requests/bulk",
        content=body * MANY,
        headers={"content-type": "application/x-ndjson"},
        timeout=60,
    )
    assert sent.text.count("request_id") == MANY
    page = open_page(gateway, "#/requests?class=low&older_than_s=0", viewport={"width": 1200, "height": 800})
    told(page, "100 requests here")
    box = page.locator(".requests")

    def all_loaded() -> bool:
        box.evaluate("(one) => { one.scrollTop = one.scrollHeight }")
        return page.get_by_text("scroll for older ones").count() == 0

    wait_until(all_loaded, 20, "all pages were read")
    assert int(page.inner_text("#loaded").split()[0]) >= MANY
    assert page.evaluate(DRAWN) < 70, "rows out of sight are not drawn"
    box.evaluate("(one) => { one.scrollTop = 3000 }")
    page.wait_for_timeout(500)
    before = page.evaluate(TOP_ROW)
    new = [gateway.submit(priority=9) for _ in range(3)]
    wait_until(lambda: box.evaluate("(one) => one.scrollTop") == 3000 + 30 * len(new), 10, "new rows come above")
    assert page.evaluate(TOP_ROW) == before, "what is looked at stays in its place"
    box.evaluate("(one) => { one.scrollTop = 0 }")
    page.get_by_role("link", name=new[-1]).focus()
    new.append(gateway.submit(priority=9))
    wait_until(lambda: box.evaluate("(one) => one.scrollTop") == 30, 10, "so does what has the focus at the top")

    page.get_by_role("button", name="Count them").click()
    page.get_by_role("button", name=f"cancel: {MANY + len(new)} requests").click(timeout=10_000)
    told(page, f"requested for {MANY + len(new)} requests", 30)
    wait_until(lambda: all(gateway.request(one)["status"] == "cancelled" for one in new), 30, "they are cancelled")
    ended = {"class": "low", "status": "cancelled", "limit": 100}
    assert len(httpx.get(f"{gateway.url}/v1/requests", params=ended).json()["data"]) == 100
    page.get_by_role("button", name="Count them").click()
    told(page, "0 requests match")
    moved = gateway.submit(priority=9, payload={"prompt": "p", **SHORT})
    page.get_by_role("combobox", name="Command").select_option("high")
    page.get_by_role("button", name="Count them").click()
    page.get_by_role("button", name="give the priority high: 1 request").click()
    told(page, "requested for 1 request")
    assert gateway.request(moved, wait=30)["priority"] == 2
    last_of_medium = gateway.submit(priority=7, payload={"prompt": "p", **SHORT})
    page.goto(f"{gateway.url}/#/requests?id_contains={last_of_medium}")
    told(page, "medium\u00a07")
    httpx.post(f"{gateway.url}/v1/admin/classes/low/resume")
    assert violations(page) == []


def test_an_operator_sees_where_requests_of_others_stand_and_cancels_them(
    system: System, gateway: Process, open_page: Opener
) -> None:
    send(system, {"request_id": "theirs", "tenant": "shop", "payload": {"prompt": "secret"}, "model": HOSTILE})
    page = open_page(gateway, "#/requests?tenant=shop")
    told(page, "theirs")
    assert HOSTILE in page.inner_text("main")
    page.get_by_role("link", name="theirs").click()
    told(page, "Of the tenant shop")
    assert page.url.endswith("#/requests/theirs?tenant=shop")
    assert page.get_by_text("What was asked").count() == page.get_by_role("button", name="run again").count() == 0
    assert "secret" not in page.content()
    page.goto(f"{gateway.url}/#/requests/theirs")
    code = page.get_by_role("link", name="not_found")
    code.wait_for(timeout=10_000)
    assert code.get_attribute("href") == "/docs#not_found"
    page.get_by_role("link", name="Look for it among all tenants").click()
    told(page, "Of the tenant shop")
    assert violations(page) == []
    url = f"{gateway.url}/v1/admin/requests/theirs?tenant=shop"
    page.get_by_role("combobox", name="Priority").select_option("2")
    page.get_by_role("button", name="set the priority").click()
    wait_until(lambda: httpx.get(url).json()["priority"] == 2, 10, "it has another priority")
    send(system, {"request_id": "ends", "tenant": "shop", "model": HOSTILE})
    page.on("dialog", lambda dialog: dialog.accept())
    page.goto(f"{gateway.url}/#/requests/ends?tenant=shop")
    page.get_by_role("button", name="cancel ends").click()
    told(page, "cancelled, attempt")
    page.goto(f"{gateway.url}/#/requests?tenant=shop&id_contains=theirs")
    page.get_by_role("button", name="Count them").click()
    page.get_by_role("button", name="cancel: 1 request").click()
    told(page, "requested for 1 request")
    page.locator(".requests tr", has_text="theirs").get_by_text("cancelled", exact=True).wait_for(timeout=20_000)
    send(system, *({"request_id": "twin", "tenant": tenant, "model": "none"} for tenant in ("shop", "other")))
    page.goto(f"{gateway.url}/#/requests?tenant=shop&id_contains=t")
    page.get_by_role("link", name="All tenants").click()
    told(page, "Requests of all tenants")
    page.locator(".requests tr", has_text="theirs").wait_for(timeout=10_000)
    page.get_by_role("textbox", name="Id").fill("twin")
    page.keyboard.press("Enter")
    told(page, "2 requests here")
    assert [one.split("\t")[1] for one in page.locator(".requests tbody tr:not([aria-hidden])").all_inner_texts()] == [
        "shop",
        "other",
    ]
    cut = "(all) => all.map((one) => one.scrollHeight > one.clientHeight)"
    assert page.locator(".why").evaluate_all(cut) == [False, False], "each reason is shown whole"
    page.get_by_role("button", name="Count them").click()
    page.get_by_role("button", name="cancel: 2 requests").click()
    cancelled = page.locator(".requests tr", has_text="twin").get_by_text("cancelled", exact=True)
    wait_until(lambda: cancelled.count() == 2, 20, "both are cancelled")
    assert violations(page) == []
    page.goto(f"{gateway.url}/#/requests?status=dead_lettered&tenant=*")
    page.get_by_role("link", name="dead letters", exact=True).click()
    page.wait_for_url("**/#/dead-letters?")
    open_page.expect("404")
