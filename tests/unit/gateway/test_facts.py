"""Facts of a gateway: of workers and conversations, pools, what requests wait for, open transactions."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from kit.records import (
    CODEC,
    ORIGIN,
    REQUESTS,
    RESULTS,
    STATUSES,
    chunk,
    model_info,
    model_state,
    outcome,
    request,
    status,
    worker,
)
from kit.refusals import refused
from kit.view_gateway import ViewGateway
from penstock.common.clock import now_ms
from penstock.common.model_pools import pool_of
from penstock.common.settings import KafkaSettings
from penstock.gateway.metrics import GatewayMetrics
from penstock.gateway.service import open_transactions
from penstock.gateway.service.conversation_facts import FactsOfConversations
from penstock.gateway.service.facts import Facts
from penstock.gateway.service.open_transactions import HELD_MS, OpenTransactions
from penstock.gateway.service.subscriptions import Subscriptions
from penstock.gateway.service.turns import Turns
from penstock.gateway.threads import Threads
from penstock.gateway.view.backfill import Backfill
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.frames import StatusFrame
from penstock.gateway.view.hub import Hub
from penstock.gateway.view.outputs import artifact_ids_of
from penstock.gateway.view.rows import restored, row_of, snapshot
from penstock.gateway.view.view import View
from penstock.schemas.errors import BrokerUnavailable, InvalidRequest, NotFound, PenstockError
from penstock.schemas.records import (
    ArtifactRef,
    ConversationFacts,
    DesiredState,
    DeviceState,
    InferenceRequest,
    ModelState,
    Origin,
    StatusEvent,
    WaitingFor,
)
from penstock.schemas.times import rfc3339
from penstock.schemas.topics import TP, TopicNames


def facts_of(view: View) -> Facts:
    follower: Any = None
    return Facts(view, follower, Hub())


def test_offsets_of_a_worker_are_shown_by_partition_and_cost_its_report_little(view: View) -> None:
    """Whoever starts reads the reports of a day that are not compacted yet."""
    places = [f"inference.request.medium/{number}" for number in range(320)]
    of_each = {"committed": [-1, *[10**9] * 319], "lag": [0, 1_000, *[0] * 318]}
    before, told = worker("w", assigned=places), worker("w", assigned=places, **of_each)
    assert len(CODEC.encode(told)) - len(CODEC.encode(before)) < 2_500
    view.fleet.workers = {"w": told, "old": worker("old", assigned=places)}
    old, shown = facts_of(view).stats()["workers"]
    assert (old["committed"], old["lag"]) == ({}, {})
    assert shown["committed"] == dict.fromkeys(places[1:], 10**9)
    assert shown["lag"] == {places[1]: 1_000}


def test_the_memory_of_workers_that_stopped_is_not_counted(view: View) -> None:
    """Their last word stands on the topic for a day; the device is the next worker's."""
    device = DeviceState(device="cuda:0", kind="gpu", total_bytes=100, reserved_bytes=20, used_bytes=10)
    states = {"a": "running", "b": "stopped", "c": "stopping"}
    view.fleet.workers = {name: worker(name, state=state, devices=[device]) for name, state in states.items()}
    assert facts_of(view).gauges().device_memory[("cuda:0", "limit")] == 200


