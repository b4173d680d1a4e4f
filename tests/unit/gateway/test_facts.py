"""Facts of a gateway: of live workers, of conversations, and the artifacts of outcomes."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from kit.gateway_records import CODEC, ORIGIN, model_info, model_state, outcome, request, worker
from penstock.common.clock import now_ms
from penstock.common.settings import KafkaSettings
from penstock.gateway.metrics import GatewayMetrics
from penstock.gateway.service.conversation_facts import FactsOfConversations
from penstock.gateway.service.facts import Facts
from penstock.gateway.service.turns import Turns
from penstock.gateway.threads import Threads
from penstock.gateway.view.hub import Hub
from penstock.gateway.view.outputs import artifact_ids_of
from penstock.gateway.view.view import View
from penstock.schemas.records import ArtifactRef, ConversationFacts, DeviceState, InferenceRequest


def facts_of(view: View) -> Facts:
    follower: Any = None
    return Facts(view, follower, Hub())


def test_the_memory_of_workers_that_stopped_is_not_counted(view: View) -> None:
    """Their last word stands on the topic for a day; the device is the next worker's."""
    device = DeviceState(device="cuda:0", kind="gpu", total_bytes=100, reserved_bytes=20, used_bytes=10)
    states = {"a": "running", "b": "stopped", "c": "stopping"}
    view.fleet.workers = {name: worker(name, state=state, devices=[device]) for name, state in states.items()}
    assert facts_of(view).gauges().device_memory[("cuda:0", "limit")] == 200


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


async def test_the_loop_looks_first_and_what_it_has_goes_before_the_file() -> None:
    unwritten = {"t.changed": record("changed", "new"), "t.gone": None, "t.broken": b"\0nothing"}
    written = {f"t.{name}": record(name, "old") for name in ("changed", "gone", "same", "former")}
    view, threads = FactsView(unwritten, written), Threads()
    names = ["changed", "gone", "same", "former", "broken", "none"]
    topic_ids = {name: "another" if name == "former" else "id" for name in names}
    try:
        found = await conversation_facts(view, threads).of_many("t", topic_ids)
    finally:
        threads.close()
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
