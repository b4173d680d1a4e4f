"""Forks and deletions at the gateway: any history against plain lists, killed anywhere, two calls in any order."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conversation_topics import CODEC, NAMES, Cluster, Killed, message, run, said, say, together
from penstock.common import forks
from penstock.common.conversations import ConversationRecord, decoded, fold_messages, read_through
from penstock.gateway.conversations.pages import Conversations
from penstock.schemas.errors import BrokerUnavailable, Conflict, NotFound
from penstock.schemas.records import ConversationFork, conversation_message_key

# -- any history


@dataclass
class World:
    """Conversations as plain lists of (offset, text), copied when one is forked; None: there is none of this id."""

    cluster: Cluster = field(default_factory=Cluster)
    lists: dict[str, list[tuple[int, str]] | None] = field(default_factory=lambda: {"c0": None})
    bases: dict[str, int] = field(default_factory=lambda: {"c0": 0})
    children: dict[str, set[str]] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)
    """Text → the conversation in whose topic it stands."""

    def __post_init__(self) -> None:
        self.forking, self.pages = self.cluster.gateway()
        self.numbers = itertools.count()

    def pick(self, number: int) -> str:
        return sorted(self.lists)[number % len(self.lists)]

    def talk(self, number: int) -> None:
        name, request_id = self.pick(number), f"r{next(self.numbers)}"
        topic = NAMES.conversation("acme", name)
        if topic not in self.cluster.ids:
            self.bases[name] = 0
        at = self.bases[name] + (self.cluster.ends[topic] if topic in self.cluster.ids else 0)
        say(self.cluster, name, request_id)
        kept = self.lists[name] or []
        self.lists[name] = [*kept, (at, f"{request_id} in"), (at + 1, f"{request_id} out")]
        self.owners |= {f"{request_id} in": name, f"{request_id} out": name}

    def fork(self, number: int, place: int) -> None:
        name, child = self.pick(number), f"c{len(self.lists)}"
        kept = self.lists[name]
        if not kept:
            return
        at = place % len(kept)
        made_of = run(self.forking.fork("acme", name, kept[at][0], child))
        assert made_of == run(self.forking.fork("acme", name, kept[at][0], child)), "a repeat makes no second one"
        assert made_of.through == kept[at][0]
        assert made_of.conversation_id == self.owners[kept[at][1]]
        self.lists[child], self.bases[child] = kept[: at + 1], kept[at][0] + 1
        if any(kept_at == made_of.through for kept_at, _ in self.lists[made_of.conversation_id] or ()):  # not deleted
            self.children.setdefault(made_of.conversation_id, set()).add(child)

    def erase(self, number: int) -> None:
        texts = sorted({text for kept in self.lists.values() for _, text in kept or ()})
        if not texts:
            return
        text = texts[number % len(texts)]
        request_id, direction = text.split()
        key = conversation_message_key(message("", request_id, direction)).encode()
        self.cluster.write(NAMES.conversation("acme", self.owners[text]), key, None)
        for name, kept in self.lists.items():
            self.lists[name] = None if kept is None else [one for one in kept if one[1] != text]

    def delete(self, number: int) -> None:
        name = self.pick(number)
        if run(self.forking.exists("acme", name)):
            run(self.forking.delete("acme", name))
        self.lists[name] = None
        self.children.pop(name, None)
        for children in self.children.values():
            children.discard(name)

    def delete_too_late(self, number: int) -> None:
        """An expiry before whose record another one came."""
        name = self.pick(number)
        topic = NAMES.conversation("acme", name)
        if self.cluster.ends.get(topic) and topic in self.cluster.ids:
            base, end = self.bases[name], self.cluster.ends[topic]
            late = forks.deleted_record("acme", name, f"late{next(self.numbers)}", base, 0, only_behind=base + end - 2)
            self.cluster.write(topic, late.key.encode(), CODEC.encode(late.message))
            if number % 2:
                self.cluster.write(topic, late.key.encode(), None)

    def compact(self, number: int) -> None:
        self.cluster.compact(tombstones_too=number % 2 == 0)

    def create(self, number: int) -> None:
        name = self.pick(number)
        if NAMES.conversation("acme", name) not in self.cluster.ids:
            self.bases[name] = 0
        run(self.forking.create("acme", name))
        self.lists[name] = self.lists[name] or []

    def check(self) -> None:
        for pages in (self.pages, self.cluster.gateway()[1]):
            deleted = pages.deleted("acme", list(self.lists))
            for name, kept in self.lists.items():
                if not kept:  # what is empty may have been erased behind a deletion: then there is none
                    if NAMES.conversation("acme", name) in self.cluster.ids and name not in deleted:
                        assert pages.turns("acme", name, 10) == []
                        assert kept is not None
                    else:
                        with pytest.raises(NotFound):
                            read_through(name, self.read_topic)
                    continue
                assert name not in deleted
                self.look(pages, name, kept)

    def look(self, pages: Conversations, name: str, kept: list[tuple[int, str]]) -> None:
        def page(**options: Any) -> list[tuple[int, str]]:
            return [(turn.offset, turn.message.content) for turn in pages.turns("acme", name, **options)]

        assert page(limit=100) == kept
        middle = kept[len(kept) // 2][0]
        assert page(limit=2, after=middle) == [one for one in kept if one[0] > middle][:2]
        assert page(limit=3, after=middle, newest_first=True) == [one for one in kept if one[0] < middle][::-1][:3]
        records = pages.records("acme", name, 1_000)
        offsets = [record.offset for record in records]
        assert offsets == sorted(set(offsets))
        shown = {record.offset: record.message.content for record in records if record.message is not None}
        assert {at: shown.get(at) for at, _ in kept} == dict(kept)
        assert self.plain(records) == kept
        folded = fold_messages(read_through(name, self.read_topic))
        assert [(turn.offset, turn.message.content) for turn in folded] == kept
        assert (
            pages.records("acme", name, 2, from_offset=middle) == [one for one in records if one.offset >= middle][:2]
        )
        children = {one for one, _ in pages.forks("acme", name, 100)}
        alive = {one for one in self.children.get(name, ()) if self.lists[one]}
        assert alive <= children <= self.children.get(name, set())

    def read_topic(self, name: str, topic_id: str | None) -> list[ConversationRecord] | None:
        topic = NAMES.conversation("acme", name)
        if topic not in self.cluster.ids:
            raise NotFound(topic)
        known = topic_id is None or self.cluster.ids[topic] == topic_id
        return list(decoded(CODEC, self.cluster.logs[topic])) if known else None

    def plain(self, records: list[ConversationRecord]) -> list[tuple[int, str]]:
        messages = [(record.offset, record.message) for record in records if record.message is not None]
        return [(at, one.content) for at, one in messages if one.direction in ("in", "out")]


NUMBER = st.integers(0, 1_000)
STEP = st.one_of(
    st.tuples(st.just(World.talk), NUMBER),
    st.tuples(st.just(World.talk), NUMBER),
    st.tuples(st.just(World.fork), NUMBER, NUMBER),
    st.tuples(st.just(World.fork), NUMBER, NUMBER),
    st.tuples(st.just(World.erase), NUMBER),
    st.tuples(st.just(World.delete), NUMBER),
    st.tuples(st.just(World.delete), NUMBER),
    st.tuples(st.just(World.create), NUMBER),
    st.tuples(st.just(World.delete_too_late), NUMBER),
    st.tuples(st.just(World.compact), NUMBER),
)


@settings(max_examples=100)
@given(st.lists(STEP, min_size=5, max_size=20))
def test_pages_of_forks_are_those_of_copies(steps: list[tuple[Any, ...]]) -> None:
    """Compacted or not. And when all are deleted, no topic is left, whatever the order."""
    world = World()
    world.talk(0)
    world.fork(0, 1)
    for act, *numbers in steps:
        act(world, *numbers)
        world.check()
    for number in range(len(world.lists)):
        world.delete(number)
        world.check()
    assert not world.cluster.logs


# -- killed anywhere


def parent(cluster: Cluster) -> None:
    say(cluster, "c", "r1")
    say(cluster, "c", "r2")


@pytest.mark.parametrize("given_id", ["fresh", "empty"])
def test_a_killed_fork_is_made_or_not_and_a_repeat_makes_it(given_id: str) -> None:
    for kill_at in itertools.count():
        cluster = Cluster(kill_at=kill_at)
        parent(cluster)
        if given_id == "empty":
            cluster.create(NAMES.conversation("acme", "f"))
        try:
            run(cluster.gateway()[0].fork("acme", "c", 1, "f"))
            whole = True
        except Killed:
            whole = False
        cluster.kill_at = None
        forking, pages = cluster.gateway()
        try:
            assert said(pages, "f") in ([], ["r1 in", "r1 out"])
        except NotFound:
            pass
        assert run(forking.fork("acme", "c", 1, "f")).through == 1
        assert said(pages, "f") == ["r1 in", "r1 out"]
        assert [one for one, _ in pages.forks("acme", "c", 10)] == ["f"]
        for one in ("c", "f"):
            run(forking.delete("acme", one))
        assert not cluster.logs
        if whole:
            assert kill_at > 5
            return


def test_a_killed_deletion_is_finished_by_a_repeat() -> None:
    for kill_at in itertools.count():
        cluster = Cluster()
        parent(cluster)
        run(cluster.gateway()[0].fork("acme", "c", 1, "f"))
        run(cluster.gateway()[0].delete("acme", "c"))
        cluster.kill_at, cluster.calls = kill_at, 0
        try:
            run(cluster.gateway()[0].delete("acme", "f"))
            whole = True
        except Killed:
            whole = False
        cluster.kill_at = None
        forking, pages = cluster.gateway()
        if run(forking.exists("acme", "f")):
            run(forking.delete("acme", "f"))
        for one in ("f", "c"):
            with pytest.raises(NotFound):
                said(pages, one)
        assert not cluster.logs
        if whole:
            assert kill_at > 5
            return


# -- two at once


ORDER = st.lists(st.booleans(), max_size=60)


@settings(max_examples=300)
@given(ORDER, st.booleans())
def test_a_fork_of_what_is_deleted_meanwhile_is_whole_or_none(order: list[bool], through_a_fork: bool) -> None:
    """Also when it is made through a fork of a deleted conversation, and that fork is the one that is deleted."""
    cluster = Cluster()
    parent(cluster)
    made, pages = cluster.gateway()
    name = "c"
    if through_a_fork:
        run(made.fork("acme", "c", 3, "b"))
        run(made.delete("acme", "c"))
        name = "b"
    others = cluster.gateway()[0]
    forked, _ = together(made.fork("acme", name, 1, "f"), others.delete("acme", name), order)
    with pytest.raises(NotFound):
        said(pages, name)
    if isinstance(forked, ConversationFork):
        assert said(pages, "f") == ["r1 in", "r1 out"]
        run(made.delete("acme", "f"))
    else:
        assert isinstance(forked, NotFound)
    assert not cluster.logs, "nothing is left over"
    assert "c" in cluster.released


@settings(max_examples=200)
@given(ORDER, st.booleans())
def test_of_two_forks_of_one_id_one_is_made(order: list[bool], alike: bool) -> None:
    cluster = Cluster()
    parent(cluster)
    (one, pages), other = cluster.gateway(), cluster.gateway()[0]
    through = 1 if alike else 3
    ends = together(one.fork("acme", "c", 1, "f"), other.fork("acme", "c", through, "f"), order)
    made = [end for end in ends if isinstance(end, ConversationFork)]
    assert made
    assert all(isinstance(end, ConversationFork | Conflict) for end in ends)
    assert said(pages, "f") == ["r1 in", "r1 out", "r2 in", "r2 out"][: made[0].through + 1]
    for name in ("f", "c"):
        run(one.delete("acme", name))
    assert not cluster.logs


@settings(max_examples=200)
@given(ORDER)
def test_a_repeat_does_not_undo_a_fork_whose_parent_is_deleted_meanwhile(order: list[bool]) -> None:
    cluster = Cluster()
    parent(cluster)
    (one, pages), other = cluster.gateway(), cluster.gateway()[0]
    run(one.fork("acme", "c", 1, "f"))
    repeated, _ = together(one.fork("acme", "c", 1, "f"), other.delete("acme", "c"), order)
    assert isinstance(repeated, ConversationFork | NotFound)
    assert said(pages, "f") == ["r1 in", "r1 out"]


# -- one by one


def test_a_conversation_that_begins_with_a_turn_meanwhile_is_no_fork() -> None:
    cluster = Cluster()
    parent(cluster)
    forking, pages = cluster.gateway()
    create = cluster.create

    def create_and_say(topic: str) -> None:
        create(topic)
        cluster.create = create
        say(cluster, "f", "r3")

    cluster.create = create_and_say
    with pytest.raises(Conflict):
        run(forking.fork("acme", "c", 1, "f"))
    assert said(pages, "f") == ["r3 in", "r3 out"]
    assert [one.message is None for one in pages.records("acme", "f", 9)] == [False, False, True, True]
    run(forking.delete("acme", "f"))
    run(forking.delete("acme", "c"))
    assert not cluster.logs


def test_the_same_request_behind_a_deletion_is_another_turn() -> None:
    cluster = Cluster()
    parent(cluster)
    forking, pages = cluster.gateway()
    run(forking.fork("acme", "c", 1, "f"))
    run(forking.delete("acme", "c"))
    say(cluster, "c", "r1", epoch=1)
    assert said(pages, "c") == said(pages, "f") == ["r1 in", "r1 out"]


def test_what_cannot_be_forked() -> None:
    cluster = Cluster()
    parent(cluster)
    say(cluster, "taken", "r3")
    forking, pages = cluster.gateway()
    cluster.write(NAMES.conversation("acme", "c"), b"r2/in/0/0", None)
    for name, through, param in (("nowhere", 0, "conversation_id"), ("c", 9, "through"), ("c", 2, "through")):
        with pytest.raises(NotFound) as refused:
            run(forking.fork("acme", name, through, "f"))
        assert refused.value.param == param
    with pytest.raises(Conflict):
        run(forking.fork("acme", "c", 1, "taken"))
    with pytest.raises(NotFound):
        said(pages, "f")
    assert said(pages, "taken") == ["r3 in", "r3 out"]
    assert run(forking.fork("acme", "c", 0, "question")).through == 0, "a question without its answer"


def test_forks_of_forks_are_limited_where_each_adds_a_topic() -> None:
    cluster = Cluster()
    parent(cluster)
    forking, pages = cluster.gateway()
    for number in range(forks.MOST_ANCESTORS + 5):
        run(forking.fork("acme", f"edit{number - 1}" if number else "c", 1, f"edit{number}"))
    assert pages.forks("acme", "c", 100)[0][0] == "edit0"
    assert len(pages.forks("acme", "c", 100)) == forks.MOST_ANCESTORS + 5, "edits of what is inherited make no chain"
    name, last = "c", 0
    for number in range(forks.MOST_ANCESTORS):
        last = pages.turns("acme", name, 1, newest_first=True)[-1].offset
        run(forking.fork("acme", name, last, f"deep{number}"))
        name = f"deep{number}"
        say(cluster, name, f"d{number}")
    with pytest.raises(Conflict):
        run(forking.fork("acme", name, last + 2, "deeper"))
    assert len(said(pages, name)) == 4 + 2 * forks.MOST_ANCESTORS


def test_a_broker_that_fails_at_the_end_of_a_repeat_costs_no_fork() -> None:
    cluster = Cluster()
    parent(cluster)
    forking, pages = cluster.gateway()
    run(forking.fork("acme", "c", 1, "f"))
    real, cluster.calls = cluster.step, 0

    async def fails() -> None:
        await real()
        if cluster.calls > 3:
            raise BrokerUnavailable("away")

    cluster.step = fails
    with pytest.raises(BrokerUnavailable):
        run(forking.fork("acme", "c", 1, "f"))
    assert said(pages, "f") == ["r1 in", "r1 out"]


def test_an_id_that_is_deleted_and_still_needed_begins_anew_and_is_cleaned_up_later() -> None:
    cluster = Cluster()
    parent(cluster)
    forking, pages = cluster.gateway()
    run(forking.fork("acme", "c", 1, "f"))
    run(forking.delete("acme", "c"))
    assert pages.deleted("acme", ["c", "f"]) == {"c"}
    with pytest.raises(Conflict):
        run(forking.fork("acme", "f", 1, "c"))
    with pytest.raises(NotFound):
        pages.about("acme", "c")
    run(forking.create("acme", "c"))
    assert pages.about("acme", "c").forked_from is None, "it is there at once, whatever was read before"
    assert (pages.turns("acme", "c", 5), pages.deleted("acme", ["c"])) == ([], set())
    say(cluster, "c", "r3")
    assert said(pages, "c") == ["r3 in", "r3 out"]
    assert pages.about("acme", "c").forked_from is None
    run(forking.delete("acme", "f"))
    live = {one.key: one.value for one in cluster.logs[NAMES.conversation("acme", "c")]}
    assert not [key for key, value in live.items() if value is not None and (key or b"").startswith((b"r1", b"r2"))]
    assert said(cluster.gateway()[1], "c") == ["r3 in", "r3 out"]
    assert cluster.released == ["f"]
