"""The console's first screen in a real browser, on a real system: what it shows, what its buttons do, who may look."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from kit.console import HOSTILE, NAME, PHONE, TELLS_S, Opener, focused, gone, log_in, told, violations, wider_than
from penstock.gateway.edge.keys import create_key, revoke_key
from support import wait_until
from system import Process, System, running
from worker_requests import engine, send

LATE_S = 3.0
LONG = "acme" * 15
SYSTEM = {
    "models": [engine(tokens=60, delay_ms=50)],
    "gateway_options": {"worker_late_s": LATE_S, "limits": {"tenants": {"crawler": {"outstanding": 3}}}},
    "worker_options": {"state_interval_s": 0.5},
}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_system_that_is_well_says_so_and_can_be_read_by_everybody(
    gateway: Process, open_page: Opener, scheme: str
) -> None:
    page = open_page(gateway, color_scheme=scheme)
    told(page, "All well")
    told(page, "Kafka ok · artifacts ok")
    told(page, "1 replica: text generation")
    assert violations(page) == []
    assert wider_than(page, PHONE) == []
    assert violations(page) == []


def test_a_gateway_that_hangs_is_not_called_well(gateway: Process, open_page: Opener) -> None:
    page = open_page(gateway)
    told(page, "All well")
    assert page.inner_text("section[aria-label=State] [role=status]") == "All well", "no figures are read out"
    gateway.popen.send_signal(signal.SIGSTOP)
    try:
        gone(page, "All well", 20)
        told(page, "the gateway does not answer")
        told(page, "What is shown here is as of")
        assert "silent for" not in page.inner_text("main"), "of its workers nothing is known"
        assert page.get_by_role("heading", name="Workers: 1").count() == 1
        wait_until(lambda: page.locator(".away").count() > 3, 20, "each part of the page knows")
        assert page.locator(".away:visible").count() == 1, "the error is told once"
        assert page.locator(".away a").count() == 0, "the gateway's documentation is away too"
    finally:
        gateway.popen.send_signal(signal.SIGCONT)
    told(page, "All well", 20)


def test_other_pools_and_silent_workers_are_told_apart(gateway: Process, open_page: Opener) -> None:
    def with_more_workers(route: Any) -> None:
        answer = route.fetch()
        overview = answer.json()
        stats = overview["stats"]
        (worker,) = (one for one in stats["workers"] if one["state"] == "running")
        stats["models"].insert(0, {**stats["models"][0], "model": "earlier"})
        stats["workers"] += [
            {**worker, "worker_id": "far", "pool": "far", "paused": ["class/low"], "waiting": {"memory": 2}},
            {**worker, "worker_id": "lost", "updated_at": "2026-01-01T00:00:00Z", "waiting": {"memory": 5}},
        ]
        route.fulfill(response=answer, json=overview)

    page = open_page(gateway)
    error = {"code": "internal", "message": "no charts"}
    page.route("**/v1/admin/history?*", lambda route: route.fulfill(status=500, json={"error": error}))
    page.get_by_label("6 h").check()
    page.get_by_role("button", name="pause the model noop").focus()
    page.route("**/v1/admin/overview", with_more_workers)
    page.route("**/classes/low/resume?pool=far", lambda route: route.fulfill(json={}))
    told(page, "paused in the pool far")
    told(page, "silent for")
    told(page, "Workers: 2")
    told(page, "At the front: memory (2)")
    told(page, "no charts")
    page.get_by_role("button", name="load the model earlier").wait_for()
    assert focused(page) == "pause the model noop", "a card that comes before it leaves the focus where it is"
    assert page.get_by_role("button", name="pause the class low").count() == 1
    with page.expect_request("**/classes/low/resume?pool=far"):
        page.get_by_role("button", name="resume the class low in the pool far").click()
    page.unroute_all(behavior="wait")
    open_page.expect("500")


def test_any_address_is_shown_and_a_page_that_is_left_asks_no_more(gateway: Process, open_page: Opener) -> None:
    page = open_page(gateway)
    sockets: list[Any] = []
    asked: list[str] = []
    page.on("websocket", lambda socket: sockets.append(socket))
    page.on("request", lambda request: asked.append(request.url))
    page.get_by_role("button", name="Ask").click()
    wait_until(lambda: page.locator(".answer").inner_text(), 20, "the answer begins")
    page.goto(f"{gateway.url}/#/requests/%")
    told(page, "not_found")
    assert page.title() == "Request % – Penstock"
    assert page.inner_text("h2") == "Request %"
    page.wait_for_timeout(500)
    assert sockets[0].is_closed(), "although its answer goes on"
    page.wait_for_timeout(4000)
    assert len([url for url in asked if url.endswith("/v1/requests/%25")]) == 1
    open_page.expect("404")


def test_everything_comes_from_the_gateway_and_is_small(gateway: Process, open_page: Opener, browser: Any) -> None:
    with browser.new_page() as page:
        asked: list[Any] = []
        page.on("response", lambda answer: asked.append(answer))
        page.goto(gateway.url)
        told(page, "All well")
        assert {answer.url.startswith(gateway.url) for answer in asked} == {True}
        assets = [answer for answer in asked if "/console/" in answer.url or answer.url == f"{gateway.url}/"]
        assert sum(len(answer.body()) for answer in assets) < 300 * 1024
    (index,) = (httpx.get(f"{gateway.url}{path}", headers={"accept": "text/html"}) for path in ("/console",))
    assert "unsafe" not in index.headers["content-security-policy"]
    again = httpx.get(f"{gateway.url}/console/app.js", headers={"if-none-match": '"other"'})
    assert again.status_code == 200
    same = httpx.get(f"{gateway.url}/console/app.js", headers={"if-none-match": again.headers["etag"]})
    assert same.status_code == 304
    for name in ("none.js", "../page.py", "%2e%2e/page.py", "vendor"):
        assert httpx.get(f"{gateway.url}/console/{name}").status_code == 404, name
    assert httpx.get(gateway.url).headers["location"] == "/docs", "no browser"


def test_a_question_by_keyboard_goes_on_when_its_worker_is_killed(
    system: System, gateway: Process, open_page: Opener
) -> None:
    page = open_page(gateway)
    told(page, "All well")
    page.get_by_label("Question").focus()
    page.keyboard.press("Enter")
    answer = page.locator(".answer")
    wait_until(lambda: len(answer.inner_text()) > 20, 20, "the answer begins")
    began = answer.inner_text()
    system.process("w").kill9()
    told(page, "no_worker", LATE_S + TELLS_S)
    told(page, "penstock worker")
    system.worker("w2").wait_ready()
    gone(page, "no_worker", 60)
    told(page, "completed the request", 60)
    whole = answer.inner_text()
    assert whole.startswith(began)
    assert len(whole) > len(began)
    page.get_by_role("link", name="the request", exact=True).click()
    told(page, "completed, attempt")
    assert violations(page) == []
    request_id = page.url.rpartition("/")[2]
    assert gateway.request(request_id)["result"]["text"].strip() == whole.strip()


def test_a_class_is_paused_and_resumed_and_the_first_screen_tells_of_it(
    system: System, gateway: Process, open_page: Opener
) -> None:
    page = open_page(gateway)
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="pause the class low").click()
    told(page, "class_paused")
    request_id = gateway.submit(priority=9)
    told(page, "Affects: 1 request waits")
    send(system, *({"request_id": f"crawl{at}", "tenant": "crawler", "priority": 9} for at in range(3)))
    told(page, "Waiting: 4 requests")
    told(page, "near a limit: outstanding 100\u00a0% (3 of 3)")
    told(page, "tenant_near_limit")
    line = page.locator("[aria-labelledby=waiting] tr", has_text="crawler")
    wait_until(lambda: "paused" in line.inner_text(), 10, "the reason is told")
    assert [*line.locator("td").all_inner_texts()[:4]] == ["3", "low", "noop", "crawler"]
    told(page, "4 stand still")
    assert violations(page) == []
    page.locator("article", has_text="class_paused").get_by_role("link", name="see them").click()
    told(page, "4 requests here")
    page.go_back()
    told(page, "class_paused")  # the list has a field of this name too
    page.get_by_role("textbox", name="Id").fill("crawl1")
    page.keyboard.press("Enter")
    told(page, "1 request here")
    page.get_by_role("link", name="crawl1").wait_for()
    page.go_back()
    page.get_by_role("link", name="3 requests of class low, noop, tenant crawler").click()
    told(page, "3 requests here")
    page.go_back()
    line.get_by_role("link", name="its model or class is paused").click()
    told(page, "3 requests here")
    page.get_by_role("combobox", name="Waits for").select_option("memory")
    page.get_by_role("button", name="Search").click()
    told(page, "No request matches")
    page.go_back()
    page.go_back()
    page.get_by_role("button", name="resume the class low").wait_for()
    page.get_by_role("button", name="pause the model noop").click()
    told(page, "model_paused")
    page.get_by_role("button", name="resume the model noop").click()
    gone(page, "model_paused")
    orders = httpx.get(f"{gateway.url}/v1/admin/orders").json()["data"]
    assert [(one["name"], one["paused"]) for one in orders] == [("low", True)]
    late = system.gateway("late").wait_ready()
    first = httpx.get(f"{late.url}/v1/admin/problems").json()["data"]
    assert "class_paused" in {one["problem"] for one in first}, "the first answer of a gateway is whole"
    assert late.stop() == 0
    page.get_by_role("button", name="resume low").click()
    gone(page, "class_paused")
    assert gateway.request(request_id, wait=30)["status"] == "completed"
    assert httpx.get(f"{gateway.url}/v1/admin/orders").json()["data"] == []


def test_a_poison_record_is_told_and_whatever_it_holds_is_shown_as_text(
    system: System, gateway: Process, open_page: Opener
) -> None:
    page = open_page(gateway)
    send(system, {"request_id": "hostile", "model": HOSTILE})
    told(page, "model_unknown")
    assert HOSTILE in page.inner_text("section[aria-label=State]")
    size = page.viewport_size
    assert wider_than(page, PHONE) == []
    page.set_viewport_size(size)
    send(system, {"request_id": "poison", "payload": {"prompt": 7}})
    told(page, "dead_letters_unreadable")
    assert page.get_by_role("button", name="run them again").count() == 0, "it holds no request"
    page.on("dialog", lambda dialog: dialog.accept())
    late = gateway.submit(execution_timeout_ms=50, max_attempts=1)
    assert gateway.request(late, wait=30)["status"] == "dead_lettered"
    page.get_by_role("button", name="run them again").click()
    told(page, "redriven")
    letters = httpx.get(f"{gateway.url}/v1/admin/dlq").json()["data"]
    redriven = {one["request_id"]: one["redriven_as"] is not None for one in letters}
    assert redriven.items() >= {late: True, "poison": False}.items(), "what was run again may have failed again"
    again = gateway.submit(execution_timeout_ms=50, max_attempts=1)
    page.get_by_role("radio", name="newest that failed").check()
    page.get_by_role("button", name=f"run {again} of default again").click(timeout=30_000)
    told(page, "1 request redriven")
    assert page.get_by_role("link", name="poison", exact=True).count() == 1
    assert page.get_by_role("button", name="run poison of default again").count() == 0, "it holds no request"
    own = f"{gateway.url}/v1/admin/dlq?request_id={again}"
    wait_until(lambda: httpx.get(own).json()["data"][0]["redriven_as"], 10, "its letter names the new request")
    page.get_by_role("textbox", name="Id").fill("poison")
    page.keyboard.press("Enter")
    told(page, "payload.prompt must be text")
    page.goto(f"{gateway.url}/#/requests/hostile")
    told(page, "As the API has it")
    assert HOSTILE in page.inner_text("main")
    page.get_by_role("button", name="cancel hostile").click()
    told(page, "cancelled")
    assert page.title() == "Request hostile – Penstock"
    page.goto(f"{gateway.url}/#/requests/{HOSTILE}")
    told(page, "not_found")
    open_page.expect("404")


def test_a_key_logs_in_once_sees_what_it_may_and_is_out_when_it_is_revoked(
    kafka: Any, tmp_path: Path, open_page: Opener
) -> None:
    keys = tmp_path / "keys.json"
    admin, reader, sender = (create_key(keys, tenant=LONG, scopes=[scope]) for scope in ("admin", "read", "submit"))
    with running(System(kafka.bootstrap_servers, "console-", tmp_path, auth={"keys_file": str(keys)})) as system:
        gateway = system.start_all(["w1", "g1"]).process("g")
        page = open_page(gateway)
        log_in(page, "pk_wrong")
        told(page, "this key is unknown or revoked")
        log_in(page, sender)
        told(page, "The session's key has the scope submit")
        assert violations(page) == []
        page.get_by_role("link", name="Playground").click()
        page.get_by_role("button", name="Ask").click()
        told(page, "completed")
        assert len(page.locator(".answer").inner_text()) > 20
        assert page.get_by_role("link", name="the request").count() == 0
        assert page.get_by_role("navigation", name="Pages").inner_text().split("\n") == [
            *("Overview", "Playground", "HTTP routes", "Metrics", "Log out"),
        ]
        page.get_by_role("button", name="Log out").click()
        log_in(page, reader)
        told(page, f"tenant {LONG}")
        size = page.viewport_size
        assert wider_than(page, PHONE) == []
        page.set_viewport_size(size)
        told(page, "Requests")
        assert page.get_by_text("Pipeline").count() == 0
        assert page.get_by_text("Try it").count() == 0
        page.route("**/v1/tickets/session", lambda route: route.abort())
        page.get_by_role("button", name="Log out").click()
        told(page, "You are still logged in: the gateway does not answer")
        page.unroute("**/v1/tickets/session")
        page.get_by_role("button", name="Log out").click()
        told(page, "This gateway asks for a key")
        page.goto(f"http://{NAME}:{gateway.port}")
        page.route("**/v1/tickets", lambda route: route.fulfill(json={}))
        log_in(page, admin)
        told(page, "the browser kept no session")
        page.unroute("**/v1/tickets")
        log_in(page, admin)
        told(page, "All well")
        page.reload()
        told(page, "All well")
        page.get_by_role("button", name="Ask").click()
        told(page, "completed the request")
        page.get_by_text("The same by curl").click()
        curl, _, kcat = (one.inner_text() for one in page.locator("details pre").all())
        here = ["sh", "-c", curl.replace(NAME, "127.0.0.1")]
        env = {**os.environ, "PENSTOCK_API_KEY": admin}
        assert '"completed"' in subprocess.run(here, env=env, capture_output=True, text=True, check=True).stdout
        assert system.names.request("text_generation", 5).removeprefix(system.prefix) in kcat
        assert page.evaluate("[document.cookie, localStorage.length, sessionStorage.length]") == ["", 0, 0]
        assert revoke_key(keys, admin.split("_")[1])
        told(page, "This gateway asks for a key", 20)
    open_page.expect("401", "403", "ERR_FAILED")
