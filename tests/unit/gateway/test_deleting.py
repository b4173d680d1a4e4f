"""Expiry of a conversation: a turn at the same time, two gateways, a kill at each step, and what is left over."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conversation_topics import (
    CODEC,
    NAMES,
    Cluster,
    SharedCluster,
    killed_at_each_step,
    message,
    run,
    said,
    say,
    together,
)
from kit.examples import examples
from penstock.common.forks import TopicForks
from penstock.gateway.conversations.shared import SharedTopic
from penstock.gateway.limits.retention import Retention
from penstock.gateway.service.deleting import Deleting
from penstock.gateway.service.forking import Forking
from penstock.schemas.records import ConversationFacts, ConversationMessage, conversation_message_key

KEPT_MS, NOW_MS = 3_600_000, 10_000_000
"""The records of `Cluster` are of the first seconds of 1970."""
TOPIC = NAMES.conversation("acme", "c")
LAYOUTS = pytest.mark.parametrize("new", [Cluster, SharedCluster])
ORDER = st.lists(st.booleans(), max_size=60)


@dataclass
class Kafka:
    """All that gateways share: topics, open requests, facts."""

    cluster: Cluster
    open_requests: set[str] = field(default_factory=set)
    facts: dict[str, int] = field(default_factory=dict)
    """By conversation: when its facts were changed."""
    commands: int = 0

    def gateway(self, now_ms: int = NOW_MS) -> Deleting:
        forking, pages = self.cluster.gateway()

        def told(tenant: str, conversation_id: str) -> None:
            return None

        unused: Any = SimpleNamespace(wake=told, tenants=SimpleNamespace(conversation_gone=told))
        threads: Any = SimpleNamespace(conversations=self.cluster)
        mine = cast(Any, self)
        return Deleting(
            mine, mine, forking, pages, unused, unused, threads, Retention(all_s=KEPT_MS / 1000), lambda: now_ms
        )

    # -- as control and facts

    async def has_turns(self, tenant: str, conversation_id: str) -> bool:
        await self.cluster.step()
        return bool(self.open_requests)

    async def end_turns(self, tenant: str, conversation_id: str) -> None:
        self.commands += 1

    async def of_some(self, tenant: str, conversation_ids: Sequence[str]) -> dict[str, ConversationFacts]:
        await self.cluster.step()
        found = {one: self.facts[one] for one in conversation_ids if one in self.facts}
        return {one: ConversationFacts(tenant=tenant, conversation_id=one, updated_at=at) for one, at in found.items()}

    async def take_away(self, tenant: str, conversation_id: str) -> None:
        await self.cluster.step()
        self.facts.pop(conversation_id, None)

    # -- as a worker that has a turn

    async def turn(self, request_id: str) -> str:
        """Accept a request and run it; how it ended. As `Turns` does: one identity from the input to the answer."""
        self.open_requests.add(request_id)
        await self.cluster.step()
        while True:
            seen = self._identity()
            await self.cluster.step()
            self.cluster.create(TOPIC)
            if seen is not None and self._identity() != seen:
                continue  # it is read and prepared again
            begun = self._identity()
            made = self._write(message("c", request_id, "in"))
            await self.cluster.step()
            if self._identity() == begun:
                break
            if self.cluster.exists(TOPIC):
                self.cluster.put(TOPIC, made, None)
        await self.cluster.step()
        ended = "completed" if self._identity() == begun else "cancelled"
        if ended == "completed":
            self._write(message("c", request_id, "out"))
        elif self.cluster.exists(TOPIC):
            self.cluster.put(TOPIC, made, None)
        self.open_requests.discard(request_id)
        return ended

    def _identity(self) -> tuple[str, list[int]] | None:
        if not self.cluster.exists(TOPIC):
            return None
        topic_id, found = self.cluster.read_topic(TOPIC)
        forks = TopicForks(found.head)
        for one in found.records:
            forks.apply(one.offset, one.key, one.message)
        return topic_id, forks.deletions

    def _write(self, made: ConversationMessage) -> bytes:
        key = conversation_message_key(made).encode()
        self.cluster.put(TOPIC, key, CODEC.encode(made), NOW_MS)
        return key


def old_conversation(new: type[Cluster]) -> Kafka:
    kafka = Kafka(new())
    say(kafka.cluster, "c", "r1")
    kafka.facts["c"] = 1_000
    return kafka


def is_gone(kafka: Kafka) -> bool:
    return not kafka.cluster.exists(TOPIC) and "c" not in kafka.facts


@LAYOUTS
def test_it_goes_with_its_facts_and_ends_no_turn_by_command(new: type[Cluster]) -> None:
    kafka = old_conversation(new)
    say(kafka.cluster, "d", "r1")  # in a shared topic the last record is another conversation's
    records = kafka.cluster.read_topic(TOPIC)
    for name in ("none", "c"):
        run(kafka.gateway().finish("acme", name))
    assert (kafka.cluster.read_topic(TOPIC), "c" in kafka.facts) == (records, True), "only what is deleted is finished"
    assert run(kafka.gateway().expire("acme", "c"))
    assert is_gone(kafka)
    assert (kafka.cluster.released, kafka.commands) == (["c"], 0)
    assert not run(kafka.gateway().expire("acme", "c")), "another gateway finds that it is gone"


@LAYOUTS
@pytest.mark.parametrize("kept_by", ["its newest record", "an open request", "its facts"])
def test_it_stays_whole_where_the_last_look_says_so(new: type[Cluster], kept_by: str) -> None:
    kafka, now_ms = old_conversation(new), NOW_MS
    if kept_by == "its newest record":
        now_ms = 1_000 + new.first + 1 + KEPT_MS - 1
    elif kept_by == "an open request":
        kafka.open_requests.add("r2")
    else:
        kafka.facts["c"] = NOW_MS - KEPT_MS + 1
    records = kafka.cluster.read_topic(TOPIC)
    assert not run(kafka.gateway(now_ms).expire("acme", "c"))
    assert (kafka.cluster.read_topic(TOPIC), "c" in kafka.facts) == (records, True)
    if kept_by == "its newest record":
        assert run(kafka.gateway(now_ms + 1).expire("acme", "c"))


@LAYOUTS
@settings(max_examples=examples(500))
@given(ORDER)
def test_a_turn_at_the_same_moment_is_not_lost(new: type[Cluster], order: list[bool]) -> None:
    kafka = old_conversation(new)
    expired, ended = together(kafka.gateway().expire("acme", "c"), kafka.turn("r2"), order)
    pages = kafka.cluster.gateway()[1]
    there = said(pages, "c") if kafka.cluster.exists(TOPIC) and not pages.deleted("acme", ["c"]) else []
    assert (ended, there) == ("completed", [*([] if expired else ["r1 in", "r1 out"]), "r2 in", "r2 out"])


@LAYOUTS
def test_a_turn_that_was_accepted_before_the_last_look_is_never_lost(new: type[Cluster]) -> None:
    for steps in itertools.count():
        kafka = old_conversation(new)
        turn = kafka.turn("r2")
        turn.send(None)  # accepted
        try:
            for _ in range(steps):
                turn.send(None)
        except StopIteration:
            assert steps > 2
            return
        assert not run(kafka.gateway().expire("acme", "c"))
        assert run(turn) == "completed"
        assert said(kafka.cluster.gateway()[1], "c") == ["r1 in", "r1 out", "r2 in", "r2 out"]


@LAYOUTS
def test_the_topic_stays_while_a_turn_may_begin_it_anew(new: type[Cluster], monkeypatch: pytest.MonkeyPatch) -> None:
    kafka = old_conversation(new)
    end, remove, turns = Forking.end, kafka.cluster.remove, list[Any]()

    async def end_and_accept(forking: Forking, *args: Any) -> bool:
        ended = await end(forking, *args)
        turns.append(kafka.turn("r2"))
        turns[0].send(None)
        return ended

    def remove_late(topic: str, place: Any = None) -> bool:
        if not (gone := kafka.cluster.exists(topic) and kafka.cluster.log.end(topic) != place.end):
            outcomes.append(run(turns[0]))
            return remove(topic)
        return not gone

    outcomes: list[str] = []
    monkeypatch.setattr(Forking, "end", end_and_accept)
    monkeypatch.setattr(SharedTopic, "remove", lambda _, topic, place=None: remove_late(topic, place))
    monkeypatch.setattr(kafka.cluster, "remove", remove_late)
    assert run(kafka.gateway().expire("acme", "c"))
    monkeypatch.undo()
    outcomes = outcomes or [run(turns[0])]
    assert (outcomes, said(kafka.cluster.gateway()[1], "c")) == (["completed"], ["r2 in", "r2 out"])
    assert not [key for key in kafka.cluster.live_keys(TOPIC) if key.startswith(b"r1")], "what expired is erased"


@LAYOUTS
@settings(max_examples=examples(300))
@given(ORDER)
def test_two_gateways_delete_it_once_and_leave_what_is_begun_anew(new: type[Cluster], order: list[bool]) -> None:
    kafka = old_conversation(new)
    together(kafka.gateway().expire("acme", "c"), kafka.gateway().expire("acme", "c"), order)
    run(kafka.gateway().finish("acme", "c"))
    assert is_gone(kafka)
    say(kafka.cluster, "c", "r2")
    run(kafka.gateway().finish("acme", "c"))
    assert said(kafka.cluster.gateway()[1], "c") == ["r2 in", "r2 out"]


@LAYOUTS
def test_a_gateway_that_is_killed_leaves_it_whole_or_another_one_finishes(new: type[Cluster]) -> None:
    worlds: dict[Cluster, Kafka] = {}

    def started() -> Cluster:
        kafka = old_conversation(new)
        worlds[kafka.cluster] = kafka
        return kafka.cluster

    for cluster in killed_at_each_step(started, lambda one: worlds[one].gateway().expire("acme", "c"), least=8):
        kafka, pages = worlds[cluster], cluster.gateway()[1]
        if cluster.exists(TOPIC) and "c" not in pages.deleted("acme", ["c"]):
            assert said(pages, "c") == ["r1 in", "r1 out"]
            assert "c" in kafka.facts
            assert run(kafka.gateway().expire("acme", "c"))
        run(kafka.gateway().finish("acme", "c"))
        assert is_gone(kafka)