def test_what_is_half_read_is_in_no_gauge(view_gateway: ViewGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of the past may have ended since: 0 as a depth would end the workers that they need."""
    view, known = view_gateway.view, facts_of(view_gateway.view)
    at_ms = now_ms()
    view.fleet.models = {("m", ""): model_info(updated_at=at_ms)}
    monkeypatch.setattr("penstock.gateway.view.view.COUNTED_AT_ONCE", 1)
    view.begin_backfill(Backfill({}, {REQUESTS: 2}, 0, at_ms))
    view.apply_backfill([view_gateway.message(REQUESTS, request(name, model=name)) for name in "mn"])
    view_gateway.read(REQUESTS, request("new", model="m"), timestamp_ms=at_ms)
    names = ("queue_depth", "oldest_age_seconds", "model_depth", "model_oldest_age_seconds", "model_queue_depth")

    def shown() -> tuple[bool, ...]:
        page = GatewayMetrics(known.gauges).render().decode()
        return tuple(f"\npenstock_{name}{{" in page for name in names)

    assert (known.gauges().inflight, known.stats()["inflight"], view.live_count) == (1, 1, 3)
    assert shown() == (False,) * 5
    passes = [(known.gauges().inflight, shown(), known.history_until_ms() is None) for _ in view.end_backfill()]
    assert passes == [(1, (False,) * 5, False), (2, (False,) * 5, False)]
    assert (known.gauges().inflight, known.stats()["inflight"], known.history_until_ms()) == (3, 3, None)
    assert shown() == (True,) * 5
    assert known.gauges().queue_depth["medium"] == 3


async def test_a_dry_run_knows_the_turns_of_its_class_that_are_not_done(view: View) -> None:
    facts, at_ms, turns = facts_of(view), now_ms(), Turns(view, Threads())
    view.fleet.models = {("m", ""): model_info(updated_at=at_ms)}
    view.fleet.workers = {"w": worker(updated_at=at_ms, models=[model_state("m")])}

    def asked(request_id: str, conversation: str, priority: int) -> InferenceRequest:
        turn = {"tenant": "t", "priority": priority, "conversation_id": conversation, "created_at": at_ms}
        return request(request_id, text_generation={"messages": []}, **turn)

    view.accepted(asked("first", "c1", 5), replace(ORIGIN, append_time_ms=at_ms))
    reasons = [
        (facts.plan(one, await turns.before(one))["waiting_for"] or {}).get("reason")
        for one in (asked("next", *line) for line in (("c1", 5), ("c1", 0), ("c2", 5)))
    ]
    assert reasons == ["conversation", None, None]


def test_no_gauge_tells_when_a_counter_began() -> None:
    assert "_created" not in GatewayMetrics().render().decode()


# -- facts of conversations: what is unwritten is read on the event loop, the file on a thread


def record(conversation_id: str, title: str, topic_id: str = "id") -> bytes:
    facts = ConversationFacts(tenant="t", conversation_id=conversation_id, updated_at=0, topic_id=topic_id, title=title)
    return CODEC.encode(facts)


class FactsView:
    """Records who asks it."""

    def __init__(self, unwritten: dict[str, bytes | None], written: dict[str, bytes]) -> None:
        self.unwritten, self.written = unwritten, written
        self.asked: list[tuple[str, int]] = []

    def unwritten_facts(self, keys: list[str]) -> dict[str, bytes | None]:
        self.asked.append(("unwritten", threading.get_ident()))
        return {key: self.unwritten[key] for key in keys if key in self.unwritten}

    def written_facts(self, keys: list[str]) -> dict[str, bytes]:
        self.asked.append(("written", threading.get_ident()))
        return {key: self.written[key] for key in keys if key in self.written}


def conversation_facts(view: Any = None, threads: Any = None) -> FactsOfConversations:
    unused: Any = None
    return FactsOfConversations(unused, view, unused, unused, KafkaSettings(), CODEC, threads)


async def test_the_loop_looks_first_and_what_it_has_goes_before_the_file(threads: Threads) -> None:
    unwritten = {"t.changed": record("changed", "new"), "t.gone": None, "t.broken": b"\0nothing"}
    written = {f"t.{name}": record(name, "old") for name in ("changed", "gone", "same", "former")}
    view = FactsView(unwritten, written)
    names = ["changed", "gone", "same", "former", "broken", "none"]
    topic_ids = {name: "another" if name == "former" else "id" for name in names}
    found = await conversation_facts(view, threads).of_many("t", topic_ids)
    assert {name: one.title for name, one in found.items()} == {"changed": "new", "same": "old"}
    assert [what for what, _ in view.asked] == ["unwritten", "written"]
    assert view.asked[0][1] == threading.get_ident() != view.asked[1][1]


def test_changes_of_one_conversation_come_one_after_the_other() -> None:
    facts = conversation_facts()
    first = facts.changing("t", "c")
    assert facts.changing("t", "c") is first
    assert facts.changing("u", "c") is not first


LARGE = ArtifactRef(artifact_id="large", uri="u", media_type="application/json", size_bytes=1, sha256="s")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, set()),
        ({"output_artifact": LARGE}, {"large"}),
        ({"image_generation": {"images": [{"artifact_id": "a"}, {"artifact_id": "b"}]}}, {"a", "b"}),
        ({"image_generation": {"images": [{"url": "https://elsewhere"}]}}, set()),
        ({"status": "failed"}, set()),
    ],
)
def test_an_outcome_names_its_images_and_its_large_output(values: dict[str, Any], expected: set[str]) -> None:
    assert artifact_ids_of(outcome(task="image_generation", **values)) == expected


# -- where a request is put


AT = now_ms()
MODELS = [
    model_info("smol", updated_at=AT),
    model_info("big", pool="b", aliases=["large"], updated_at=AT),
    model_info("big", pool="a", updated_at=AT),
    model_info("smol", pool="a", updated_at=AT),
    model_info("vec", "embedding", pool="a", updated_at=AT),
]


@pytest.mark.parametrize(
    ("name", "pool"), [("smol", None), ("big", "a"), ("large", "b"), ("vec", None), ("unheard", None)]
)
def test_a_models_pool(name: str, pool: str | None) -> None:
    assert pool_of(MODELS, "text_generation", name) == pool
    assert pool_of(reversed(MODELS), "text_generation", name) == pool


@pytest.fixture
def facts(view: View) -> Facts:
    """The conversation c1 is in the pool b, c2 in the common pool."""
    view.fleet.models = {(model.model, model.pool or ""): model for model in MODELS}
    view.accepted(request("r1", conversation_id="c1", pool="b"), ORIGIN)
    view.accepted(request("r2", conversation_id="c2"), replace(ORIGIN, offset=1))
    return Facts(view, cast("Any", None), Hub())


@pytest.mark.parametrize(
    ("fields", "pool"),
    [
        ({}, None),  # resolved within the common pool
        ({"model": "large"}, "b"),
        ({"model": "smol"}, None),
        ({"model": "large", "pool": "a"}, "a"),
        ({"conversation_id": "c1"}, "b"),
        ({"conversation_id": "c1", "model": "smol"}, "b"),
        ({"conversation_id": "c3", "model": "large"}, "b"),
    ],
)
def test_a_request_goes_to_its_own_pool_its_conversations_or_its_models(
    facts: Facts, fields: dict[str, str], pool: str | None
) -> None:
    assert facts.routed(request(**fields)).pool == pool


@pytest.mark.parametrize(("conversation_id", "where"), [("c1", "the pool b"), ("c2", "the common pool")])
def test_a_conversation_stays_in_one_pool(facts: Facts, conversation_id: str, where: str) -> None:
    with refused(InvalidRequest, match=f"the conversation {conversation_id} is in {where}", param="pool"):
        facts.routed(request(conversation_id=conversation_id, pool="a"))


# -- what a request waits for, in each place that shows it


MEMORY = WaitingFor(reason="memory", position=3, need_bytes=70, free_bytes=20, estimated_start_at=1_763_735_000_123)
PUBLIC = {
    "reason": "memory",
    "position": 3,
    "need_bytes": 70,
    "free_bytes": 20,
    "estimated_start_at": "2025-11-21T14:23:20.123Z",
}


def waiting(why: WaitingFor | None, name: str = "queued", **fields: Any) -> StatusEvent:
    return status(name, position=None if why is None else why.position, waiting_for=why, **fields)


def entry(why: WaitingFor | None = MEMORY, **fields: Any) -> Entry:
    made = Entry("default", "r", 0, task="text_generation")
    made.on_status(waiting(why, **fields))
    return made


def test_object_and_frame_say_the_same() -> None:
    waits = entry(ttl_ms=60_000, model_reason="ready")
    shown = waits.to_json()
    assert shown["waiting_for"] == waits.status_frame().to_json()["waiting_for"] == PUBLIC
    assert (shown["ttl_ms"], shown["model_reason"]) == (60_000, "ready")
    assert entry(None, name="running").to_json()["waiting_for"] is None


def test_a_new_reason_is_news_and_a_new_estimate_is_none() -> None:
    waits = entry()
    assert waits.on_status(waiting(replace(MEMORY, estimated_start_at=9))) == []
    assert waits.to_json()["waiting_for"]["estimated_start_at"] == "1970-01-01T00:00:00.009Z"
    (frame,) = waits.on_status(waiting(WaitingFor(reason="class", position=3)))
    assert isinstance(frame, StatusFrame)
    assert frame.waiting_for["reason"] == "class"


@pytest.mark.parametrize("reason", [MEMORY, None])
def test_the_file_keeps_it(reason: WaitingFor | None) -> None:
    waits = entry(reason)
    assert restored(row_of(snapshot(waits))).status == waits.status


def test_without_a_worker_lists_and_first_frames_say_so(view_gateway: ViewGateway) -> None:
    gateway, follower = view_gateway, cast("Any", None)
    facts = Facts(gateway.view, follower, gateway.hub)
    parts = (gateway.view, follower, gateway.hub, TopicNames(), gateway.turns, facts.waits_unseen)
    waits = gateway.view.accepted(request())

    def shown() -> list[Any]:
        frame = Subscriptions(*parts).subscribe("default", "r").take_nowait()[0]
        return [facts.requests([waits])[0]["waiting_for"], frame.to_json()["waiting_for"]]

    assert shown() == [{**dict.fromkeys(PUBLIC), "reason": "no_worker"}] * 2
    gateway.view.fleet.workers["w"] = worker("w", ModelState(model="a", state="ready"), updated_at=now_ms())
    gateway.view.fleet.models["a", "w"] = model_info("a")
    assert shown() == [None, None]


# -- open transactions


TOPIC = "inference.request.medium"
HERE, BESIDE = (TOPIC, 0), (TOPIC, 1)
Looks = list[tuple[dict[TP, int], dict[TP, int], int]]


def of_looks(view: View, *looks: tuple[dict[TP, int], dict[TP, int], int]) -> OpenTransactions:
    made = OpenTransactions(KafkaSettings(bootstrap_servers="x"), view, Threads())
    for look in looks:
        made.note(*look)
    return made


@pytest.mark.parametrize(
    ("looks", "partitions"),
    [
        ([({HERE: 5, BESIDE: 9}, {HERE: 5, BESIDE: 9}, 0)], []),
        ([({HERE: 5}, {HERE: 8}, 0)], []),
        ([({HERE: 5}, {HERE: 8}, 0), ({HERE: 5}, {HERE: 9}, HELD_MS)], [0]),
        ([({HERE: 5}, {HERE: 8}, 0), ({HERE: 6}, {HERE: 9}, HELD_MS)], []),
        ([({HERE: 5}, {HERE: 8}, 0), ({HERE: 5}, {HERE: 5}, 1), ({HERE: 5}, {HERE: 8}, HELD_MS)], []),
        ([({HERE: 5, BESIDE: 1}, {HERE: 8, BESIDE: 4}, at) for at in (0, HELD_MS)], [0, 1]),
    ],
)
def test_a_partition_is_told_of_once_it_is_held_for_long(looks: Looks, partitions: list[int], view: View) -> None:
    problem = of_looks(view, *looks).result().problem
    assert [number for number in (0, 1) if problem and f"{TOPIC} partition {number}" in problem.text] == partitions


@pytest.mark.parametrize("raised", [BrokerUnavailable("no leader"), NotFound("gone"), None])
async def test_brokers_are_there_while_one_of_them_answers_anything(
    monkeypatch: pytest.MonkeyPatch, view: View, raised: PenstockError | None
) -> None:
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(open_transactions, "time", clock)
    ends, topics = Mock(return_value={}), Mock(return_value={})
    monkeypatch.setattr(open_transactions, "admin", Mock(partition_counts=topics, end_offsets=ends, log_ends=ends))
    made = of_looks(view)
    topics.side_effect, clock.now = BrokerUnavailable("away"), 107.0
    with pytest.raises(BrokerUnavailable):
        await made.look()
    assert (made.brokers().away, made.brokers().back_ms) == (True, None)
    topics.side_effect, ends.side_effect, clock.now = None, raised, 110.0
    with suppress(PenstockError):
        await made.look()
    clock.now = 111.0
    assert (made.brokers().away, made.brokers().silent_ms, made.brokers().back_ms) == (False, 1_000, 1_000)


def test_a_request_behind_one_says_so_and_no_other(view: View) -> None:
    ends, follower = ({HERE: 5}, {HERE: 8}), cast("Any", None)
    transactions = of_looks(view, (*ends, 0), (*ends, HELD_MS))
    facts = Facts(view, follower, Hub(), transactions=transactions)
    view.fleet.workers["w"] = worker("w", ModelState(model="a", state="ready"), updated_at=now_ms())
    view.fleet.models["a", "w"] = model_info("a")

    def reason(partition: int, offset: int) -> str | None:
        origin = Origin(topic=TOPIC, partition=partition, offset=offset, append_time_ms=1)
        shown = facts.waits_unseen(view.accepted(request(f"r-{partition}-{offset}"), origin))
        return (shown.get("waiting_for") or {}).get("reason")

    assert [reason(0, 4), reason(0, 5), reason(0, 7), reason(1, 7)] == [None, "transaction", "transaction", None]


@pytest.mark.parametrize(
    ("replicas", "device"),
    [
        ([model_state(device="gpu-1:0")], "gpu-1:0"),
        ([model_state(device="gpu-1:0"), model_state(device="gpu-1:1", replica=1)], None),
        ([model_state(device="gpu-1:0"), model_state(state="unloading", device="gpu-1:1", replica=1)], "gpu-1:0"),
        ([model_state("other", device="gpu-1:0")], None),
        ([model_state()], "gpu-1:9"),
    ],
)
def test_a_request_that_runs_has_its_device_and_the_time_of_its_first_token(
    view_gateway: ViewGateway, replicas: list[ModelState], device: str | None
) -> None:
    device_of_w = DeviceState(device="gpu-1:9", kind="gpu", total_bytes=9, reserved_bytes=0, used_bytes=0)
    view_gateway.view.accepted(request(stream=True))

    def shown() -> tuple[Any, Any]:
        view_gateway.view.fleet.workers["w"] = worker("w", *replicas, devices=[device_of_w])
        (found,) = facts_of(view_gateway.view).requests([view_gateway.entry()])
        return found["device"], found["first_token_at"]

    assert shown() == (None, None)
    view_gateway.read(STATUSES, status("running", model="m"))
    assert shown() == (device, None)
    view_gateway.read(RESULTS, chunk("a", 0), timestamp_ms=3_000)
    view_gateway.read(RESULTS, chunk("b", 1), timestamp_ms=4_000)
    view_gateway.reopen()
    assert shown() == (device, rfc3339(3_000))
    view_gateway.read(RESULTS, outcome(device="gpu-1:7"))
    assert shown() == ("gpu-1:7", None), "timings has it"


def test_gauges_follow_the_orders_that_pause(facts: Facts, view: View) -> None:
    assert not facts.gauges().paused
    view.fleet.follow([DesiredState(kind="class", name="low", action="pause", created_at=1, paused=True)])
    assert {(klass, pool) for klass, _, pool in facts.gauges().paused} == {("low", "")}
