"""Forks and deletions at the gateway: any history against plain lists, killed anywhere, two calls in any order."""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conversation_topics import (
    CODEC,
    NAMES,
    Cluster,
    Killed,
    SharedCluster,
    killed_at_each_step,
    message,
    run,
    said,
    say,
    together,
)
from kit.examples import examples
from kit.refusals import refused
from penstock.common import forks
from penstock.common.artifacts import ArtifactStore
from penstock.common.conversations import ConversationRecord, TopicRecords, fold_messages, read_through
from penstock.common.forks import TopicForks
from penstock.common.shards.addresses import address_of
from penstock.common.transport import Delivery
from penstock.gateway.conversations.pages import Conversations
from penstock.gateway.conversations.trees import Branch
from penstock.gateway.openai.item_events import Position
from penstock.gateway.service.forking import Forking
from penstock.schemas.errors import Conflict, NotFound
from penstock.schemas.records import ConversationFork, conversation_message_key

LAYOUTS = pytest.mark.parametrize("new", [Cluster, SharedCluster])


# -- any history


@dataclass
class World:
    """Conversations as plain lists of (offset, text), copied when one is forked; None: there is none of this id."""

    cluster: Cluster
    lists: dict[str, list[tuple[int, str]] | None] = field(default_factory=lambda: {"c0": None})
    bases: dict[str, int] = field(default_factory=lambda: {"c0": 0})
    children: dict[str, set[str]] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)
    """Text → the conversation in whose topic it stands."""

    def __post_init__(self) -> None:
        self.forking, self.pages = self.cluster.gateway()
        self.thin = Conversations(self.cluster.log, NAMES, CODEC, most_records=4)
        """It keeps next to nothing."""
        self.numbers = itertools.count()

    def pick(self, number: int) -> str:
        return sorted(self.lists)[number % len(self.lists)]

    def talk(self, number: int) -> None:
        name, request_id = self.pick(number), f"r{next(self.numbers)}"
        topic = NAMES.conversation("acme", name)
        if not self.cluster.exists(topic):
            self.bases[name] = 0
        base, at = self.bases[name], say(self.cluster, name, request_id)
        kept = self.lists[name] or []
        told = [(base + at.question, f"{request_id} in"), (base + at.answer, f"{request_id} out")]
        self.lists[name] = [*kept, *told]
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
        topic = NAMES.conversation("acme", self.owners[text])
        for void in self.cluster.live_keys(topic) if self.cluster.is_shared and self.cluster.exists(topic) else ():
            if void.startswith(b"deleted/late"):  # as a worker does
                self.cluster.put(topic, void, None)
        self.cluster.put(topic, key, None)
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
        if self.cluster.exists(topic) and (end := self.cluster.log.end(topic)):
            base = self.bases[name]
            if self.cluster.is_shared:
                _, found = self.cluster.read_topic(topic)
                read = TopicForks(found.head)
                for one in found.records:
                    read.apply(one.offset, one.key, one.message)
                end = read.newest + 1
            late = forks.deleted_record("acme", name, f"late{next(self.numbers)}", base, 0, only_behind=base + end - 2)
            self.cluster.put(topic, late.key.encode(), CODEC.encode(late.message))
            if number % 2:
                self.cluster.put(topic, late.key.encode(), None)

    def compact(self, number: int) -> None:
        self.cluster.compact(tombstones_too=number % 2 == 0)

    def mirror(self, _: int) -> None:
        """All topics are copied to another cluster, where they have other ids."""
        self.cluster.give_new_ids()

    def create(self, number: int) -> None:
        name = self.pick(number)
        if not self.cluster.exists(NAMES.conversation("acme", name)):
            self.bases[name] = 0
        run(self.forking.create("acme", name))
        self.lists[name] = self.lists[name] or []

    def check(self) -> None:
        for pages in (self.pages, self.thin, self.cluster.gateway()[1]):
            deleted = pages.deleted("acme", list(self.lists))
            for name, kept in self.lists.items():
                if not kept:  # what is empty may have been erased behind a deletion: then there is none
                    if self.cluster.exists(NAMES.conversation("acme", name)) and name not in deleted:
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
        self.look_at_tree(pages, name)

    def look_at_tree(self, pages: Conversations, name: str) -> None:
        """Every branch stands behind what it goes on from, adds what others do not have, and is there once."""
        found = pages.tree("acme", name)
        by_id: dict[str, Branch] = {}
        for one in found:
            assert one.conversation_id not in by_id
            assert one.forked_from is None or one.forked_from.conversation_id in by_id
            by_id[one.conversation_id] = one
            if not one.is_deleted:
                assert one.messages == len(self.added(one))
        for one in found:
            heirs = [heir for heir in found if self.parent(heir) == one.conversation_id]
            if one.is_deleted and not any(heir.is_deleted for heir in heirs):  # only what others inherit
                begin = -1 if one.forked_from is None else one.forked_from.through
                inherited = [[at for at, _ in self.inherited(heir) if at > begin] for heir in heirs]
                assert one.messages == max(map(len, inherited))
        assert name in by_id
        living = [one.conversation_id for one in found if not one.is_deleted]
        forks = {child for one in living for child in self.children.get(one, ()) if self.lists[child]}
        assert forks <= set(living)
        others = {pages.tree("acme", one)[0].conversation_id for one in living if self.lists[one]}
        assert others == {found[0].conversation_id}, "the same tree, whichever of it is named"

    def parent(self, one: Branch) -> str | None:
        return None if one.forked_from is None else one.forked_from.conversation_id

    def inherited(self, one: Branch) -> list[tuple[int, str]]:
        through = -1 if one.forked_from is None else one.forked_from.through
        return [said for said in self.lists[one.conversation_id] or [] if said[0] <= through]

    def added(self, one: Branch) -> list[tuple[int, str]]:
        return (self.lists[one.conversation_id] or [])[len(self.inherited(one)) :]

    def read_topic(self, name: str, topic_id: str | None) -> TopicRecords | None:
        found_id, found = self.cluster.read_topic(NAMES.conversation("acme", name))
        return found._replace(has_id=topic_id in (None, found_id))

    def plain(self, records: list[ConversationRecord]) -> list[tuple[int, str]]:
        messages = [(record.offset, record.message) for record in records if record.message is not None]
        return [(at, one.content) for at, one in messages if one.direction in ("in", "out")]


