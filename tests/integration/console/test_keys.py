"""Keys, limits of tenants and the record of actions in the console, in a browser: what is done is seen in the API."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from kit.console import (
    HOSTILE,
    PHONE,
    Opener,
    focused,
    gone,
    keep_screenshot,
    log_in,
    out_of_reach,
    tab_to,
    told,
    violations,
    wider_than,
)
from penstock.gateway.edge.keys import create_key
from support import wait_until
from system import Process, System, running

Json = dict[str, Any]


@pytest.fixture(scope="module")
def system(kafka: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("keys")
    keys = folder / "keys.json"
    operator = create_key(keys, tenant="ops", scopes=["admin"], name="first")
    reader = create_key(keys, tenant="acme", scopes=["read"])
    system = System(kafka.bootstrap_servers, "keys-", folder, gateway_options={"limits": {"outstanding": 7}})
    system.auth, system.keys = {"keys_file": str(keys)}, {"ops": operator, "acme": reader}
    with running(system):
        yield system.start_all(["g1"])


@pytest.fixture
def http(system: System, gateway: Process) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {system.keys['ops']}"}
    with httpx.Client(base_url=f"{gateway.url}/v1/admin", headers=headers, timeout=60) as client:
        yield client


@pytest.fixture
def page(system: System, gateway: Process, open_page: Opener) -> Iterator[Any]:
    """The page of keys, of an operator who confirms everything."""
    page = open_page(gateway, "#/keys", permissions=["clipboard-read", "clipboard-write"])
    page.on("dialog", lambda dialog: dialog.accept())
    log_in(page, system.keys["ops"])
    page.get_by_role("heading", name="Make a key").wait_for()
    yield page
    open_page.expect("401")


def named(http: httpx.Client, name: str) -> Json:
    """The key of this name; empty if there is none."""
    return next((one for one in http.get("/keys").json()["data"] if one["name"] == name), {})


def works(gateway: Process, secret: str) -> int:
    return httpx.get(f"{gateway.url}/v1/stats", headers={"authorization": f"Bearer {secret}"}).status_code


def part(page: Any, name: str) -> Any:
    return page.get_by_role("region", name=name, exact=True)


def shown_secret(page: Any) -> str:
    told(page, "It is shown once")
    return str(page.locator("section[aria-labelledby=secret] pre").inner_text())


def make(page: Any, own: str, **fields: str) -> None:
    form = part(page, "Make a key")
    for label, value in fields.items():
        form.get_by_label(label.replace("_", " "), exact=True).fill(value)
    form.get_by_label("Your key").fill(own)
    page.keyboard.press("Enter")


def test_a_key_is_made_changed_rotated_and_revoked(
    system: System, gateway: Process, http: httpx.Client, page: Any, open_page: Opener
) -> None:
    own = system.keys["ops"]
    make(page, "not a key", Tenant="acme", Name="refused")
    told(page, "this key is unknown or revoked")
    page.get_by_role("button", name="Close").click()
    part(page, "Make a key").get_by_text("Limits").click()
    part(page, "Make a key").get_by_label("outstanding").fill("5")
    part(page, "Make a key").get_by_label("cancel", exact=True).uncheck()
    make(page, own, Tenant="acme", Name=HOSTILE, Most_urgent_priority="3", Works_until="2099-01-01T00:00")
    first = shown_secret(page)
    made = named(http, HOSTILE)
    assert (made["tenant"], made["scopes"], made["max_priority"]) == ("acme", ["submit", "read"], 3)
    assert (made["limits"], made["rate"]) == ({"outstanding": 5}, None)
    assert made["expires_at"].startswith(("2098-12-31", "2099-01-01"))
    assert not named(http, "refused")
    assert works(gateway, first) == 200
    assert focused(page).startswith("Secret of the key")
    page.get_by_role("button", name="copy the secret").click()
    told(page, "copy the secret: done")
    assert page.evaluate("navigator.clipboard.readText()") == first
    told(page, HOSTILE)
    assert violations(page) == []
    assert wider_than(page, PHONE) == []
    page.get_by_role("button", name="It is kept").click()
    gone(page, "It is shown once")
    assert first not in page.content()
    assert out_of_reach(page) == []
    of_the_file = page.get_by_role("row").filter(has_text="in the keys file")
    assert of_the_file.count() == 2
    assert of_the_file.get_by_role("button").count() == 0

    page.get_by_role("link", name=made["id"], exact=True).click()
    rights = part(page, "Change rights")
    rights.get_by_label("read", exact=True).uncheck()
    rights.get_by_label("Submissions a second").fill("2.5")
    rights.get_by_label("Your key").fill(own)
    page.keyboard.press("Enter")
    told(page, f"changed: {made['id']}")
    changed = http.get(f"/keys/{made['id']}").json()
    kept = ("tenant", "name", "max_priority", "limits", "expires_at")
    assert {name: changed[name] for name in kept} == {name: made[name] for name in kept}
    assert (changed["scopes"], changed["rate"]) == (["submit"], 2.5)
    wait_until(lambda: works(gateway, first) == 403, 10, "it may not read any more")
    read, rate = rights.get_by_label("read", exact=True), rights.get_by_label("Submissions a second")
    wait_until(lambda: (read.is_checked(), rate.input_value()) == (False, "2.5"), 10, "the form has what is now")

    rate.fill("4")
    elsewhere = {"limits": {"outstanding": 9, "sockets": 2}, "max_priority": 5}
    assert http.post(f"/keys/{made['id']}", json=elsewhere).status_code == 200
    urgent = rights.get_by_label("Most urgent priority")
    wait_until(lambda: urgent.input_value() == "5", 10, "a field that is not edited follows the key")
    rights.get_by_text("Limits").click()
    rights.get_by_role("spinbutton", name="sockets").fill("")
    rights.get_by_label("Your key").fill(own)
    page.keyboard.press("Enter")
    wait_until(lambda: http.get(f"/keys/{made['id']}").json()["rate"] == 4, 10, "the edited rate is in force")
    changed = http.get(f"/keys/{made['id']}").json()
    assert (changed["limits"], changed["max_priority"]) == ({"outstanding": 9}, 5)

    assert http.post(f"/keys/{made['id']}", json={"expires_at": "2020-01-01T00:00:00Z"}).status_code == 200
    told(page, "It has expired: choose a later end, or none")
    end = rights.get_by_label("Works until")
    for value, problem in (("2020-01-01T00:00", "Choose a later end, or none."), ("", "")):
        end.fill(value)
        rights.get_by_label("Your key").fill(own)
        page.keyboard.press("Enter")
        assert problem in end.evaluate("one => one.validationMessage")
    gone(page, "It has expired")
    assert http.get(f"/keys/{made['id']}").json()["expires_at"] is None

    rotate = part(page, "Rotate")
    rotate.get_by_label("Minutes").fill("0")
    rotate.get_by_label("Your key").fill(own)
    page.keyboard.press("Enter")
    second = shown_secret(page)
    assert second != first
    wait_until(lambda: (works(gateway, first), works(gateway, second)) == (401, 403), 10, "the new secret alone works")
    assert violations(page) == []
    part(page, "Change rights").get_by_label("Name").fill("short")  # a field scrolls what is longer than itself
    assert wider_than(page, PHONE) == []
    assert out_of_reach(page) == []
    revoke = f"revoke the key {made['id']}"
    tab_to(page, revoke)
    page.keyboard.press("Enter")
    told(page, f"{revoke}: requested")
    gone(page, HOSTILE)
    assert works(gateway, second) == 401
    assert not named(http, HOSTILE)
    assert page.title() == "Keys and limits – Penstock"
    open_page.expect("404")


def test_limits_of_a_tenant_are_ordered_changed_and_taken_back(http: httpx.Client, page: Any) -> None:
    def ordered() -> Any:
        return {one["tenant"]: one["ordered"] for one in http.get("/limits").json()["data"]}

    told(page, "The configured limits hold for all tenants")
    for name, tenant in (("shop backend", "shop"), ("crawler", "acme")):
        assert http.post("/keys", json={"name": name, "tenant": tenant, "max_priority": 4}).status_code == 201
    form = part(page, "Limits of tenants")
    form.get_by_label("Tenant").fill("shop")
    form.get_by_role("spinbutton", name="outstanding").fill("3")
    page.keyboard.press("Enter")
    told(page, "limits of shop: ordered")
    assert ordered() == {"shop": {"outstanding": 3}}
    page.get_by_role("button", name="change the limits of shop").click()
    form.get_by_role("spinbutton", name="requests per s").fill("0.5")
    page.keyboard.press("Enter")
    wait_until(lambda: ordered() == {"shop": {"outstanding": 3, "requests_per_s": 0.5}}, 10, lambda: str(ordered()))
    told(page, "outstanding 3, requests_per_s 0.5")
    keep_screenshot(page, "console-keys")
    assert http.post("/limits/shop", json={"outstanding": None}).status_code == 200
    page.get_by_role("cell", name="outstanding no limit", exact=True).wait_for(timeout=10_000)
    page.get_by_role("button", name="change the limits of shop").click()
    form.get_by_label("no limit: sockets").check()
    assert violations(page) == []
    assert wider_than(page, PHONE) == []
    form.get_by_label("no limit: outstanding").uncheck()
    form.get_by_role("spinbutton", name="requests per s").fill("2")
    page.keyboard.press("Enter")
    wait_until(lambda: ordered() == {"shop": {"sockets": None, "requests_per_s": 2}}, 10, lambda: str(ordered()))
    page.get_by_role("button", name="remove the order about shop").click()
    told(page, "The configured limits hold for all tenants")
    assert ordered() == {}
    page.get_by_role("link", name="Audit").click()
    told(page, "DELETE /v1/admin/limits/{tenant}")
    keep_screenshot(page, "console-audit")


def test_the_last_day_of_a_key_is_looked_for_on_all_pages(system: System, page: Any) -> None:
    ids = {name: secret.split("_")[1] for name, secret in system.keys.items()}

    def answer(route: Any, *, endless: bool) -> None:
        first = "after=" not in route.request.url
        row = {"key_id": None if first else ids["ops"], "day": "2026-01-02"}
        route.fulfill(json={"data": [row], "has_more": first or endless, "last_id": "a/b"})

    for endless, unused in ((True, "not known"), (False, "none in 30 days")):
        page.route("**/v1/admin/usage?*", partial(answer, endless=endless))
        page.reload()
        told(page, "2026-01-02")
        rows = page.get_by_role("region", name="List of keys").get_by_role("row")
        assert "2026-01-02" in rows.filter(has_text=ids["ops"]).inner_text()
        assert unused in rows.filter(has_text=ids["acme"]).inner_text()


def test_the_record_of_actions_is_filtered_and_whole(
    system: System, gateway: Process, http: httpx.Client, page: Any
) -> None:
    for number in range(25):
        assert http.post("/limits/many", json={"outstanding": number}).status_code == 200
    made = http.post("/keys", json={"tenant": "acme", "name": HOSTILE, "scopes": ["admin"]}).json()
    other = {"authorization": f"Bearer {made['secret']}"}
    assert http.post("/classes/none/pause", headers=other).status_code == 404
    page.get_by_role("link", name="Audit").click()
    rows = page.get_by_role("region", name="List of actions").locator("tbody tr")
    rows.first.filter(has_text="refused (404)").wait_for(timeout=10_000)
    assert HOSTILE in rows.first.inner_text()
    assert rows.count() == 20
    page.get_by_role("link", name="Older").click()
    wait_until(lambda: rows.count() > 0 and "/limits/" in rows.first.inner_text(), 10, page.inner_text("main"))
    page.get_by_role("link", name="Newest").click()
    rows.first.filter(has_text="refused (404)").wait_for(timeout=10_000)
    rows.nth(1).locator("summary").click()
    record = rows.nth(1).locator("pre").inner_text()
    assert '"name": ' in record
    assert made["secret"] not in page.content()
    assert violations(page) == []
    assert wider_than(page, PHONE) == []
    assert out_of_reach(page) == []

    rows.first.get_by_role("link").click()
    wait_until(lambda: rows.count() == 1, 10, "one action of that key")
    assert page.url.endswith(f"#/audit?key_id={made['id']}")
    page.get_by_label("Id of the key").fill("")
    page.get_by_label("What").fill("/v1/admin/keys")
    page.keyboard.press("Enter")
    shown = http.get("/audit", params={"action": "/v1/admin/keys"}).json()["data"]
    wait_until(lambda: rows.count() == len(shown), 10, lambda: f"{rows.count()} of {len(shown)}")
    page.get_by_label("What").fill("nothing")
    page.keyboard.press("Enter")
    told(page, "No action matches the filter")
    page.get_by_role("link", name="All", exact=True).click()
    page.get_by_label("Since").fill("2099-01-01T00:00:00")
    page.keyboard.press("Enter")
    told(page, "No action matches the filter")


def test_a_reader_is_offered_neither_page(system: System, gateway: Process, open_page: Opener) -> None:
    page = open_page(gateway, "#/keys")
    log_in(page, system.keys["acme"])
    told(page, "This page needs a key with the scope admin")
    assert page.get_by_role("link", name="Audit").count() == 0
    open_page.expect("401")
