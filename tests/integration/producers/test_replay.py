"""Replays of many conversations against a real broker: what comes, in which order, and what a kill leaves."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing, closing
from dataclasses import dataclass, field
from typing import Any

import pytest
from confluent_kafka import Consumer

from penstock.common import admin
from penstock.common.transport import Transport
from penstock.producers import AsyncClient, Client, Conflict, KafkaSettings, ReplayedRecord
from penstock.producers import replay as replay_module
from penstock.producers.replay import ConversationReplay
from penstock.producers.replay_topics import ReplayTopics
from penstock.schemas.codec import default_codec
from penstock.schemas.records import ConversationMessage, conversation_message_key
from support import committed_offsets, create_topics, wait_until

Place = tuple[str, int]


@dataclass
class Scribe:
    """Writes conversations as a worker does."""

    settings: KafkaSettings
    transport: Transport = field(init=False)

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
        admin.create_conversation_topic(self.settings, topic)
        for number in range(start, start + messages):
            made = self.message(conversation, number, tenant)
            self.transport.send(topic, default_codec().encode(made), key=conversation_message_key(made).encode())
        assert self.transport.flush(10) == 0

    def erase(self, conversation: str, number: int) -> None:
        topic = self.settings.names.conversation("default", conversation)
        key = conversation_message_key(self.message(conversation, number)).encode()
        self.transport.send(topic, None, key=key)
        assert self.transport.flush(10) == 0


@pytest.fixture
def scribe(settings: KafkaSettings) -> Iterator[Scribe]:
    made = Scribe(settings)
    yield made
    made.transport.close()


@pytest.fixture
def client(settings: KafkaSettings) -> Iterator[Client]:
    with Client(settings) as made:
        yield made


def places(records: list[ReplayedRecord]) -> list[Place]:
    return [(record.conversation_id, record.offset) for record in records]


def whole(client: Client, pattern: str = "*", **options: Any) -> list[ReplayedRecord]:
    return [record for batch in client.replay_conversations(pattern, **options) for record in batch]


def test_conversations_that_share_a_topic_are_not_passed_over_in_silence(kafka: Any, kafka_prefix: str) -> None:
    create_topics(kafka.bootstrap_servers, kafka_prefix, partitions=1, sharded=True)
    shared = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers, topic_prefix=kafka_prefix)
    with Client(shared) as client, pytest.raises(Conflict, match="replay them one by one"):
        list(client.replay_conversations("*"))


def test_conversations_of_a_pattern_come_whole_in_order_and_no_others(client: Client, scribe: Scribe) -> None:
    for conversation, messages in (("trip-2", 3), ("trip-1", 250), ("other", 2), ("trip-0", 0)):
        scribe.create(conversation, messages)
    scribe.create("trip-1", 4, tenant="acme")
    expected = [("trip-1", at) for at in range(250)] + [("trip-2", at) for at in range(3)]
    batches = list(client.replay_conversations("trip-*", batch_records=100))
    assert [places(batch) for batch in batches] == [
        expected[:100],
        expected[100:200],
        expected[200:250],
        expected[250:],
    ]
    assert batches[0][7].message == scribe.message("trip-1", 7)
    with Client(scribe.settings, tenant="acme") as theirs:
        assert places(whole(theirs)) == [("trip-1", at) for at in range(4)]

    async def the_same() -> list[Place]:
        async with AsyncClient(scribe.settings) as waiting, aclosing(waiting.replay_conversations("trip-*")) as found:
            return [place async for batch in found for place in places(batch)]

    assert asyncio.run(the_same()) == expected


def test_it_begins_at_an_offset_or_a_time(client: Client, scribe: Scribe) -> None:
    scribe.create("a", 4)
    scribe.create("b", 2)
    assert places(whole(client, from_offset=3)) == [("a", 3)]
    newest = client.replay("b")[-1].timestamp_ms
    wait_until(lambda: time.time_ns() // 1_000_000 > newest)
    since_ms = newest + 1
    scribe.create("a", 1, start=4)
    assert places(whole(client, since_ms=since_ms)) == [("a", 4)]


def test_a_group_goes_on_behind_what_was_taken(client: Client, scribe: Scribe) -> None:
    scribe.create("a", 10)
    scribe.create("b", 3)
    with closing(client.replay_conversations(group="index", batch_records=4)) as batches:
        assert places(next(batches)) == [("a", at) for at in range(4)]
        assert places(next(batches)) == [("a", at) for at in range(4, 8)]  # this one is not dealt with
    rest = [("a", at) for at in range(4, 10)] + [("b", at) for at in range(3)]
    assert places(whole(client, group="index", from_offset=0)) == rest
    assert whole(client, group="index") == []
    assert len(whole(client, group="another")) == 13
    scribe.create("b", 1, start=3)
    assert places(whole(client, group="index")) == [("b", 3)]


def test_a_conversation_that_was_deleted_and_made_anew_begins_anew(client: Client, scribe: Scribe) -> None:
    scribe.create("a", 5)
    assert len(whole(client, group="index")) == 5
    topic = scribe.settings.names.conversation("default", "a")
    first = admin.topic_id(scribe.settings, topic)
    admin.delete_topic(scribe.settings, topic)
    wait_until(lambda: admin.topic_id(scribe.settings, topic) is None)
    scribe.create("a", 7)
    assert admin.topic_id(scribe.settings, topic) != first
    assert len(whole(client, group="index")) == 7


def test_one_that_is_deleted_while_others_are_read_holds_up_nothing(client: Client, scribe: Scribe) -> None:
    scribe.create("a", 150)
    scribe.create("b", 2_000)
    scribe.create("c", 2)
    with closing(client.replay_conversations()) as batches:
        found = next(batches)
        topic = scribe.settings.names.conversation("default", "b")
        admin.delete_topic(scribe.settings, topic)
        wait_until(lambda: admin.topic_id(scribe.settings, topic) is None)
        found += [record for batch in batches for record in batch]
    assert places(found) == [("a", at) for at in range(150)] + [("c", 0), ("c", 1)]


def test_what_is_erased_does_not_come_and_its_tombstone_does(
    client: Client, scribe: Scribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tombstone of `r1` stands in another window than the message, and that of `r30` comes during the replay."""
    monkeypatch.setattr(replay_module, "WINDOW_RECORDS", 10)
    scribe.create("a", 40)
    scribe.erase("a", 1)
    with closing(client.replay_conversations(batch_records=10)) as batches:
        found = next(batches)
        assert [record.offset for record in found] == [0, *range(2, 10)]
        scribe.erase("a", 30)
        found += [record for batch in batches for record in batch]
    tombstones = [record for record in found if record.message is None]
    assert [record.offset for record in tombstones] == [40]
    assert tombstones[0].key == conversation_message_key(scribe.message("a", 1))
    assert [record.offset for record in found] == [0, *range(2, 30), *range(31, 41)]


