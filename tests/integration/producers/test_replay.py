"""Replays of many conversations against a real broker: what comes, in which order, and what a kill leaves."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import aclosing, closing
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pytest
from confluent_kafka import Consumer

from penstock.common import admin
from penstock.common.forks import begin_record
from penstock.common.shards.addresses import address_of
from penstock.common.shards.partitioning import partitions_in_use
from penstock.common.transport import Transport
from penstock.producers import AsyncClient, Client, Conflict, KafkaSettings, ReplayedRecord
from penstock.producers import replay as replay_module
from penstock.producers.replay import ConversationReplay
from penstock.producers.replay_topics import ReplayTopics
from penstock.schemas.codec import default_codec
from penstock.schemas.records import ConversationMessage, conversation_message_key
from penstock.schemas.topics import topic_specs
from support import committed_offsets, wait_until

Place = tuple[str, int]
"""A conversation, and which of its messages it is. In a topic of its own that is the offset too."""


@dataclass
class Scribe:
    """Writes conversations as a worker does, and removes them as a gateway does."""

    settings: KafkaSettings
    shared: int | None = None
    """Partitions of the topic that all conversations share; None: each has its own."""
    transport: Transport = field(init=False)
    keys: dict[str, list[bytes]] = field(default_factory=dict[str, list[bytes]])
    """In the shared topic: of each conversation's records."""

    def __post_init__(self) -> None:
        self.transport = Transport(self.settings)

    def message(self, conversation: str, number: int, tenant: str = "default") -> ConversationMessage:
        return ConversationMessage(
            tenant=tenant,
            conversation_id=conversation,
            request_id=f"r{number}",
            direction="in",
            role="user",
            content=f"{conversation} {number}",
            created_at=1,
        )

    def create(self, conversation: str, messages: int, tenant: str = "default", start: int = 0) -> None:
        topic = self.settings.names.conversation(tenant, conversation)
        if self.shared is None:
            admin.create_conversation_topic(self.settings, topic)
        elif start == 0:
            head = begin_record(tenant, conversation, uuid.uuid4().hex, 1)
            self.write(topic, head.key.encode(), default_codec().encode(head.message))
        for number in range(start, start + messages):
            made = self.message(conversation, number, tenant)
            self.write(topic, conversation_message_key(made).encode(), default_codec().encode(made))
        assert self.transport.flush(10) == 0

    def erase(self, conversation: str, number: int) -> None:
        topic = self.settings.names.conversation("default", conversation)
        self.write(topic, conversation_message_key(self.message(conversation, number)).encode(), None)
        assert self.transport.flush(10) == 0

    def delete(self, conversation: str) -> None:
        topic = self.settings.names.conversation("default", conversation)
        if self.shared is None:
            admin.delete_topic(self.settings, topic)
            wait_until(lambda: admin.topic_id(self.settings, topic) is None)
        else:
            head, *others = self.keys.pop(topic)
            for key in (*others, head):
                self.write(topic, key, None)
            assert self.transport.flush(10) == 0

    def write(self, topic: str, key: bytes, value: bytes | None) -> None:
        if self.shared is None:
            self.transport.send(topic, value, key=key)
            return
        if value is not None:
            self.keys.setdefault(topic, []).append(key)
        address = address_of(self.settings.names, topic, self.shared)
        log = self.settings.names.conversation_log
        self.transport.send(log, value, key=address.key(key), partition=address.partition)


@pytest.fixture
def own(settings: KafkaSettings) -> Iterator[Scribe]:
    """Each conversation has a topic."""
    if partitions_in_use(settings) is not None:
        pytest.skip("all conversations share a topic here")
    made = Scribe(settings)
    yield made
    made.transport.close()


@pytest.fixture
def shared(settings: KafkaSettings) -> Iterator[Scribe]:
    """All are in one topic."""
    specs = topic_specs(settings.names, partitions=2, shared_conversations=True)
    admin.ensure_topics(settings, [spec for spec in specs if spec.name == settings.names.conversation_log])
    made = Scribe(settings, shared=partitions_in_use(settings))
    yield made
    made.transport.close()


@pytest.fixture(params=["own", "shared"])
def scribe(request: pytest.FixtureRequest) -> Scribe:
    return request.getfixturevalue(request.param)


@pytest.fixture
def client(settings: KafkaSettings) -> Iterator[Client]:
    with Client(settings) as made:
        yield made


def places(records: Iterable[ReplayedRecord]) -> list[Place]:
    """Of messages: a conversation in the shared topic begins with a record of its own."""
    messages = (record.message for record in records)
    return [place_of(one.conversation_id, one.content) for one in messages if one and one.direction == "in"]


def place_of(conversation: str, content: Any) -> Place:
    """Every message says of which conversation it is, and its number there."""
    named, number = content.split()
    assert named == conversation
    return conversation, int(number)


