"""Dead letters: their index by the order of the log, the follower of their topic, and purging."""

from __future__ import annotations

import itertools
import sqlite3
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.gateway_readers import fake_readers
from penstock.common import admin
from penstock.common.settings import KafkaSettings
from penstock.gateway.dead_letters import follower
from penstock.gateway.dead_letters.follower import LetterFollower
from penstock.gateway.dead_letters.index import LetterFilter, LetterIndex
from penstock.gateway.dead_letters.letters import LetterAction, LetterFacts
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.limits.callers import Caller
from penstock.gateway.metrics import GatewayMetrics
from penstock.gateway.service import redriving
from penstock.gateway.service.redriving import Chosen, Redriving
from penstock.gateway.threads import Threads
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import RegistryUnavailable, Unauthenticated
from penstock.schemas.records import DeadLetterAction, InferenceRequest
from simulation.redrives.world import Gateway, Topics, new_index

ANY = LetterFilter()


def letter(offset: int, reason: str = "engine_failed", *, partition: int = 0, **fields: object) -> LetterFacts:
    facts: Any = {"request_id": f"r{offset}", "tenant": "t", "origin": f"topic 0 {offset}", "redrivable": True} | fields
    facts.setdefault("error", f"error {offset}")
    return LetterFacts(partition=partition, offset=offset, created_ms=1_000 + offset, reason=reason, **facts)


def action(at: int, of: int, kind: str, new_id: str | None = None, *, request_id: str | None = None) -> LetterAction:
    made = DeadLetterAction(kind=kind, offset=of, request_id=new_id, created_at=1)
    return LetterAction(0, at, request_id or f"r{of}", made)


@pytest.fixture
def index(tmp_path: Path) -> LetterIndex:
    return LetterIndex(tmp_path / "letters", "topic")


def offsets(index: LetterIndex, chosen: LetterFilter = ANY) -> list[int]:
    return [one.offset for one in index.page(chosen, limit=100)]


def test_filters_and_pages_follow_the_time(index: LetterIndex) -> None:
    index.take([letter(n, "a" if n % 2 else "b", model="m" if n < 3 else None) for n in range(6)])
    assert offsets(index, LetterFilter(reason="a")) == [1, 3, 5]
    assert offsets(index, LetterFilter(model="m", since_ms=1_001)) == [1, 2]
    assert offsets(index, LetterFilter(until_ms=1_002)) == [0, 1]
    assert offsets(index, LetterFilter(tenant="another")) == []
    first = index.page(ANY, limit=2, newest_first=True)
    assert [one.offset for one in first] == [5, 4]
    assert [one.offset for one in index.page(ANY, limit=2, newest_first=True, after=first[-1].place)] == [3, 2]
    with pytest.raises(KeyError):
        index.page(ANY, limit=1, after=(0, 99))


def test_a_redrive_is_of_all_letters_of_its_request_and_is_counted_no_more(index: LetterIndex) -> None:
    same = {"request_id": "r", "origin": "topic 0 7"}
    other = letter(2, request_id="r", origin="topic 0 8")
    index.take([letter(0, **same), letter(1, **same), other, action(3, 0, "redriven", "new", request_id="r")])
    assert [one.redriven_as for one in index.page(ANY, limit=9)] == ["new", "new", None]
    assert index.counts() == {"engine_failed": 1}
    assert offsets(index, LetterFilter(redriven=False)) == [2]


