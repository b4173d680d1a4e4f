"""Sweeps of conversations: who is looked at, the pace, a broker that is away, gateways that share the work."""

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
        view: Any = SimpleNamespace(known=SimpleNamespace(turns=self._turns))
        follower: Any = SimpleNamespace(readiness=lambda: SimpleNamespace(ready=self.ready, reason="catching up"))
        return ConversationSweeps(
            mine,
            mine,
            mine,
            view,
            follower,
            mine,
            TopicNames(),
            Threads(),
            retention,
            every_s=every_s,
            per_minute=per_minute,
            clock=lambda: NOW_MS,
        )

    def _turns(self, tenant: str, conversation_id: str) -> list[str]:
        return ["r"] if (tenant, conversation_id) in self.open_requests else []

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


async def test_what_is_old_goes_and_the_look_says_so_before() -> None:
    shared = Shared(
        records={("a", "old"): OLD_MS, ("a", "new"): NEW_MS, ("ever", "old"): OLD_MS, ("a", "named"): OLD_MS},
        facts={("a", "named"): NEW_MS},
    )
    sweeps = shared.sweeps()
    look = await sweeps.look()
    told = look.to_json(dry_run=True, retention=RETENTION)
    assert (told["conversations"], told["dry_run"]) == (1, True)
    (one,) = told["data"]
    assert (one["tenant"], one["conversation_id"], one["retention_s"]) == ("a", "old", 3_600)
    assert (one["last_active_at"], one["expires_at"]) == ("1970-01-05T02:00:00.000Z", "1970-01-05T03:00:00.000Z")
    assert shared.expired == []
    await sweeps.sweep()
    assert shared.expired == [("a", "old")]
    assert (sweeps.counts["expired"], sweeps.counts["stayed"], sweeps.due) == (1, 0, 0)