def by_conversation(found: Iterable[Place]) -> dict[str, list[int]]:
    """The numbers of each conversation's messages, as they came."""
    numbers: dict[str, list[int]] = {}
    for conversation, number in found:
        numbers.setdefault(conversation, []).append(number)
    return numbers


def whole(client: Client, pattern: str = "*", **options: Any) -> list[ReplayedRecord]:
    return [record for batch in client.replay_conversations(pattern, **options) for record in batch]


def test_conversations_of_a_pattern_come_whole_in_order_and_no_others(client: Client, own: Scribe) -> None:
    for conversation, messages in (("trip-2", 3), ("trip-1", 250), ("other", 2), ("trip-0", 0)):
        own.create(conversation, messages)
    own.create("trip-1", 4, tenant="acme")
    expected = [("trip-1", at) for at in range(250)] + [("trip-2", at) for at in range(3)]
    batches = list(client.replay_conversations("trip-*", batch_records=100))
    assert [places(batch) for batch in batches] == [
        expected[:100],
        expected[100:200],
        expected[200:250],
        expected[250:],
    ]
    assert batches[0][7].message == own.message("trip-1", 7)
    with Client(own.settings, tenant="acme") as theirs:
        assert places(whole(theirs)) == [("trip-1", at) for at in range(4)]

    async def the_same() -> list[Place]:
        async with AsyncClient(own.settings) as waiting, aclosing(waiting.replay_conversations("trip-*")) as found:
            return [place async for batch in found for place in places(batch)]

    assert asyncio.run(the_same()) == expected


def test_those_of_a_pattern_come_from_among_others(client: Client, shared: Scribe) -> None:
    sizes = {"trip-2": 3, "trip-1": 250, "other": 2, "trip-0": 0}
    for conversation, messages in sizes.items():
        shared.create(conversation, messages)
    shared.create("trip-1", 4, tenant="acme")
    for number in range(250, 260):  # turn by turn
        for conversation in ("trip-1", "trip-2", "other"):
            shared.create(conversation, 1, start=number)
    batches = list(client.replay_conversations("trip-*", batch_records=100))
    assert all(len(batch) <= 100 and len({record.conversation_id for record in batch}) == 1 for batch in batches)
    records = [record for batch in batches for record in batch]
    assert by_conversation(places(records)) == {
        "trip-1": list(range(260)),
        "trip-2": [0, 1, 2, *range(250, 260)],
    }
    heads = {record.conversation_id for record in records if record.key.startswith("fork/")}
    assert heads == {"trip-0", "trip-1", "trip-2"}
    assert records[0].key.startswith("fork/")
    assert records[1].message == shared.message(records[1].conversation_id, 0)
    with Client(shared.settings, tenant="acme") as theirs:
        assert places(whole(theirs)) == [("trip-1", at) for at in range(4)]


def test_it_begins_at_an_offset(client: Client, own: Scribe) -> None:
    own.create("a", 4)
    own.create("b", 2)
    assert places(whole(client, from_offset=3)) == [("a", 3)]


def test_in_the_shared_topic_offsets_are_those_of_its_partitions(client: Client, shared: Scribe) -> None:
    shared.create("a", 4)
    shared.create("b", 4)
    everything = whole(client)
    assert len(everything) == 10
    middle = sorted(record.offset for record in everything)[5]
    expected = {(record.conversation_id, record.offset) for record in everything if record.offset >= middle}
    found = {(record.conversation_id, record.offset) for record in whole(client, from_offset=middle)}
    assert found == expected
    assert 0 < len(found) < 10


def test_an_offset_beyond_the_end_is_not_taken_for_a_log_that_lost_records(
    client: Client, own: Scribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_module, "LOOK_S", 0.01)
    own.create("a", 2)
    with closing(client.replay_conversations(follow=True, from_offset=3)) as batches:
        appending = threading.Timer(0.5, own.create, ("a", 2), {"start": 2})
        appending.start()
        assert places(next(batches)) == [("a", 3)]
        appending.join()