NUMBER = st.integers(0, 1_000)
FORK = st.tuples(st.just(World.fork), NUMBER, NUMBER)
ACTS = (World.talk, World.erase, World.delete, World.create, World.delete_too_late, World.compact, World.mirror)
STEP = st.one_of(FORK, FORK, *(st.tuples(st.just(act), NUMBER) for act in (*ACTS, World.talk, World.delete)))


@LAYOUTS
@settings(max_examples=examples(100))
@given(st.lists(STEP, min_size=5, max_size=20))
def test_pages_of_forks_are_those_of_copies(new: type[Cluster], steps: list[tuple[Any, ...]]) -> None:
    world = World(new())
    world.talk(0)
    world.fork(0, 1)
    for act, *numbers in steps:
        act(world, *numbers)
        world.check()
    for number in range(len(world.lists)):
        world.delete(number)
        world.check()
    assert world.cluster.is_empty


def test_a_deleted_conversation_is_in_a_tree_as_long_as_one_that_lives_goes_on_from_it() -> None:
    """Also when a gateway was killed in the deletion of the last, and the topics are still there."""
    cluster = Cluster()
    parent(cluster)
    forking, pages = cluster.gateway()
    run(forking.fork("acme", "c", 1, "f"))
    run(forking.fork("acme", "c", 3, "g"))
    run(forking.fork("acme", "f", 1, "h"))  # through what f inherits: a fork of c
    run(forking.delete("acme", "c"))
    for one in ("g", "h"):
        ended = forks.deleted_record("acme", one, "d", 2, 0)
        cluster.put(NAMES.conversation("acme", one), ended.key.encode(), CODEC.encode(ended.message))
    found = pages.tree("acme", "f")
    assert [(one.conversation_id, one.is_deleted, one.messages) for one in found] == [("c", True, 2), ("f", False, 0)]
    with pytest.raises(NotFound):
        pages.tree("acme", "c")


LOOKS = ("places", "read_many", "topic_id", "end")


def test_a_tree_is_read_by_its_levels_not_by_its_branches() -> None:
    cluster = Cluster()
    say(cluster, "c", "r")
    forking, _ = cluster.gateway()
    for number in range(30):
        run(forking.fork("acme", "c", 1, f"f{number}"))
        say(cluster, f"f{number}", f"r{number}")
        run(forking.fork("acme", f"f{number}", 3, f"g{number}"))
    _, pages = cluster.gateway()
    counted = [Mock(wraps=getattr(cluster, name)) for name in LOOKS]
    vars(cluster).update(zip(LOOKS, counted, strict=True))
    found = pages.tree("acme", "g7")
    assert [(one.depth, one.messages) for one in found] == [(0, 2)] + [(1, 2), (2, 0)] * 30
    assert sum(one.call_count for one in counted) <= 2 * 3 + 2 * 3, (
        "two for each level, and two for each that g7 goes on from"
    )