async def test_a_look_ahead_tells_what_will_be_due_the_first_first() -> None:
    shared = Shared(records={("a", "later"): NEW_MS, ("a", "old"): OLD_MS, ("a", "named"): OLD_MS})
    shared.facts["a", "named"] = NEW_MS + 1
    look = await shared.sweeps().look(within_ms=HOUR_MS)
    assert [(one.conversation_id, one.expires_ms - NOW_MS) for one in look.expiring] == [
        ("old", -HOUR_MS),
        ("later", HOUR_MS // 2),
        ("named", HOUR_MS // 2 + 1),
    ]


async def test_an_open_request_is_told_and_keeps_it() -> None:
    shared = Shared(records={("a", "busy"): OLD_MS, ("a", "old"): OLD_MS}, open_requests={("a", "busy")})
    sweeps = shared.sweeps()
    told = (await sweeps.look()).to_json(dry_run=True, retention=RETENTION)
    assert {one["conversation_id"]: one["open_request"] for one in told["data"]} == {"busy": True, "old": False}
    await sweeps.sweep()
    assert (shared.expired, sweeps.counts["stayed"]) == ([("a", "old")], 1)


async def test_the_clock_of_an_empty_one_begins_with_the_first_look() -> None:
    shared = Shared(records={("a", "empty"): None, ("a", "titled"): None}, facts={("a", "titled"): OLD_MS})
    sweeps = shared.sweeps()
    assert [one.conversation_id for one in (await sweeps.look()).expiring] == ["titled"]
    await sweeps.sweep()
    assert shared.facts["a", "empty"] == NOW_MS
    assert not (await sweeps.look()).ageless


async def test_what_was_cut_off_is_finished_once_and_what_forks_need_is_not_asked_for_again() -> None:
    shared = Shared(records={("a", "cut"): NEW_MS, ("a", "old"): OLD_MS}, deleted_ones={("a", "cut"), ("a", "old")})
    sweeps = shared.sweeps()
    for _ in range(3):
        await sweeps.sweep()
    assert (shared.finished, shared.expired) == ([("a", "cut"), ("a", "old")], [])
    del shared.records["a", "cut"]
    await sweeps.sweep()
    shared.records["a", "cut"] = NEW_MS  # it was made anew since, and deleted again
    await sweeps.sweep()
    assert shared.finished[2:] == [("a", "cut")]


async def test_it_keeps_the_pace() -> None:
    shared = Shared(records={("a", f"c{number}"): OLD_MS for number in range(6)})
    sweeps, began = shared.sweeps(per_minute=1_200), time.monotonic()
    await sweeps.sweep()
    assert len(shared.expired) == 6
    assert time.monotonic() - began >= 6 * 0.05


async def test_two_gateways_share_the_work_and_delete_each_once() -> None:
    shared = Shared(records={("a", f"c{number}"): OLD_MS for number in range(40)})
    first, second = shared.sweeps(), shared.sweeps()
    await asyncio.gather(first.sweep(), second.sweep())
    assert len(shared.expired) == len(set(shared.expired)) == 40
    assert first.counts["expired"] + second.counts["expired"] == 40
    assert first.counts["expired"] > 5 < second.counts["expired"]


async def test_one_that_fails_holds_up_no_other() -> None:
    shared = Shared(records={("a", f"c{number}"): OLD_MS for number in range(9)}, fails=lambda key: key[1] == "c4")
    sweeps = shared.sweeps()
    await sweeps.sweep()
    assert (len(shared.expired), sweeps.counts["failed"], sweeps.due) == (8, 1, 0)


async def test_a_broker_that_goes_away_ends_the_sweep_and_the_next_goes_on() -> None:
    shared = Shared(records={("a", f"c{number}"): OLD_MS for number in range(9)})
    sweeps = shared.sweeps()
    shared.fails = lambda _: len(shared.expired) >= 4
    with pytest.raises(BrokerUnavailable):
        await sweeps.sweep()
    assert len(shared.expired) == 4
    shared.fails = lambda _: False
    await sweeps.sweep()
    assert len(shared.expired) == 9


async def test_a_view_that_does_not_know_all_requests_decides_nothing() -> None:
    shared = Shared(records={("a", "old"): OLD_MS}, ready=False)
    with pytest.raises(BrokerUnavailable, match="catching up"):
        await shared.sweeps().sweep()
    assert shared.expired == []


async def test_it_runs_by_itself_and_tries_again_after_the_broker_was_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation_sweeps, "AGAIN_S", 0.01)
    shared = Shared(records={("a", "old"): OLD_MS}, away=True)
    sweeps = shared.sweeps(every_s=0.02)
    running = asyncio.create_task(sweeps.run())
    await wait_until_async(lambda: sweeps.counts["failed"] > 1, 10, "it fails and goes on")
    shared.away = False
    await wait_until_async(lambda: shared.expired, 10, "it expires")
    running.cancel()


async def test_without_a_time_it_runs_when_it_is_asked() -> None:
    shared = Shared(records={("a", "old"): OLD_MS})
    sweeps = shared.sweeps(every_s=0)
    running = asyncio.create_task(sweeps.run())
    await asyncio.sleep(0.05)
    assert shared.expired == []
    sweeps.ask()
    await wait_until_async(lambda: shared.expired, 10, "it expires")
    running.cancel()


async def test_without_a_retention_nothing_runs() -> None:
    await asyncio.wait_for(Shared().sweeps(retention=Retention(tenants_s={"a": 0})).run(), 5)


async def test_what_no_conversation_holds_is_taken_back_once_nobody_writes_it_anew() -> None:
    young = NOW_MS - STRAY_MS
    shared = Shared(records={("a", "old"): OLD_MS}, strays=[young - 1, young], is_shared=True)
    await shared.sweeps(retention=Retention()).sweep()
    assert (shared.strays, shared.expired) == ([young], [])
    await shared.sweeps().sweep()
    assert shared.expired == [("a", "old")]


async def test_a_gateway_sweeps_where_there_is_something_to_sweep() -> None:
    await shared_run(Shared())
    with pytest.raises(TimeoutError):
        await shared_run(Shared(is_shared=True))


async def shared_run(shared: Shared) -> None:
    async with asyncio.timeout(0.1):
        await shared.sweeps(retention=Retention()).run()