def test_it_begins_at_a_time(client: Client, scribe: Scribe) -> None:
    scribe.create("a", 4)
    scribe.create("b", 2)
    newest = client.replay("b")[-1].timestamp_ms
    wait_until(lambda: time.time_ns() // 1_000_000 > newest)
    since_ms = newest + 1
    scribe.create("a", 1, start=4)
    assert places(whole(client, since_ms=since_ms)) == [("a", 4)]


def test_a_group_goes_on_behind_what_was_taken(client: Client, own: Scribe) -> None:
    own.create("a", 10)
    own.create("b", 3)
    with closing(client.replay_conversations(group="index", batch_records=4)) as batches:
        assert places(next(batches)) == [("a", at) for at in range(4)]
        assert places(next(batches)) == [("a", at) for at in range(4, 8)]  # this one is not dealt with
    rest = [("a", at) for at in range(4, 10)] + [("b", at) for at in range(3)]
    assert places(whole(client, group="index", from_offset=0)) == rest
    assert whole(client, group="index") == []
    assert len(whole(client, group="another")) == 13
    own.create("b", 1, start=3)
    assert places(whole(client, group="index")) == [("b", 3)]


def test_a_group_goes_on_in_the_shared_topic(client: Client, shared: Scribe) -> None:
    shared.create("a", 10)
    shared.create("b", 3)
    with closing(client.replay_conversations(group="index", batch_records=4)) as batches:
        taken = places(next(batches))
        next(batches)  # this one is not dealt with
    everything = {("a", at) for at in range(10)} | {("b", at) for at in range(3)}
    rest = places(whole(client, group="index", from_offset=0))
    assert set(rest) == everything - set(taken)
    assert whole(client, group="index") == []
    shared.create("b", 1, start=3)
    assert places(whole(client, group="index")) == [("b", 3)]
    assert len(places(whole(client, group="another"))) == 14


def test_a_group_of_another_pattern_or_tenant_is_refused_in_the_shared_topic(client: Client, shared: Scribe) -> None:
    shared.create("a", 3)
    assert places(whole(client, "a*", group="index")) == [("a", at) for at in range(3)]
    with pytest.raises(Conflict, match=r"'a\*' of the tenant default"):
        whole(client, "*", group="index")
    with Client(shared.settings, tenant="acme") as theirs, pytest.raises(Conflict, match="the tenant default"):
        whole(theirs, "a*", group="index")
    assert whole(client, "a*", group="index") == []


def test_a_conversation_that_was_deleted_and_made_anew_begins_anew(client: Client, scribe: Scribe) -> None:
    scribe.create("a", 5)
    assert len(places(whole(client, group="index"))) == 5
    scribe.delete("a")
    scribe.create("a", 7)
    assert len(places(whole(client, group="index"))) == 7


def test_one_that_is_deleted_while_others_are_read_holds_up_nothing(client: Client, scribe: Scribe) -> None:
    scribe.create("a", 150)
    scribe.create("b", 2_000)
    scribe.create("c", 2)
    with closing(client.replay_conversations()) as batches:
        found = next(batches)
        scribe.delete("b")
        found += [record for batch in batches for record in batch]
    numbers = by_conversation(places(found))
    # In the shared topic some of them may stand among those that were read with the first batch.
    assert len(numbers.pop("b", [])) <= (0 if scribe.shared is None else replay_module.WINDOW_RECORDS)
    assert numbers == {"a": list(range(150)), "c": [0, 1]}


def test_what_is_erased_does_not_come_and_its_tombstone_does(
    client: Client, scribe: Scribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tombstone of `r1` stands in another window than the message, and that of `r30` comes during the replay."""
    monkeypatch.setattr(replay_module, "WINDOW_RECORDS", 10)
    monkeypatch.setattr(replay_module, "LOOK_RECORDS", 10)
    scribe.create("a", 40)
    scribe.erase("a", 1)
    with closing(client.replay_conversations(batch_records=10)) as batches:
        found = next(batches)
        assert [number for _, number in places(found)] == [0, *range(2, 10 if scribe.shared is None else 9)]
        scribe.erase("a", 30)
        found += [record for batch in batches for record in batch]
    tombstones = [record for record in found if record.message is None]
    assert [record.key for record in tombstones] == [conversation_message_key(scribe.message("a", 1))]
    assert found[-1] is tombstones[0]
    assert [number for _, number in places(found)] == [0, *range(2, 30), *range(31, 40)]


def test_what_was_erased_while_it_waited_is_read_again(own: Scribe) -> None:
    now = [0.0]
    replay = ConversationReplay(
        own.settings,
        default_codec(),
        ReplayTopics(own.settings, "default", "*", 10),
        {"batch_records": 2},
        clock=lambda: now[0],
    )
    own.create("a", 6)
    with closing(replay):
        assert [record.offset for record in replay.step() or ()] == [0, 1]
        replay.taken()
        own.erase("a", 3)
        now[0] += replay_module.STALE_S + 1
        assert [record.offset for record in replay.step() or ()] == [2, 4]


def test_a_rate_holds_over_conversations(own: Scribe) -> None:
    """On a clock of the test's own: 60 records at 20 a second."""
    now = [0.0]
    for conversation in "abc":
        own.create(conversation, 20)
    topics = ReplayTopics(own.settings, "default", "*", 10)
    replay = ConversationReplay(own.settings, default_codec(), topics, {"rate": 20}, clock=lambda: now[0])
    at: list[float] = []
    with closing(replay):
        while (records := replay.step()) is not None:
            at += [now[0]] * len(records)
            replay.taken()
            now[0] += replay.wait_s()
    assert len(at) == 60
    assert at[-1] == pytest.approx(2.0)
    assert max(sum(second <= one < second + 1 for one in at) for second in at) <= 20


def test_a_replay_that_is_given_up_while_it_reads_leaves_in_order(own: Scribe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread goes on after the task was cancelled: the consumer is closed behind it, and not under its hands."""
    own.create("a", 3)
    reads, may_read, order = threading.Event(), threading.Event(), list[str]()
    read, close = replay_module.read_with, ConversationReplay.close

    def slow(*args: Any, **options: Any) -> Any:
        reads.set()
        may_read.wait(30)
        found = read(*args, **options)
        order.append("read")
        return found

    def closing_last(replay: ConversationReplay) -> None:
        threading.Timer(0.1, may_read.set).start()
        close(replay)
        order.append("closed")

    monkeypatch.setattr(replay_module, "read_with", slow)
    monkeypatch.setattr(ConversationReplay, "close", closing_last)

    async def first(client: AsyncClient) -> None:
        async with aclosing(client.replay_conversations(group="index")) as batches:
            await anext(batches)

    async def give_up() -> None:
        async with AsyncClient(own.settings) as client:
            task = asyncio.create_task(first(client))
            assert await asyncio.to_thread(reads.wait, 30)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(give_up())
    assert order == ["read", "closed"]


def test_a_group_with_members_is_refused(client: Client, own: Scribe) -> None:
    own.create("a", 3)
    config = {"bootstrap.servers": own.settings.bootstrap_servers, "group.id": "theirs"}
    member = Consumer({**config, "auto.offset.reset": "earliest"})
    try:
        member.subscribe([own.settings.names.conversation("default", "a")])
        wait_until(lambda: member.poll(0.1), 30)
        with pytest.raises(Conflict, match="has members"):
            whole(client, group="theirs")
    finally:
        member.close()


def start(settings: KafkaSettings, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "penstock.cli.main", "conversations", "replay", "--pattern", "*", *options]
    place = ["-b", settings.bootstrap_servers, "--topic-prefix", settings.topic_prefix]
    return subprocess.Popen([*command, *place], stdout=subprocess.PIPE, text=True)


def lines(process: subprocess.Popen[str], count: int | None = None) -> list[Place]:
    """The places of the next so many messages that it prints, or of all to its end."""
    assert process.stdout is not None
    found: list[Place] = []
    while (count is None or len(found) < count) and (line := process.stdout.readline()).endswith("\n"):
        record = json.loads(line)
        if record["message"]["direction"] == "in":
            found.append(place_of(record["conversation_id"], record["message"]["content"]))
    return found


def test_killed_and_resumed_it_skips_nothing_also_of_what_came_meanwhile(scribe: Scribe) -> None:
    conversations = {f"c{number}": 60 for number in range(6)}
    for conversation, messages in conversations.items():
        scribe.create(conversation, messages)
    first = start(scribe.settings, "--group", "index", "--rate", "20")
    seen = lines(first, 20)
    names = scribe.settings.names
    asked = (
        [(names.conversation("default", "c0"), 0)]
        if scribe.shared is None
        else [(names.conversation_log, n) for n in range(scribe.shared)]
    )
    bootstrap = scribe.settings.bootstrap_servers
    wait_until(lambda: any(one.offset > 0 for one in committed_offsets(bootstrap, "index", asked)), 30)
    first.send_signal(signal.SIGKILL)
    seen += lines(first)  # what it had written
    first.wait(10)
    assert len(seen) < 360
    scribe.create("c00", 5)
    scribe.create("c0", 5, start=60)
    second = start(scribe.settings, "--group", "index")
    again = lines(second)
    assert second.wait(30) == 0
    everything = {(conversation, at) for conversation, count in conversations.items() for at in range(count)}
    everything |= {("c00", at) for at in range(5)} | {("c0", at) for at in range(60, 65)}
    assert set(seen) | set(again) == everything
    assert len(again) < len(everything), "it went on, and did not begin anew"
    for numbers in by_conversation(again).values():
        assert numbers == list(range(numbers[0], numbers[-1] + 1))


def test_a_follow_goes_on_with_new_records_and_new_conversations(
    client: Client, scribe: Scribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_module, "LIST_S", 0.5)
    scribe.create("a", 2)
    with closing(client.replay_conversations(follow=True)) as batches:
        come = (place for batch in batches for place in places(batch))
        assert list(islice(come, 2)) == [("a", 0), ("a", 1)]
        scribe.create("new", 1)
        assert next(come) == ("new", 0)
        scribe.create("a", 1, start=2)
        assert next(come) == ("a", 2)
        scribe.delete("new")
        scribe.create("new", 2)
        assert list(islice(come, 2)) == [("new", 0), ("new", 1)]