# -- killed anywhere


def parent(cluster: Cluster) -> Cluster:
    """With two turns in the conversation c."""
    say(cluster, "c", "r1")
    say(cluster, "c", "r2")
    return cluster


def begun(new: type[Cluster]) -> tuple[Cluster, Forking, Conversations]:
    """A cluster with that conversation, and a gateway."""
    cluster = parent(new())
    return cluster, *cluster.gateway()


def fork(cluster: Cluster, name: str = "f", of: str = "c") -> Any:
    """A fork through the first turn, by a gateway that has read nothing yet."""
    return cluster.gateway()[0].fork("acme", of, cluster.first + 1, name)


@LAYOUTS
@pytest.mark.parametrize("given_id", ["fresh", "empty", "forked"])
def test_a_killed_fork_is_made_or_not_and_a_repeat_makes_it(new: type[Cluster], given_id: str) -> None:
    if new.is_shared and given_id == "empty":
        pytest.skip("there the first record says what a conversation goes on from")
    whole = ["r1 in", "r1 out"]

    def started() -> Cluster:
        cluster = parent(new())
        if given_id == "empty":
            cluster.create(NAMES.conversation("acme", "f"))
        if given_id == "forked":
            run(fork(cluster))
        return cluster

    for cluster in killed_at_each_step(started, fork, least=3 if given_id == "forked" else 5):
        forking, pages = cluster.gateway()
        with suppress(NotFound):
            assert said(pages, "f") in ([whole] if given_id == "forked" else [[], whole])
        assert run(fork(cluster)).through == cluster.first + 1
        assert said(pages, "f") == whole
        assert [one for one, _ in pages.forks("acme", "c", 10)] == ["f"]
        run(forking.delete("acme", "c"))
        with pytest.raises(NotFound):
            pages.about("acme", "c")
        say(cluster, "c", "r1", epoch=1)
        assert pages.about("acme", "c").forked_from is None
        assert said(pages, "c") == said(pages, "f") == whole, "the same request is another turn there"
        for one in ("c", "f"):
            run(forking.delete("acme", one))
        assert cluster.is_empty


@LAYOUTS
def test_a_killed_deletion_is_finished_by_a_repeat(new: type[Cluster]) -> None:
    def started() -> Cluster:
        cluster, forking, _ = begun(new)
        run(fork(cluster))
        run(forking.delete("acme", "c"))
        return cluster

    for cluster in killed_at_each_step(started, lambda one: one.gateway()[0].delete("acme", "f"), least=5):
        forking, pages = cluster.gateway()
        if run(forking.exists("acme", "f")):
            run(forking.delete("acme", "f"))
        for one in ("f", "c"):
            with pytest.raises(NotFound):
                said(pages, one)
        assert cluster.is_empty


@pytest.mark.parametrize("name", ["c", "f"])
def test_what_is_deleted_stays_so_whatever_record_is_the_last_before_a_kill(name: str) -> None:
    for records_left in itertools.count(1):  # the first one says that it is deleted
        cluster = SharedCluster()
        parent(cluster)
        if name == "f":
            run(fork(cluster))
            say(cluster, "f", "r3")
        cluster.records_left = records_left
        try:
            run(cluster.gateway()[0].delete("acme", name))
            whole = True
        except Killed:
            whole = False
        cluster.records_left = None
        for _ in range(2):
            with pytest.raises(NotFound):
                said(cluster.gateway()[1], name)
            with pytest.raises(NotFound):
                fold_messages(read_through(name, World(cluster).read_topic))
            cluster.compact(tombstones_too=True)
        run(cluster.gateway()[0].delete("acme", name))
        assert not cluster.exists(NAMES.conversation("acme", name))
        key = address_of(NAMES, NAMES.conversation("acme", name), 2).key(b"")
        newest = {one.key or b"": one.value for records in cluster.partition_logs for one in records}
        left = [one for one, value in newest.items() if value is not None and one.startswith(key)]
        assert [one for one in left if not one.startswith(key + b"deleted/")] == []
        if whole:
            assert records_left > 4
            assert left == []
            return


