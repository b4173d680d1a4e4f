"""A copy of the shared topic on a real broker: what was acknowledged is in it, whatever became of it before."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewPartitions

from penstock.common.admin import create_conversation_topic, delete_topic, ensure_topics, partition_counts
from penstock.common.reader import RawMessage
from penstock.common.settings import KafkaSettings
from penstock.common.shards import shard_copy
from penstock.common.shards.addresses import Address, address_of
from penstock.common.shards.sending import send_and_wait
from penstock.common.shards.shard_copy import STALE_MS, ShardCopy
from penstock.common.transport import Transport
from penstock.schemas.errors import BrokerUnavailable, Conflict, InternalError, NotFound
from penstock.schemas.topics import topic_specs
from support import wait_until

PARTITIONS = 2


class Place:
    """A shared topic, and who writes to it."""

    def __init__(self, settings: KafkaSettings, folder: Path) -> None:
        self.settings, self.folder = settings, folder
        self.create()
        self.transport = Transport(settings)
        self.now_ms = 1_000_000_000
        self.copies: list[ShardCopy] = []

    def create(self) -> None:
        names = self.settings.names
        specs = topic_specs(names, partitions=PARTITIONS, shared_conversations=True)
        # By the result topic it is known that the broker knows its topics.
        ensure_topics(self.settings, [one for one in specs if one.name in (names.conversation_log, names.result)])

    def copy(self) -> ShardCopy:
        made = ShardCopy(self.settings, self.folder / "copy", clock_ms=lambda: self.now_ms)
        self.copies.append(made)
        return made

    def address(self, conversation: str) -> Address:
        names = self.settings.names
        return address_of(names, names.conversation("default", conversation), PARTITIONS)

    def write(self, conversation: str, *records: tuple[bytes, bytes | None]) -> list[int]:
        topic = self.settings.names.conversation_log
        return send_and_wait(self.transport, topic, self.address(conversation), records, 20)

    def close(self) -> None:
        for one in self.copies:
            one.close()
        self.transport.close()


@pytest.fixture
def place(kafka: Any, kafka_prefix: str, tmp_path: Path) -> Iterator[Place]:
    made = Place(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers, topic_prefix=kafka_prefix), tmp_path)
    yield made
    made.close()


def keys(copy: ShardCopy, place: Place, conversation: str) -> list[bytes]:
    file = copy.refresh([place.address(conversation).partition])
    return [key for _, _, key, _ in file.records(conversation, 0)]


def counted(copy: ShardCopy) -> Callable[[], int]:
    """How many records were taken since."""
    taken: list[RawMessage] = []
    copy.on_records = taken.extend
    return lambda: len(taken)


def test_what_was_acknowledged_is_read_and_a_new_process_goes_on(place: Place) -> None:
    first = place.copy()
    place.write("a", (b"fork/1", b"head"))
    for number in range(50):
        place.write("a", (b"%d" % number, b"text"))
        assert len(keys(first, place, "a")) == number + 2
    first.close()
    place.copies.clear()
    place.write("a", (b"7", None), (b"more", b"text"))
    second = place.copy()
    taken = counted(second)
    assert [key for key in keys(second, place, "a") if key in (b"7", b"more")] == [b"7", b"more"]
    assert taken() == 2, "the file had all else"


def test_a_copy_that_may_lack_tombstones_is_made_anew(place: Place) -> None:
    first = place.copy()
    place.write("a", (b"fork/1", b"head"), (b"1", b"text"))
    assert len(keys(first, place, "a")) == 2
    first.close()
    place.copies.clear()
    place.now_ms += STALE_MS + 1
    second = place.copy()
    taken = counted(second)
    assert len(keys(second, place, "a")) == 2
    assert taken() == 2, "all of it was read again"
    # The process lives, and heard nothing for as long.
    place.now_ms += STALE_MS + 1
    place.write("a", (b"2", b"text"))
    # The record shows it, and comes once more with all; or a look at the topic did before the record came.
    wait_until(lambda: taken() in (2 + 1 + 3, 2 + 3), 20, lambda: str(taken()))
    assert keys(second, place, "a") == [b"fork/1", b"1", b"2"]
    before = taken()
    place.write("a", (b"3", b"text"))
    assert len(keys(second, place, "a")) == 4
    assert taken() == before + 1, "it is followed again"


def test_what_is_idle_is_followed_while_others_are_never(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_copy, "TOUCH_S", 0.1)
    copy = place.copy()
    idle = next(name for name in "bcdefgh" if place.address(name).partition != place.address("a").partition)
    for name in ("a", idle):
        place.write(name, (b"fork/1", b"head"))
        assert len(keys(copy, place, name)) == 1
    monkeypatch.setattr(copy._reader, "_on_idle", lambda: None)
    place.now_ms += 1_000
    for number in range(500):
        place.write("a", (b"%d" % number, b"text"))
        keys(copy, place, "a")
        if copy.file.positions()[place.address(idle).partition].followed_ms == place.now_ms:
            return
    pytest.fail("a partition without records is taken for one that is not followed")


def test_a_full_disk_is_told_and_waited_for(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_copy, "RETRY_S", 0.05)
    copy = place.copy()
    place.write("a", (b"fork/1", b"head"))
    assert len(keys(copy, place, "a")) == 1
    apply = copy.file.apply

    def refuse(*_: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(copy.file, "apply", refuse)
    place.write("a", (b"1", b"text"))
    with pytest.raises(BrokerUnavailable, match="database or disk is full"):
        copy.refresh([place.address("a").partition], 1)
    assert copy.trouble == "database or disk is full"
    monkeypatch.setattr(copy.file, "apply", apply)
    assert keys(copy, place, "a") == [b"fork/1", b"1"]
    assert copy.trouble is None


def test_a_topic_that_is_gone_or_made_anew(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_copy, "TOUCH_S", 0.1)
    copy = place.copy()
    place.write("a", (b"fork/1", b"head"))
    assert len(keys(copy, place, "a")) == 1
    topic = place.settings.names.conversation_log
    delete_topic(place.settings, topic)
    wait_until(lambda: _made(place), 20, "the topic is not made again", promised=True)
    refused: list[str] = []

    def is_refused() -> bool:
        try:
            copy.refresh([place.address("a").partition], 1)
        except (BrokerUnavailable, NotFound) as error:
            refused.append(str(error))
        return bool(refused) and "made anew: start this process again" in refused[-1]

    wait_until(is_refused, 30, lambda: str(refused))
    assert "made anew" in (copy.trouble or "")
    copy.close()
    place.copies.clear()
    place.write("a", (b"fork/9", b"head"))
    assert keys(place.copy(), place, "a") == [b"fork/9"]


def test_partitions_that_are_added_stay_unused(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shard_copy, "TOUCH_S", 0.05)
    ids = [f"c{number}" for number in range(20)]
    for one in ids:
        place.write(one, (b"fork/1", b"head"))
    copy = place.copy()
    copy.refresh_all()
    add_partitions(place, 6)
    wait_until(lambda: "partitions_added count=6 used=2" in caplog.text, 20, lambda: caplog.text)
    assert all(keys(copy, place, one) == [b"fork/1"] for one in ids)
    assert copy.trouble is None
    copy.close()
    place.copies.clear()
    anew = place.copy()
    assert anew.partitions == PARTITIONS
    assert all(keys(anew, place, one) == [b"fork/1"] for one in ids)


def test_a_topic_without_conversations_uses_all_partitions_after_a_restart(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_copy, "TOUCH_S", 0.05)
    copy = place.copy()
    copy.refresh_all()
    add_partitions(place, 6)
    wait_until(lambda: copy.trouble, 20, "the copy goes on as before")
    assert "has 6 partitions now, and had 2: start this process again" in (copy.trouble or "")
    with pytest.raises(BrokerUnavailable, match="start this process again"):
        copy.refresh([0])
    copy.close()
    place.copies.clear()
    assert place.copy().partitions == 6


def test_a_broker_that_knows_no_topics_yet_has_not_made_it_anew(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_copy, "TOUCH_S", 0.05)
    copy = place.copy()
    place.write("a", (b"fork/1", b"head"))
    assert len(keys(copy, place, "a")) == 1
    asked: list[str] = []

    def unknown(_: KafkaSettings, topic: str) -> None:
        asked.append(topic)

    monkeypatch.setattr(shard_copy.admin, "topic_id", unknown)
    wait_until(lambda: len(asked) >= 2, 20, lambda: str(asked))
    assert len(keys(copy, place, "a")) == 1


def add_partitions(place: Place, count: int) -> None:
    topic = place.settings.names.conversation_log
    client = AdminClient(place.settings.librdkafka())
    client.create_partitions([NewPartitions(topic, count)])[topic].result(20)
    wait_until(lambda: partition_counts(place.settings, [topic])[topic] == count, 20, "the partitions are added")


def _made(place: Place) -> bool:
    try:
        place.create()
        place.write("b", (b"fork/2", b"head"))
    except Exception:  # its deletion takes a moment
        return False
    return True


def test_a_process_that_began_before_conversations_shared_a_topic_makes_no_topic_of_its_own(place: Place) -> None:
    topic = place.settings.names.conversation("default", "late")
    with pytest.raises(Conflict, match="start it again"):
        create_conversation_topic(place.settings, topic)
    assert topic not in partition_counts(place.settings)


def test_a_reading_that_has_ended_is_told_to_whoever_can_end_the_process(place: Place) -> None:
    copy, told = place.copy(), list[str]()
    copy.on_failure = told.append

    def fail(_: Any) -> None:
        raise RuntimeError("broken")

    copy.on_records = fail
    place.write("a", (b"fork/1", b"head"))
    with suppress(InternalError):
        copy.refresh([place.address("a").partition])
    wait_until(lambda: copy.failure is not None, 20, "it reads on")
    with pytest.raises(InternalError):
        copy.refresh([place.address("a").partition], 1)
    assert told
    assert "broken" in told[0]
