"""Dead letters in the console, in a browser: counted, filtered, shown to who may see them, run again and purged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from breakable_server import Breakable, remote, serving
from kit.console import HOSTILE, PHONE, Opener, gone, log_in, told, violations, wider_than
from penstock.gateway.edge.keys import create_key
from support import wait_until
from system import NOOP, Process, System, running
from worker_requests import send

GB = 10**9
CARD = {"kind": "simulated", "name": "sim0", "total_bytes": 80 * GB}
SLOW = {"id": "slow", "device": "simulated", "vram_bytes": 60 * GB, "options": {"delay_ms": 50, "tokens": 60}}


@pytest.fixture(scope="module")
def server() -> Iterator[Breakable]:
    with serving(500) as found:
        yield found


@pytest.fixture(scope="module")
def system(kafka: Any, server: Breakable, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("letters")
    keys = folder / "keys.json"
    owner = create_key(keys, tenant="acme", scopes=["admin", "read", "submit"])
    operator = create_key(keys, tenant="ops", scopes=["admin"])
    system = System(kafka.bootstrap_servers, "letters-", folder, models=[remote(server.server_port), NOOP | SLOW])
    system.devices = [CARD, {"kind": "cpu", "limit_bytes": GB}]
    system.auth, system.keys = {"keys_file": str(keys)}, {"acme": owner, "ops": operator}
    with running(system):
        yield system.start_all(["w1", "g1"])


@pytest.fixture
def http(system: System, gateway: Process) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {system.keys['acme']}"}
    with httpx.Client(base_url=gateway.url, headers=headers, timeout=60) as client:
        yield client


def letters(http: httpx.Client, **query: Any) -> list[dict[str, Any]]:
    return http.get("/v1/admin/dlq", params=query).json()["data"]


def fails(http: httpx.Client, *prompts: str, **fields: Any) -> None:
    for prompt in prompts:
        body = {"task": "text_generation", "payload": {"prompt": prompt}, "max_attempts": 1, "model": "noop", **fields}
        request_id = http.post("/v1/requests", json=body).json()["request_id"]
        ended = http.get(f"/v1/requests/{request_id}", params={"wait": 30}).json()
        assert ended["status"] == "dead_lettered"


def test_letters_are_counted_shown_run_again_with_a_rate_and_purged(
    system: System, server: Breakable, gateway: Process, http: httpx.Client, open_page: Opener
) -> None:
    page = open_page(gateway, "#/dead-letters")
    page.on("dialog", lambda dialog: dialog.accept())
    log_in(page, system.keys["acme"])
    told(page, "A request becomes a dead letter when its attempts are used up")
    send(system, {"request_id": "poison", "payload": {"prompt": 7}})
    fails(http, HOSTILE, "one", "two", "three")
    page.get_by_role("link", name="engine_failed").click()
    rows = page.get_by_role("region", name="List of letters").locator("tbody tr")
    wait_until(lambda: rows.count() == 4, 10, page.inner_text("main"))
    groups = http.get("/v1/admin/dlq/groups").json()["data"]
    assert {one["reason"]: (one["letters"], one["redrivable"]) for one in groups}["engine_failed"] == (4, 4)
    assert violations(page) == []

    server.status = 200
    first = letters(http, order="asc", reason="engine_failed")[0]
    page.get_by_role("link", name=first["id"], exact=True).click()
    told(page, "broken")
    told(page, "ce_source")
    assert json.loads(page.locator("pre").first.inner_text())["payload"]["prompt"] == HOSTILE
    assert page.title() == f"Dead letter {first['id']} – Penstock"
    page.get_by_role("button", name=f"redrive {first['id']}").click()
    told(page, "redrive again")
    new = letters(http, request_id=first["request_id"])[0]["redriven_as"]
    assert http.get(f"/v1/requests/{new}", params={"wait": 30}).json()["status"] == "completed"

    page.go_back()
    page.get_by_label("Letters a second, at most").fill("0.2")
    page.get_by_role("button", name="Count what would be redriven").click()
    told(page, "3 letters would be redriven")
    assert letters(http, limit=1, reason="engine_failed")[0]["redriven_as"] is None
    page.get_by_role("button", name="Redrive 3 letters").click()
    page.get_by_role("progressbar", name="Done").wait_for()
    page.get_by_role("button", name="Stop").click()
    told(page, "2 letters redriven; 1 left", 20)
    page.get_by_role("button", name="Continue").click()
    told(page, "3 letters redriven", 20)
    redriven = [one["redriven_as"] for one in letters(http, reason="engine_failed")]
    assert all(redriven)
    page.get_by_label("Letters a second, at most").fill("")
    page.get_by_label("Include letters that were already redriven").check()
    page.get_by_role("button", name="Count what would be redriven").click()
    page.get_by_role("button", name="Redrive 4 letters").click()
    told(page, "4 letters redriven", 20)
    assert not {*redriven} & {one["redriven_as"] for one in letters(http, reason="engine_failed")}

    page.get_by_role("link", name="All", exact=True).click()
    page.get_by_role("textbox", name="Reason").fill("invalid")
    page.keyboard.press("Enter")
    told(page, "Letters: reason invalid")
    told(page, "holds no request")
    page.get_by_role("button", name="Count what would be purged").click()
    page.get_by_role("button", name="Purge 1 letter").click()
    told(page, "1 letter purged")
    told(page, "No dead letter matches the filter")
    assert {one["reason"] for one in letters(http)} == {"engine_failed"}
    open_page.expect("401")


def test_the_record_of_another_tenant_is_not_shown_and_a_purged_letter_is_left(
    system: System, gateway: Process, http: httpx.Client, open_page: Opener
) -> None:
    fails(http, "secret", model="slow", execution_timeout_ms=50)
    letter = letters(http, limit=1)[0]["id"]
    page = open_page(gateway, f"#/dead-letters/{letter}", color_scheme="dark")
    page.on("dialog", lambda dialog: dialog.accept())
    log_in(page, system.keys["ops"])
    told(page, "The record itself is shown to a key of the tenant acme")
    assert "secret" not in page.inner_text("main")
    page.get_by_role("img", name="55.9 GiB of").wait_for()
    assert violations(page) == []
    assert wider_than(page, PHONE) == []
    page.locator("dl").get_by_role("link").click()
    told(page, "Of the tenant acme")
    page.go_back()
    page.get_by_role("button", name=f"purge {letter}").click()
    gone(page, f"Dead letter {letter}")
    wait_until(lambda: letter not in {one["id"] for one in letters(http)}, 10, "it is purged")
    assert wider_than(page, PHONE) == []
    open_page.expect("401", "404")


def test_a_reader_is_offered_no_commands_and_asks_once_for_what_is_refused(
    system: System, gateway: Process, http: httpx.Client, open_page: Opener
) -> None:
    reader = create_key(Path(system.auth["keys_file"]), tenant="acme", scopes=["read"])
    body = {"task": "text_generation", "payload": {"prompt": "p"}, "model": "slow"}
    own = http.post("/v1/requests", json=body).json()["request_id"]
    page = open_page(gateway, f"#/requests/{own}")
    log_in(page, reader)
    told(page, "attempt")
    page.get_by_role("button", name="copy the link").wait_for()
    for name in ("run again", f"cancel {own}", "set the priority"):
        assert page.get_by_role("button", name=name).count() == 0
    page.goto(f"{gateway.url}/#/requests?tenant=ops")
    told(page, own)
    assert page.get_by_role("textbox", name="Tenant").count() == page.get_by_label("Command").count() == 0
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{gateway.url}/#/requests/{own}?tenant=ops")
    told(page, "forbidden")
    page.wait_for_timeout(2_500)
    assert sum("/v1/admin/requests/" in url for url in asked) == 1
    open_page.expect("401", "403")