def test_a_follower_goes_on_at_a_gateway_that_lacks_the_tombstones_at_the_end() -> None:
    cluster = SharedCluster()
    parent(cluster)
    topic, partitions = NAMES.conversation("acme", "c"), range(2)
    for direction in ("in", "out"):
        cluster.put(topic, conversation_message_key(message("c", "r2", direction)).encode(), None)
    for name in ("d", "e", "f", "g"):  # what stands at the end of a partition is not compacted
        say(cluster, name, "r3")
    assert all(records[-1].value is not None for records in (cluster.partition_logs[one] for one in partitions))
    seen = cluster.gateway()[1].place("acme", "c")
    cluster.compact(tombstones_too=True)
    pages = cluster.gateway()[1]
    now = pages.place("acme", "c")
    assert now.end < seen.end
    begin = Position.after(Position(seen.end).event_id, now)
    at = say(cluster, "c", "r4")
    tail = pages.tail("acme", "c", now)
    assert tail.refresh() > begin.offset
    assert [one.offset for one in tail.part(begin.offset, 10).turns] == [*at]


def test_of_two_that_remove_a_conversation_the_later_finds_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = SharedCluster()
    parent(cluster)
    topic, span = NAMES.conversation("acme", "c"), cluster.file.span

    def seen_and_removed(conversation: str) -> Any:
        found = span(conversation)
        monkeypatch.setattr(cluster.file, "span", span)
        cluster.layout.remove(topic)
        return found

    monkeypatch.setattr(cluster.file, "span", seen_and_removed)
    cluster.layout.remove(topic)
    assert not cluster.exists(topic)


# -- two at once


ORDER = st.lists(st.booleans(), max_size=60)


@LAYOUTS
@settings(max_examples=examples(300))
@given(ORDER, st.booleans())
def test_a_fork_of_what_is_deleted_meanwhile_is_whole_or_none(
    new: type[Cluster], order: list[bool], through_a_fork: bool
) -> None:
    cluster, made, pages = begun(new)
    name = "c"
    if through_a_fork:
        run(made.fork("acme", "c", cluster.first + 3, "b"))
        run(made.delete("acme", "c"))
        name = "b"
    others = cluster.gateway()[0]
    forked, _ = together(made.fork("acme", name, cluster.first + 1, "f"), others.delete("acme", name), order)
    with pytest.raises(NotFound):
        said(pages, name)
    if isinstance(forked, ConversationFork):
        assert said(pages, "f") == ["r1 in", "r1 out"]
        run(made.delete("acme", "f"))
    else:
        assert isinstance(forked, NotFound)
    assert cluster.is_empty, "nothing is left over"
    assert "c" in cluster.released


@LAYOUTS
@settings(max_examples=examples(200))
@given(ORDER, st.booleans())
def test_of_two_forks_of_one_id_one_is_made(new: type[Cluster], order: list[bool], alike: bool) -> None:
    cluster, one, pages = begun(new)
    other = cluster.gateway()[0]
    through = cluster.first + (1 if alike else 3)
    ends = together(one.fork("acme", "c", cluster.first + 1, "f"), other.fork("acme", "c", through, "f"), order)
    made = [end for end in ends if isinstance(end, ConversationFork)]
    assert len(made) == (2 if alike else 1), "both calls have the same fork"
    assert all(isinstance(end, ConversationFork | Conflict) for end in ends)
    assert said(pages, "f") == ["r1 in", "r1 out", "r2 in", "r2 out"][: made[0].through + 1 - cluster.first]
    for name in ("f", "c"):
        run(one.delete("acme", name))
    assert cluster.is_empty


@LAYOUTS
@settings(max_examples=examples(200))
@given(ORDER)
def test_a_repeat_does_not_undo_a_fork_whose_parent_is_deleted_meanwhile(new: type[Cluster], order: list[bool]) -> None:
    cluster, one, pages = begun(new)
    other = cluster.gateway()[0]
    run(one.fork("acme", "c", cluster.first + 1, "f"))
    repeated, _ = together(one.fork("acme", "c", cluster.first + 1, "f"), other.delete("acme", "c"), order)
    assert isinstance(repeated, ConversationFork | NotFound)
    assert said(pages, "f") == ["r1 in", "r1 out"]


# -- one by one


