"""Orders about models over HTTP: what stands on the topic then, what is shown, and who may."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.common import admin
from penstock.common.clock import now_ms
from penstock.common.desired import read_desired
from penstock.schemas.codec import default_codec
from penstock.schemas.desired import model_key
from penstock.schemas.records import DesiredState, ModelInfo, ModelState, WorkerState
from support import wait_until

NEW = {"id": "owner/new", "source": "owner/new", "engine": "text", "aliases": ["fresh"], "keep_alive": "5m"}


def report(scribe: Any, name: str, pool: str | None = None) -> None:
    info = ModelInfo(
        model=name,
        tasks=["text_generation"],
        pool=pool,
        engine="noop",
        state="ready",
        updated_at=now_ms(),
        worker_id="w",
    )
    scribe.put(scribe.names.model, info, model_key(name, pool).encode())


@pytest.fixture(scope="module")
def models(place: Any, gateway: Any) -> None:
    """smol, and big in two pools, with a worker that has smol."""
    scribe = place.scribe
    report(scribe, "smol")
    report(scribe, "big", "p")
    report(scribe, "big", "q")
    states = [ModelState(model="smol", state="ready", device="cpu", queued=3)]
    state = WorkerState(worker_id="w", state="running", started_at=1, updated_at=now_ms(), models=states)
    scribe.put(scribe.names.worker, state, b"w")
    wait_until(lambda: len(gateway.get("/v1/models").json()["data"]) == 3, describe="the gateway knows the models")


def desired_of(place: Any, key: str) -> DesiredState:
    return read_desired(place.kafka, default_codec())[key].state


def ordered(gateway: Any, path: str, **query: str) -> dict[str, Any]:
    answer = gateway.http.post(f"/v1/admin/{path}", params=query)
    assert answer.status_code == 202, answer.text
    return answer.json()


@pytest.mark.usefixtures("models")
def test_two_pools_have_models_of_one_name(gateway: Any) -> None:
    shown = [(one["id"], one["pool"]) for one in gateway.get("/v1/models").json()["data"]]
    assert shown == [("big", "p"), ("big", "q"), ("smol", None)]
    assert gateway.get("/v1/models/big", params={"pool": "q"}).json()["pool"] == "q"


@pytest.mark.usefixtures("models")
def test_orders_add_up_to_a_desired_state(place: Any, gateway: Any) -> None:
    assert ordered(gateway, "models/smol/load")["loaded"] is True
    ordered(gateway, "models/smol/pin")
    ordered(gateway, "models/smol/pause")
    state = desired_of(place, "model/smol")
    assert (state.loaded, state.pinned, state.paused) == (True, True, True)
    assert (state.action, state.created_by) == ("pause", "anybody")
    shown = gateway.get("/v1/admin/models/smol").json()
    assert (shown["paused"], shown["pinned"], shown["desired"]["loaded"]) == (True, True, True)
    assert [(one["device"], one["queued"]) for one in shown["replicas"]] == [("cpu", 3)]
    ordered(gateway, "models/smol/resume")
    assert not desired_of(place, "model/smol").paused
    ordered(gateway, "models/big/unload", pool="q")
    assert desired_of(place, "model/big@q").loaded is False


@pytest.mark.usefixtures("models")
def test_a_pinned_model_is_not_unloaded_before_it_is_unpinned(place: Any, gateway: Any) -> None:
    """It was loaded again within milliseconds, without a word."""
    ordered(gateway, "models/big/pin", pool="p")
    refused = gateway.http.post("/v1/admin/models/big/unload", params={"pool": "p"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
    assert "big is pinned, which keeps it loaded: unpin it first" in refused.json()["error"]["message"]
    assert desired_of(place, "model/big@p").loaded is None
    ordered(gateway, "models/big/unpin", pool="p")
    assert ordered(gateway, "models/big/unload", pool="p")["loaded"] is False
    assert ordered(gateway, "models/big/pin", pool="p")["loaded"] is None, "what is kept loaded is loaded"
    by_entry = {**NEW, "id": "kept", "aliases": [], "pinned": True}
    assert gateway.http.post("/v1/admin/models", json=by_entry).status_code == 202
    assert gateway.http.post("/v1/admin/models/kept/unload").status_code == 409
    assert gateway.http.delete("/v1/admin/models/kept").status_code == 202


@pytest.mark.usefixtures("models")
def test_an_order_says_its_revision_and_workers_say_what_they_have_observed(place: Any, gateway: Any) -> None:
    first = ordered(gateway, "models/smol/load")["revision"]
    last = ordered(gateway, "classes/low/resume")["revision"]
    assert last == first + 1 == read_desired(place.kafka, default_codec())["class/low"].revision

    topic_id = admin.topic_id(place.kafka, place.kafka.names.desired)

    def reports(name: str, observed: int | None, state: str = "running", topic_id: str | None = topic_id) -> None:
        told = WorkerState(
            worker_id=name,
            state=state,
            started_at=1,
            updated_at=now_ms(),
            pool="r",
            observed_revision=observed,
            observed_topic_id=topic_id,
        )
        place.scribe.put(place.scribe.names.worker, told, name.encode())

    def shown(revision: int) -> Any:
        facts = gateway.get(f"/v1/admin/orders/{revision}", params={"pool": "r"}).json()
        return facts["observed"], facts["observed_revision"], facts["waiting_workers"]

    assert shown(first) == (False, None, [])
    reports("r1", last)
    reports("r2", None)
    wait_until(lambda: shown(first) == (False, None, ["r2"]), 20, lambda: str(shown(first)))
    reports("r2", first)
    wait_until(lambda: shown(first) == (True, first, []), 20, lambda: str(shown(first)))
    assert shown(last) == (False, first, ["r2"])
    reports("r2", last, topic_id="of a topic that was deleted")
    wait_until(lambda: shown(last) == (False, None, ["r2"]), 20, lambda: str(shown(last)))
    reports("r2", first, state="stopped")
    wait_until(lambda: shown(last) == (True, last, []), 20, lambda: str(shown(last)))
    assert gateway.http.get("/v1/admin/orders/-1").status_code == 400
    model = gateway.get("/v1/admin/models/smol").json()
    assert (model["desired"]["revision"], model["observed_revision"], model["waiting_workers"]) == (first, None, ["w"])


@pytest.mark.usefixtures("models")
def test_a_model_comes_and_goes(place: Any, gateway: Any) -> None:
    added = gateway.http.post("/v1/admin/models", json=NEW)
    assert added.status_code == 202, added.text
    shown = gateway.get("/v1/admin/models/fresh").json()
    assert (shown["id"], shown["state"], shown["available"]) == ("owner/new", "absent", False)
    again = gateway.http.post("/v1/admin/models", json=NEW)
    assert (again.status_code, again.json()["error"]["code"]) == (409, "conflict")
    clash = gateway.http.post("/v1/admin/models", json={**NEW, "id": "x", "aliases": ["smol"]})
    assert (clash.status_code, clash.json()["error"]["message"]) == (409, "the name smol is taken by the model smol")
    changed = gateway.http.post("/v1/admin/models", json={**NEW, "priority": 1}, params={"replace": "true"})
    assert changed.status_code == 202
    assert '"priority":1' in (desired_of(place, "model/owner/new").entry or "")
    report(place.scribe, "owner/new")
    wait_until(lambda: gateway.get("/v1/models/owner/new").status_code == 200, describe="a worker reported it")
    assert gateway.http.delete("/v1/admin/models/owner/new").status_code == 202
    wait_until(lambda: gateway.get("/v1/models/owner/new").status_code == 404, describe="it has left the list")
    assert desired_of(place, "model/owner/new").removed
    gone = gateway.http.post("/v1/admin/models/owner/new/load")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.usefixtures("models")
def test_a_class_is_paused(place: Any, gateway: Any) -> None:
    assert ordered(gateway, "classes/low/pause")["paused"] is True
    ordered(gateway, "classes/low/resume", pool="p")
    assert desired_of(place, "class/low").paused
    assert not desired_of(place, "class/low@p").paused
    ordered(gateway, "classes/low/resume")


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"),
    [
        ("POST", "models/none/load", None, 404, "the model `none` does not exist; there are big, "),
        ("POST", "models/big/load", None, 400, "is in the pools p, q: name one of them"),
        ("POST", "models/smol/paint", None, 400, "action"),
        ("POST", "classes/lowest/pause", None, 404, "there are high, medium, low"),
        ("POST", "classes/low/load", None, 400, "action"),
        ("POST", "models", {"id": "x", "source": "y"}, 400, "engine"),
        ("POST", "models", {**NEW, "id": "x", "sauce": 1}, 400, "sauce: there is no such field"),
        ("POST", "models", [], 400, "must be an object"),
        ("DELETE", "models/none", None, 404, "does not exist"),
    ],
)
def test_what_is_wrong_is_said(gateway: Any, method: str, path: str, body: Any, status: int, message: str) -> None:
    answer = gateway.http.request(method, f"/v1/admin/{path}", json=body)
    assert answer.status_code == status, answer.text
    assert message in answer.json()["error"]["message"]


def test_only_admins_may(place: Any) -> None:
    from penstock.gateway.edge.keys import create_key

    keys = place.folder / "keys.json"
    secret = create_key(keys, tenant="acme", scopes=["submit", "read", "cancel"])
    gateway = place.gateway("g-keys", auth={"keys_file": keys})
    headers = {"authorization": f"Bearer {secret}"}
    for method, path in (
        ("GET", "models"),
        ("POST", "models"),
        ("GET", "models/smol"),
        ("DELETE", "models/smol"),
        ("POST", "models/smol/load"),
        ("POST", "classes/low/pause"),
    ):
        answer = gateway.http.request(method, f"/v1/admin/{path}", headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden"), path


def test_a_removed_model_that_a_worker_reported_once_more_before_it_died_leaves_the_list(own_place: Any) -> None:
    gateway = own_place.gateway(worker_late_s=1)
    report(own_place.scribe, "smol")
    wait_until(lambda: gateway.get("/v1/models").json()["data"], describe="the gateway knows the model")
    assert gateway.http.delete("/v1/admin/models/smol").status_code == 202
    wait_until(lambda: not gateway.get("/v1/models").json()["data"], describe="the model leaves the list")
    report(own_place.scribe, "smol")
    report(own_place.scribe, "other")

    def shown() -> list[str]:
        return [one["id"] for one in gateway.get("/v1/models").json()["data"]]

    wait_until(lambda: shown() == ["other"], describe=lambda: f"models {shown()}")
    assert gateway.get("/readyz").json()["models_without_worker"] == ["other"]