def test_groups_have_what_was_not_run_again_the_newest_first_and_are_counted_once_for_all_who_ask(
    index: LetterIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    letters = [letter(0, model="m"), letter(1, "bad_json", redrivable=False), letter(2, model="n"), letter(3)]
    index.take([*letters, letter(4, model="m"), action(5, 3, "redriven", "new")])
    facts = [(one.reason, one.model, one.letters, one.redrivable, one.newest_ms) for one in index.groups(9)]
    failed = "engine_failed"
    assert facts == [(failed, "m", 2, 2, 1_004), (failed, "n", 1, 1, 1_002), ("bad_json", None, 1, 0, 1_001)]
    assert len(index.groups(2)) == 2
    recent = [(one.reason, one.letters, one.since_ms, one.redrivable, one.newest) for one in index.recent(1_001)]
    assert recent == [("bad_json", 1, 1_001, False, "error 1"), (failed, 2, 1_002, True, "error 4")]
    follows = LetterFollower(KafkaSettings(), default_codec(), index)
    monkeypatch.setattr(index, "groups", Mock(wraps=index.groups))
    assert [follows.groups() for _ in range(9)] == [index.groups(200)] * 9
    assert cast(Mock, index.groups).call_count == 2


def test_a_purged_letter_is_gone_and_the_records_before_the_first_one_left_may_be_deleted(index: LetterIndex) -> None:
    index.take([letter(0), letter(1), action(2, 0, "purged")])
    assert index.get((0, 0)) is None
    assert index.first_offsets() == {0: 1}
    index.take([action(3, 1, "purged")])
    assert index.first_offsets() == {0: 4}


@pytest.mark.parametrize("kind", ["purged", "redriven"])
def test_an_action_says_nothing_of_a_letter_of_another_request(index: LetterIndex, kind: str) -> None:
    """In a mirrored topic the offset that it names can be that of another letter."""
    index.take([letter(0), action(1, 0, kind, "new", request_id="other")])
    assert [(one.offset, one.redriven_as) for one in index.page(ANY, limit=9)] == [(0, None)]


def test_an_index_survives_a_restart_and_is_made_again_for_another_topic_or_a_broken_file(tmp_path: Path) -> None:
    path = tmp_path / "letters"
    index = LetterIndex(path, "topic")
    index.take([letter(0)])
    index.close()
    again = LetterIndex(path, "topic")
    assert (again.positions(), offsets(again)) == ({0: 1}, [0])
    again.close()
    other = LetterIndex(path, "another")
    assert (other.positions(), offsets(other)) == ({}, [])
    other.close()
    path.write_bytes(b"no database" * 1_000)
    assert offsets(LetterIndex(path, "another")) == []


@given(
    st.lists(st.one_of(st.tuples(st.just("add"), st.integers(0, 12)), st.tuples(st.just("expire"), st.integers(0, 12))))
)
def test_counts_are_those_of_a_log(tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]) -> None:
    index, log = LetterIndex(tmp_path_factory.mktemp("index") / "letters", "topic"), dict[int, str]()
    for what, offset in steps:
        if what == "add":
            index.take([letter(offset, f"r{offset % 3}")])
            log = {at: reason for at, reason in log.items() if at < offset} | {offset: f"r{offset % 3}"}
        else:
            index.expired({0: offset})
            log = {at: reason for at, reason in log.items() if at >= offset}
    assert Counter(index.counts()) == Counter(log.values())
    index.close()


def test_the_gauge_counts_letters_by_reason() -> None:
    metrics = GatewayMetrics()
    assert "penstock_dlq_letters{" not in metrics.render().decode()
    metrics.read_letters = lambda: {"bad_avro": 3, "engine_failed": 0}
    lines = metrics.render().decode().splitlines()
    assert 'penstock_dlq_letters{reason="bad_avro"} 3.0' in lines
    assert 'penstock_dlq_letters{reason="engine_failed"} 0.0' in lines


# -- the follower of their topic