@LAYOUTS
def test_a_conversation_that_begins_with_a_turn_meanwhile_is_no_fork(new: type[Cluster]) -> None:
    cluster, forking, pages = begun(new)
    produce = cluster.produce

    async def say_first(topic: str, value: bytes | None, *, key: bytes, **more: Any) -> Delivery:
        if b"fork/" in key:
            cluster.produce = produce
            say(cluster, "f", "r3")
        return await produce(topic, value, key=key, **more)

    cluster.produce = say_first
    with pytest.raises(Conflict):
        run(forking.fork("acme", "c", cluster.first + 1, "f"))
    assert said(pages, "f") == ["r3 in", "r3 out"]
    assert cluster.live_keys(NAMES.conversation("acme", "f")) == [b"r3/in/0/0", b"r3/out/0"]
    assert pages.forks("acme", "c", 9) == []
    run(forking.delete("acme", "f"))
    run(forking.delete("acme", "c"))
    assert cluster.is_empty


@LAYOUTS
def test_what_cannot_be_forked(new: type[Cluster]) -> None:
    cluster, forking, pages = begun(new)
    say(cluster, "taken", "r3")
    cluster.put(NAMES.conversation("acme", "c"), b"r2/in/0/0", None)
    places = (("nowhere", 0, "conversation_id"), ("c", 9, "through"), ("c", cluster.first + 2, "through"))
    for name, through, param in places:
        with refused(NotFound, param=param):
            run(forking.fork("acme", name, through, "f"))
    with pytest.raises(Conflict):
        run(fork(cluster, "taken"))
    with pytest.raises(NotFound):
        said(pages, "f")
    assert said(pages, "taken") == ["r3 in", "r3 out"]
    question = run(forking.fork("acme", "c", cluster.first, "question"))
    assert question.through == cluster.first, "a question without its answer"


@LAYOUTS
def test_forks_of_forks_are_limited_where_each_adds_a_topic(new: type[Cluster]) -> None:
    cluster, forking, pages = begun(new)
    for number in range(forks.MOST_ANCESTORS + 5):
        run(forking.fork("acme", f"edit{number - 1}" if number else "c", cluster.first + 1, f"edit{number}"))
    assert pages.forks("acme", "c", 100)[0][0] == "edit0"
    assert len(pages.forks("acme", "c", 100)) == forks.MOST_ANCESTORS + 5, "edits of what is inherited make no chain"
    name = "c"
    for number in range(forks.MOST_ANCESTORS):
        last = pages.turns("acme", name, 1, newest_first=True)[-1].offset
        run(forking.fork("acme", name, last, f"deep{number}"))
        name = f"deep{number}"
        say(cluster, name, f"d{number}")
    with pytest.raises(Conflict):
        run(forking.fork("acme", name, pages.turns("acme", name, 1, newest_first=True)[-1].offset, "deeper"))
    assert len(said(pages, name)) == 4 + 2 * forks.MOST_ANCESTORS


# -- images


@pytest.mark.parametrize("is_there", [True, False])
def test_what_the_next_conversation_of_a_name_holds_stays(tmp_path: Path, is_there: bool) -> None:
    cluster, store = Cluster(), ArtifactStore(tmp_path)
    forking, pages = cluster.gateway(store)
    former, image = (store.put("acme", name, conversation_id="c0") for name in (b"former", b"next"))
    store.holds.hold("acme", former.artifact_id, "c0")
    releasing = store.conversation_gone

    def begun_anew(*args: Any) -> None:
        store.holds.hold("acme", image.artifact_id, "c0")
        say(cluster, "c0", "r2")
        releasing(*args)

    store.conversation_gone = begun_anew  # pyright: ignore[reportAttributeAccessIssue]
    if is_there:
        say(cluster, "c0", "r1")
    run(forking.delete("acme", "c0"))
    assert len(said(pages, "c0")) == 2
    assert store.holds.held_by("acme", "c0") == [image.artifact_id]
    assert store.get("acme", image.artifact_id) == b"next"
    assert store.peek("acme", former.artifact_id) is None


def test_an_image_that_a_turn_of_the_next_conversation_holds_again_stays_held(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    image = store.put("acme", b"both")
    store.holds.hold("acme", image.artifact_id, "c0")
    marks = {one: marked_ms - 5_000 for one, marked_ms in store.holds.marks_of("acme", "c0").items()}
    store.conversation_gone("acme", "c0", marks)  # it was marked five seconds after that look
    assert store.holds.of("acme", image.artifact_id) == ["c0"]
