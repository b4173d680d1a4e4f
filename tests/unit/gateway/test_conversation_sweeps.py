"""Sweeps of conversations: which expire, the pace, a broker that is away, gateways that share the work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.gateway.limits.retention import Key, Retention
from penstock.gateway.service import conversation_sweeps
from penstock.gateway.service.conversation_sweeps import STRAY_MS, ConversationSweeps
from penstock.gateway.threads import Threads
from penstock.schemas.errors import BrokerUnavailable
from penstock.schemas.records import ConversationFacts
from penstock.schemas.topics import TopicNames
from support import wait_until_async

HOUR_MS = 3_600_000
NOW_MS = 100 * HOUR_MS
OLD_MS, NEW_MS = NOW_MS - 2 * HOUR_MS, NOW_MS - HOUR_MS // 2
RETENTION = Retention(all_s=3_600, tenants_s={"ever": 0})


@dataclass
class Shared:
    """What gateways share: conversations by key with the time of their newest record; facts; open requests."""

    records: dict[Key, int | None] = field(default_factory=dict)
    facts: dict[Key, int] = field(default_factory=dict)
    open_requests: set[Key] = field(default_factory=set)
    deleted_ones: set[Key] = field(default_factory=set)
    finished: list[Key] = field(default_factory=list)
    expired: list[Key] = field(default_factory=list)
    fails: Callable[[Key], bool] = field(default=lambda _: False)
    away: bool = False
    ready: bool = True
    is_shared: bool = False
    strays: list[int] = field(default_factory=list[int])
    """When each was written, in ms since the epoch."""

    def sweeps(self, *, per_minute: int = 60_000, every_s: float = 0.0, retention: Retention = RETENTION) -> Any:
        mine = cast(Any, self)
        follower: Any = SimpleNamespace(
            readiness=lambda: SimpleNamespace(reason=None if self.ready else "catching up", lacks=None)
        )
        parts = (mine, mine, mine, mine, follower, mine, TopicNames(), Threads(), retention)
        return ConversationSweeps(*parts, every_s=every_s, per_minute=per_minute, clock=lambda: NOW_MS)

    async def any_lives(self, tenant: str, conversation_id: str) -> bool:
        return (tenant, conversation_id) in self.open_requests

    # -- as topics and conversations

    def times_of(self, wants: Callable[[str], bool]) -> dict[Key, int | None]:
        if self.away:
            raise BrokerUnavailable("away")
        return {key: at for key, at in self.records.items() if wants(key[0])}

    def topic_ids(self, topics: Sequence[str]) -> dict[str, str]:
        return {topic: f"id-{topic.rpartition('.')[2]}" for topic in topics}

    def take_back(self, before_ms: int) -> int:
        taken = [one for one in self.strays if one < before_ms]
        self.strays = [one for one in self.strays if one >= before_ms]
        return len(taken)

    def deleted(self, tenant: str, conversation_ids: Sequence[str]) -> set[str]:
        return {one for one in conversation_ids if (tenant, one) in self.deleted_ones}

    # -- as facts

    async def of_some(self, tenant: str, conversation_ids: Sequence[str]) -> dict[str, ConversationFacts]:
        found = {one: self.facts[tenant, one] for one in conversation_ids if (tenant, one) in self.facts}
        return {one: ConversationFacts(tenant=tenant, conversation_id=one, updated_at=at) for one, at in found.items()}

    async def begin_clock(self, tenant: str, conversation_id: str, topic_id: str) -> None:
        assert topic_id == f"id-{conversation_id}"
        self.facts[tenant, conversation_id] = NOW_MS

    # -- as what deletes

    async def expire(self, tenant: str, conversation_id: str) -> bool:
        key = (tenant, conversation_id)
        await asyncio.sleep(0)
        if self.fails(key):
            raise BrokerUnavailable("away")
        if key in self.open_requests or self.records.pop(key, None) is None:
            return False
        self.expired.append(key)
        return True

    async def finish(self, tenant: str, conversation_id: str) -> None:
        self.finished.append((tenant, conversation_id))


def old(*names: str) -> dict[Key, int | None]:
    return dict.fromkeys([("a", name) for name in names], OLD_MS)


def numbered(count: int) -> dict[Key, int | None]:
    return old(*(f"c{number}" for number in range(count)))


async def test_old_conversations_expire_but_those_with_open_requests_and_a_look_reports_them_before() -> None:
    records = {**old("old", "named", "busy"), ("a", "new"): NEW_MS, ("ever", "old"): OLD_MS}
    shared = Shared(records=records, facts={("a", "named"): NEW_MS}, open_requests={("a", "busy")})
    sweeps = shared.sweeps()
    report = (await sweeps.look()).to_json(dry_run=True, retention=RETENTION)
    assert (report["conversations"], report["dry_run"]) == (2, True)
    shown = {"tenant": "a", "retention_s": 3_600}
    shown |= {"last_active_at": "1970-01-05T02:00:00.000Z", "expires_at": "1970-01-05T03:00:00.000Z"}
    for one, name in zip(sorted(report["data"], key=lambda one: one["open_request"]), ("old", "busy"), strict=True):
        assert {**shown, "conversation_id": name, "open_request": name == "busy"}.items() <= one.items()
    assert shared.expired == []
    await sweeps.sweep()
    assert shared.expired == [("a", "old")]
    assert (sweeps.counts["expired"], sweeps.counts["stayed"], sweeps.due) == (1, 1, 0)


async def test_a_look_ahead_reports_what_will_be_due_in_order() -> None:
    shared = Shared(records={("a", "later"): NEW_MS, **old("old", "named")}, facts={("a", "named"): NEW_MS + 1})
    look = await shared.sweeps().look(within_ms=HOUR_MS)
    expected = [("old", -HOUR_MS), ("later", HOUR_MS // 2), ("named", HOUR_MS // 2 + 1)]
    assert [(one.conversation_id, one.expires_ms - NOW_MS) for one in look.expiring] == expected


async def test_the_clock_of_an_empty_conversation_begins_with_the_first_sweep() -> None:
    shared = Shared(records={("a", "empty"): None, ("a", "titled"): None}, facts={("a", "titled"): OLD_MS})
    sweeps = shared.sweeps()
    assert [one.conversation_id for one in (await sweeps.look()).expiring] == ["titled"]
    await sweeps.sweep()
    assert shared.facts["a", "empty"] == NOW_MS
    assert not (await sweeps.look()).ageless


async def test_an_interrupted_deletion_is_finished_once() -> None:
    shared = Shared(records={("a", "cut"): NEW_MS, **old("old")}, deleted_ones={("a", "cut"), ("a", "old")})
    sweeps = shared.sweeps()
    for _ in range(3):
        await sweeps.sweep()
    assert (shared.finished, shared.expired) == ([("a", "cut"), ("a", "old")], [])
    del shared.records["a", "cut"]
    await sweeps.sweep()
    shared.records["a", "cut"] = NEW_MS  # it was made again since, and deleted again
    await sweeps.sweep()
    assert shared.finished[2:] == [("a", "cut")]


async def test_a_sweep_keeps_its_pace() -> None:
    shared = Shared(records=numbered(6))
    sweeps, began = shared.sweeps(per_minute=1_200), time.monotonic()
    await sweeps.sweep()
    assert len(shared.expired) == 6
    assert time.monotonic() - began >= 6 * 0.05


async def test_two_gateways_share_the_work_and_delete_each_once() -> None:
    shared = Shared(records=numbered(40))
    first, second = shared.sweeps(), shared.sweeps()
    await asyncio.gather(first.sweep(), second.sweep())
    assert len(shared.expired) == len(set(shared.expired)) == 40
    assert first.counts["expired"] + second.counts["expired"] == 40
    assert first.counts["expired"] > 5 < second.counts["expired"]


async def test_failures_hold_up_their_conversation_or_end_the_sweep_and_the_next_sweep_continues() -> None:
    shared = Shared(records=numbered(9), ready=False)
    sweeps = shared.sweeps()
    with pytest.raises(BrokerUnavailable, match="catching up"):
        await sweeps.sweep()
    assert shared.expired == []
    shared.ready, shared.fails = True, lambda _: len(shared.expired) >= 4
    with pytest.raises(BrokerUnavailable):
        await sweeps.sweep()
    assert len(shared.expired) == 4
    sweeps = shared.sweeps()
    left = next(iter(shared.records))
    shared.fails = lambda key: key == left
    await sweeps.sweep()
    assert (len(shared.expired), sweeps.counts["failed"], sweeps.due) == (8, 1, 0)


@pytest.mark.parametrize("every_s", [0.02, 0])
async def test_sweeps_run_by_themselves_or_when_asked_and_again_after_a_failure(
    monkeypatch: pytest.MonkeyPatch, every_s: float
) -> None:
    monkeypatch.setattr(conversation_sweeps, "AGAIN_S", 0.01)
    shared = Shared(records=old("old"), away=True)
    sweeps = shared.sweeps(every_s=every_s)
    running = asyncio.create_task(sweeps.run())
    if not every_s:
        await asyncio.sleep(0.05)
        assert sweeps.counts["failed"] == 0, "nobody has asked"
        sweeps.ask()
    await wait_until_async(lambda: sweeps.counts["failed"] > (1 if every_s else 0), 10, "it fails")
    shared.away = False
    if not every_s:
        sweeps.ask()
    await wait_until_async(lambda: shared.expired, 10, "it expires")
    running.cancel()


async def test_a_shared_topic_is_cleaned_once_no_gateway_writes_a_stray_record_again() -> None:
    young = NOW_MS - STRAY_MS
    shared = Shared(records=old("old"), strays=[young - 1, young], is_shared=True)
    await shared.sweeps(retention=Retention()).sweep()
    assert (shared.strays, shared.expired) == ([young], [])
    await shared.sweeps().sweep()
    assert shared.expired == [("a", "old")]


@pytest.mark.parametrize(
    ("is_shared", "retention", "runs"),
    [(False, Retention(), False), (False, Retention(tenants_s={"a": 0}), False), (True, Retention(), True)],
)
async def test_sweeps_run_where_there_is_something_to_sweep(is_shared: bool, retention: Retention, runs: bool) -> None:
    running = asyncio.create_task(Shared(is_shared=is_shared).sweeps(retention=retention).run())
    await asyncio.wait([running], timeout=0.1 if runs else 5)
    assert running.done() is not runs
    running.cancel()