def test_what_was_erased_while_it_waited_is_read_again(scribe: Scribe) -> None:
    now = [0.0]
    replay = ConversationReplay(
        scribe.settings,
        default_codec(),
        ReplayTopics(scribe.settings, "default", "*", 10),
        {"batch_records": 2},
        clock=lambda: now[0],
    )
    scribe.create("a", 6)
    with closing(replay):
        assert [record.offset for record in replay.step() or ()] == [0, 1]
        replay.taken()
        scribe.erase("a", 3)
        now[0] += replay_module.STALE_S + 1
        assert [record.offset for record in replay.step() or ()] == [2, 4]


def test_a_rate_holds_over_conversations(scribe: Scribe) -> None:
    """On a clock of the test's own: 60 records at 20 a second."""
    now = [0.0]
    for conversation in "abc":
        scribe.create(conversation, 20)
    topics = ReplayTopics(scribe.settings, "default", "*", 10)
    replay = ConversationReplay(scribe.settings, default_codec(), topics, {"rate": 20}, clock=lambda: now[0])
    at: list[float] = []
    with closing(replay):
        while (records := replay.step()) is not None:
            at += [now[0]] * len(records)
            replay.taken()
            now[0] += replay.wait_s()
    assert len(at) == 60
    assert at[-1] == pytest.approx(2.0)
    assert max(sum(second <= one < second + 1 for one in at) for second in at) <= 20


def test_a_replay_that_is_given_up_while_it_reads_leaves_in_order(
    scribe: Scribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread goes on after the task was cancelled: the consumer is closed behind it, and not under its hands."""
    scribe.create("a", 3)
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
        async with AsyncClient(scribe.settings) as client:
            task = asyncio.create_task(first(client))
            assert await asyncio.to_thread(reads.wait, 30)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(give_up())
    assert order == ["read", "closed"]


def test_a_group_with_members_is_refused(client: Client, scribe: Scribe) -> None:
    scribe.create("a", 3)
    config = {"bootstrap.servers": scribe.settings.bootstrap_servers, "group.id": "theirs"}
    member = Consumer({**config, "auto.offset.reset": "earliest"})
    try:
        member.subscribe([scribe.settings.names.conversation("default", "a")])
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
    """The places of the next so many records that it prints, or of all to its end."""
    assert process.stdout is not None
    found: list[Place] = []
    while (count is None or len(found) < count) and (line := process.stdout.readline()).endswith("\n"):
        record = json.loads(line)
        found.append((record["conversation_id"], record["offset"]))
    return found


def test_killed_and_resumed_it_skips_nothing_also_of_what_came_meanwhile(scribe: Scribe) -> None:
    conversations = {f"c{number}": 60 for number in range(6)}
    for conversation, messages in conversations.items():
        scribe.create(conversation, messages)
    first = start(scribe.settings, "--group", "index", "--rate", "20")
    seen = lines(first, 20)
    place = (scribe.settings.names.conversation("default", "c0"), 0)
    bootstrap = scribe.settings.bootstrap_servers
    wait_until(lambda: committed_offsets(bootstrap, "index", [place])[0].offset > 0, 30)
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
    for conversation in {one for one, _ in again}:
        offsets = [at for one, at in again if one == conversation]
        assert offsets == list(range(offsets[0], offsets[-1] + 1))


def test_a_follow_goes_on_with_new_records_and_new_conversations(
    client: Client, scribe: Scribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_module, "LIST_S", 0.5)
    scribe.create("a", 2)
    with closing(client.replay_conversations(follow=True)) as batches:
        assert places(next(batches)) == [("a", 0), ("a", 1)]
        scribe.create("new", 1)
        assert places(next(batches)) == [("new", 0)]
        scribe.create("a", 1, start=2)
        assert places(next(batches)) == [("a", 2)]
        topic = scribe.settings.names.conversation("default", "new")
        admin.delete_topic(scribe.settings, topic)
        wait_until(lambda: admin.topic_id(scribe.settings, topic) is None)
        scribe.create("new", 2)
        assert places(next(batches)) == [("new", 0), ("new", 1)]