def test_a_full_disk_does_not_end_the_reading_of_dead_letters(
    index: LetterIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.take([letter(0), letter(1)])
    dlq, topics = KafkaSettings().names.dlq, {KafkaSettings().names.dlq: 1}
    readers = fake_readers(monkeypatch, follower, topics)
    monkeypatch.setattr(admin, "end_offsets", lambda _, tps, *__: dict.fromkeys(tps, 2))
    monkeypatch.setattr(follower, "LOOK_S", -1.0)
    LetterFollower(KafkaSettings(), default_codec(), index).start()
    (reader,) = readers
    assert reader.partitions == {(dlq, 0): 2}
    topics[dlq] = 2
    monkeypatch.setattr(admin, "begin_offsets", lambda _, tps, *__: dict.fromkeys(tps, 1))
    with monkeypatch.context() as full:
        full.setattr(index, "expired", Mock(side_effect=sqlite3.OperationalError("database or disk is full")))
        reader.options["on_idle"]()
    assert offsets(index) == [0, 1]
    reader.options["on_idle"]()
    assert offsets(index) == [1]
    assert reader.partitions == {(dlq, 0): 2, (dlq, 1): 1}


# -- lists


async def test_a_list_of_letters_read_oldest_first_ends_while_others_are_written(index: LetterIndex) -> None:
    unused, written, seen = cast(Any, None), itertools.count(), list[list[int]]()
    letters: Any = SimpleNamespace(index=index, catch_up=lambda _: index.take([letter(next(written)) for _ in "ab"]))
    parts = Redriving(letters, unused, unused, unused, default_codec(), KafkaSettings(), Threads())
    after = None
    while not seen or seen[-1]:
        found, cursor = await parts.page(LetterFilter(), after=after, limit=1, newest_first=False)
        seen.append([one.offset for one in found])
        after = str(replace(cursor, place=found[-1].place)) if found else after
    assert seen == [[0], [1], []]


# -- a letter that is shown


@pytest.mark.parametrize("away", [False, True])
async def test_a_letter_is_decoded_on_a_thread_and_never_shown_without_a_request_that_it_has(
    index: LetterIndex, away: bool
) -> None:
    codec, threads = default_codec(), list[threading.Thread]()

    def decode(value: bytes, kind: Any) -> Any:
        threads.append(threading.current_thread())
        if away and kind is InferenceRequest:
            raise RegistryUnavailable("it is away")
        return codec.decode(value, kind)

    topics = Topics(Random(1), strict=True, away=0.0, fails=0.0)
    topics.add_letter(0, readable=True)
    letters: Any = SimpleNamespace(index=index, catch_up=lambda _: None, read=lambda _: {(0, 0): topics.letters[0][0]})
    index.take([letter(0)])
    slow, unused = Mock(decode=decode), cast(Any, None)
    shown = Redriving(letters, unused, unused, unused, slow, KafkaSettings(), Threads()).show(Caller(tenant="t"), "0/0")
    if away:
        with pytest.raises(RegistryUnavailable):
            await shown
    else:
        assert (await shown)["request"] is not None
    assert len(threads) == 2
    assert threading.main_thread() not in threads


# -- a redrive whose key is revoked while it runs


LETTERS = 7
OPERATOR = Caller(tenant="ops", key_id="k")


class World:
    """Seven letters, the fourth of which holds no request, and a key that is revoked once some were run again."""

    def __init__(self, holds: int) -> None:
        self.holds = holds
        self.topics = Topics(Random(1), strict=True, away=0.0, fails=0.0)
        for number in range(LETTERS):
            self.topics.add_letter(number, readable=number != 3)
        allowances = Allowances(renew=self.renew)
        self.redriving = Gateway(self.topics, new_index(), allowances).redriving

    def renew(self, caller: Caller) -> Caller:
        if len(self.topics.requests) >= self.holds:
            raise Unauthenticated("this key was revoked")
        return caller


@pytest.mark.parametrize("rate", [None, 10_000.0], ids=["together", "one by one"])
@pytest.mark.parametrize("ids", [True, False], ids=["by ids", "by filter"])
@pytest.mark.parametrize("holds", [1, 2, 4])
async def test_letters_that_a_revoked_key_left_are_not_skipped(
    monkeypatch: pytest.MonkeyPatch, holds: int, ids: bool, rate: float | None
) -> None:
    monkeypatch.setattr(redriving, "AT_ONCE", 2)
    world = World(holds)
    places = [f"{number % 2}/{number // 2}" for number in range(LETTERS)]
    after, run, skipped = None, list[str](), 0

    async def redrive() -> bool:
        nonlocal after, skipped
        chosen = Chosen(ids=places if ids else None, filter=None if ids else LetterFilter(), after=after)
        done = await world.redriving.redrive(OPERATOR, chosen, rate=rate, dry_run=False, again=False)
        run.extend(done.requests.values())
        skipped += len([one for one in done.skipped if one["code"] != "conflict"])
        after = str(done.cursor)
        assert isinstance(done.error, Unauthenticated) == (done.remaining > 0)
        return done.remaining > 0

    assert await redrive()
    assert holds <= len(run) < LETTERS - 1
    with pytest.raises(Unauthenticated):
        await redrive()
    world.holds = 100
    assert not await redrive()
    assert (len({*run}), len(run), skipped) == (LETTERS - 1, LETTERS - 1, 1)
    assert len(world.topics.requests) == LETTERS - 1


@pytest.fixture
def purge(index: LetterIndex, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Purges seven letters, two by each call; the letters of each call. Actions are in the index at once."""
    monkeypatch.setattr(redriving, "MOST", 2)
    monkeypatch.setattr(admin, "begin_offsets", lambda _, tps: dict.fromkeys(tps, 100))
    index.take([letter(n) for n in range(7)])
    ends, codec, unused = itertools.count(7), default_codec(), cast(Any, None)

    async def produce(topic: str, value: bytes, *, key: bytes, **_: Any) -> None:
        index.take([LetterAction(0, next(ends), key.decode(), codec.decode(value, DeadLetterAction))])

    letters: Any = SimpleNamespace(index=index, catch_up=lambda *_: None)
    topic: Any = SimpleNamespace(produce=produce)
    parts = Redriving(letters, unused, unused, topic, codec, KafkaSettings(), Threads())

    async def purged(after: str | None = None, *, dry_run: bool = False) -> list[list[str]]:
        found: list[list[str]] = []
        while True:
            chosen = Chosen(filter=LetterFilter(), after=after)
            done = await parts.purge(Caller(tenant="t"), chosen, dry_run=dry_run)
            found.append(list(done.requests))
            if not done.remaining:
                return found
            after = str(done.cursor)

    return purged


async def test_the_next_call_continues_after_letters_that_are_gone(purge: Any) -> None:
    pages = [["0/0", "0/1"], ["0/2", "0/3"], ["0/4", "0/5"], ["0/6"]]
    assert await purge(dry_run=True) == pages
    assert await purge() == pages


async def test_letters_up_to_the_first_after_are_kept(purge: Any) -> None:
    assert await purge("0/2") == [["0/3", "0/4"], ["0/5", "0/6"]]
    assert await purge() == [["0/0", "0/1"], ["0/2"]]
