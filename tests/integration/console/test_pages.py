"""All pages of the console by keyboard alone, on one system with real data.

With `PENSTOCK_SCREENSHOTS=docs` this file and `test_keys.py` make the pictures of the docs.
"""

from __future__ import annotations

from typing import Any

import httpx

from kit.console import PHONE, Opener, focused, keep_screenshot, out_of_reach, tab_to, told, violations, wider_than
from support import wait_until
from system import NOOP, Process, System
from worker_requests import send

GB = 10**9
FAULT = {"error": {"code": "internal", "message": "asked for again"}}
CARD = {"kind": "simulated", "name": "gpu-1", "total_bytes": 78 * GB}


def model(name: str, vram_bytes: int, **fields: Any) -> dict[str, Any]:
    options = {"tokens": 40, "delay_ms": 25, "slots": 4}
    return {**NOOP, "id": name, "device": "simulated", "vram_bytes": vram_bytes, "options": options, **fields}


SYSTEM = {
    "models": [model("chat", 20 * GB), model("large", 60 * GB, preload=False)],
    "devices": [CARD, {"kind": "cpu", "limit_bytes": 8 * GB}],
    "worker_options": {"state_interval_s": 0.5},
    "gateway_options": {"limits": {"tenants": {"crawler": {"outstanding": 30}}}},
}


ACTS = [("pin", "pinned", True), ("unpin", "pinned", False), ("pause", "paused", True), ("resume", "paused", False)]


def state(gateway: Process, name: str) -> dict[str, Any]:
    return httpx.get(f"{gateway.url}/v1/admin/models/{name}").json()


def depths(gateway: Process) -> dict[str, int]:
    queues = httpx.get(f"{gateway.url}/v1/admin/stats").json()["queues"]
    return {name: one["depth"] for name, one in queues.items()}


def events(gateway: Process, name: str) -> list[str]:
    """The oldest first."""
    found = httpx.get(f"{gateway.url}/v1/admin/model-events", params={"model": name}).json()["data"]
    return [one["event"] for one in reversed(found)]


def move_to(page: Any, name: str, role: Any = "button") -> None:
    """Wait until it is there, and press Tab until it has the focus."""
    page.get_by_role(role, name=name, exact=True).wait_for(timeout=10_000)
    tab_to(page, name)


def press(page: Any, name: str) -> None:
    move_to(page, name)
    page.keyboard.press("Enter")


def test_models_are_added_loaded_pinned_paused_and_removed_by_keyboard_alone(
    gateway: Process, open_page: Opener
) -> None:
    page = open_page(gateway)
    page.on("dialog", lambda dialog: dialog.accept())
    page.route("**/openapi.json", lambda route: route.fulfill(status=500, json=FAULT), times=1)
    page.route("**/v1/admin/model-events*", lambda route: route.fulfill(status=404, json=FAULT), times=1)
    page.goto(f"{gateway.url}/#/models")
    told(page, FAULT["error"]["message"])
    open_page.expect("500", "404")
    told(page, "chat on ")
    move_to(page, "id", "textbox")
    page.keyboard.type("more")
    page.keyboard.press("Tab")
    page.keyboard.type("anything")
    page.keyboard.press("Tab")
    page.keyboard.type("noop")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    told(page, "add more: requested")
    assert focused(page) == "Add"
    assert page.get_by_role("textbox", name="id").input_value() == ""
    wait_until(lambda: state(gateway, "more").get("state") == "ready", 20, "the worker serves it")
    told(page, "more on ")
    press(page, "load the model large")
    wait_until(lambda: state(gateway, "large")["state"] == "ready", 20, "it is loaded in place of chat")
    told(page, "evicted")
    assert events(gateway, "chat")[-2:] == ["loaded", "evicted"]
    for act, field, value in ACTS:
        press(page, f"{act} the model large")
        wait_until(lambda field=field, value=value: state(gateway, "large")[field] == value, 20, act)
        unload = page.get_by_role("button", name="unload the model large")
        unload.wait_for(state="detached" if act == "pin" else "visible", timeout=10_000)
    press(page, "unload the model large")
    wait_until(lambda: events(gateway, "large")[-2:] == ["loaded", "unloaded"], 20, "it is unloaded by order")
    press(page, "remove the model more")
    page.get_by_role("button", name="remove the model more").wait_for(state="detached", timeout=10_000)
    wait_until(lambda: focused(page) == "List of models", 10, "the focus has a place when its row has left")
    assert state(gateway, "more")["error"]["code"] == "model_not_found"
    press(page, "load the model chat")
    wait_until(lambda: state(gateway, "chat")["state"] == "ready", 20, "chat is loaded again")
    assert violations(page) == []
    assert wider_than(page, PHONE) == []


def asked(tenant: str, count: int, priority: int) -> list[dict[str, Any]]:
    return [{"request_id": f"{tenant}-{at}", "tenant": tenant, "priority": priority} for at in range(count)]


def test_every_page_is_used_by_keyboard_alone_and_the_focus_stays_when_lists_change(
    system: System, gateway: Process, open_page: Opener
) -> None:
    turn = gateway.submit(conversation_id="support-41", payload={"messages": [{"role": "user", "content": "Hello"}]})
    assert gateway.request(turn, wait=30)["status"] == "completed"
    send(system, *asked("acme", 24, 5), *asked("shop", 12, 2), *asked("crawler", 28, 9))
    page = open_page(gateway)
    told(page, "crawler")
    page.wait_for_timeout(4_000)
    keep_screenshot(page, "console")
    late = gateway.submit(priority=0, execution_timeout_ms=50, max_attempts=1)
    assert gateway.request(late, wait=30)["status"] == "dead_lettered"
    letter = httpx.get(f"{gateway.url}/v1/admin/dlq").json()["data"][0]["id"]
    httpx.post(f"{gateway.url}/v1/admin/classes/low/pause")
    send(system, *asked("later", 3, 9))
    wait_until(lambda: httpx.get(f"{gateway.url}/v1/admin/stats").json()["queues"]["high"]["depth"] == 0, 60, "drained")
    wait_until(
        lambda: httpx.get(f"{gateway.url}/v1/admin/stats").json()["queues"]["medium"]["depth"] == 0, 60, "drained"
    )
    for place, words, picture in (
        ("", "later", None),
        ("#/requests?tenant=*", "later-0", "console-requests"),
        (f"#/requests/{turn}", "completed, attempt", None),
        ("#/models", "chat on ", "console-models"),
        ("#/dead-letters", "execution_timeout", None),
        (f"#/dead-letters/{letter}", "execution_timeout", "console-dead-letter"),
        ("#/conversations", "support-41", None),
        ("#/conversations/support-41", "Hello", "console-conversation"),
        ("#/playground", "completed", "console-playground"),
        ("#/playground/embedding", "All fields of the payload", None),
        ("#/playground/image_editing", "All fields of the payload", None),
        ("#/usage", "Usage of all tenants", None),
        ("#/keys", "This gateway asks for no key", None),
        ("#/audit", "POST /v1/admin/classes/{class_name}/{action}", None),
        ("#/workers", "Gateways and the processes beside them", "console-workers"),
    ):
        page.goto(f"{gateway.url}/{place}")
        if place == "#/playground":
            press(page, "Ask")
        told(page, words)
        page.wait_for_timeout(500)
        if picture:
            keep_screenshot(page, picture)
        assert out_of_reach(page) == [], place
    page.goto(f"{gateway.url}/#/usage")
    page.get_by_role("combobox").select_option("tenant")
    page.get_by_role("row").filter(has_text="shop").get_by_text("12", exact=True).first.wait_for(timeout=10_000)
    assert violations(page) == []
    assert wider_than(page, PHONE) == []
    page.goto(f"{gateway.url}/#/requests?tenant=*")
    move_to(page, "later-0", "link")
    send(system, *asked("new", 3, 9))
    told(page, "new-2")
    assert focused(page) == "later-0"
    page.keyboard.press("Enter")
    told(page, "Of the tenant later")
    page.goto(f"{gateway.url}/")
    line = "3 requests of class low, chat, tenant later"
    move_to(page, line, "link")
    send(system, *asked("newer", 7, 9))
    page.get_by_role("link", name="7 requests of class low, chat, tenant newer").wait_for(timeout=10_000)
    page.wait_for_timeout(2_500)
    assert focused(page) == line
    page.keyboard.press("Enter")
    told(page, "3 requests here")
    assert page.url.endswith("#/requests?tenant=later&class=low&task=text_generation&model=chat&status=waiting")
