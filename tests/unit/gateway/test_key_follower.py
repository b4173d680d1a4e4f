"""The follower of the topic of keys, over a reader that a test drives."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock

import pytest

from penstock.common.reader import RawMessage
from penstock.gateway.access import key_follower
from penstock.gateway.access.key_follower import KeyFollower
from penstock.gateway.edge.key_book import KeyBook
from penstock.gateway.edge.key_records import new_key
from penstock.schemas.errors import BadAvro, BrokerUnavailable, InternalError, RegistryUnavailable
from penstock.schemas.records import KeyState
from penstock.schemas.topics import TopicNames


class Topic:
    """The topic, the readers of it, and what fails: it takes the place of the modules that ask Kafka."""

    names = TopicNames()

    def __init__(self) -> None:
        self.id: str | None = "first"
        self.records: list[RawMessage] = []
        self.failing: BaseException | None = None
        self.readers: list[Reader] = []
        self.may_decode: Callable[[str], Any] = lambda text: None

    def put(self, key: str, entry: Any = None, *, tombstone: bool = False) -> None:
        value = None if tombstone else json.dumps(entry).encode()
        message = RawMessage("keys", 0, len(self.records), 1, key.encode(), value)
        self.records.append(message)
        for reader in self.readers[-1:]:
            reader.on_batch([message])

    # -- as `admin`

    def topic_id(self, *_: Any) -> str | None:
        return self.id

    def begin_offsets(self, *_: Any) -> dict[Any, int]:
        if self.failing is not None:
            raise self.failing
        return {}

    # -- as a codec

    def decode(self, value: bytes, _: type) -> KeyState:
        self.may_decode(value.decode())
        return KeyState(kind="", id="", updated_at=1, entry=value.decode())


class Reader:
    def __init__(self, topic: Topic, on_batch: Callable[[Sequence[RawMessage]], None]) -> None:
        self._topic, self.on_batch = topic, on_batch
        self.failure: BaseException | None = None
        self.behind: BaseException | None = None
        self.rights: Any = type("Rights", (), {"reason": None})()
        self.stopped = False
        topic.readers.append(self)

    def start(self) -> None:
        if self._topic.records:
            self.on_batch(self._topic.records)

    def stop(self) -> None:
        self.stopped = True

    def wait_until_caught_up(self, _: float) -> None:
        if self.failure is not None:
            raise InternalError(f"the reader has ended: {self.failure}")
        if self.behind is not None:
            raise self.behind


@pytest.fixture
def topic(monkeypatch: pytest.MonkeyPatch) -> Topic:
    made = Topic()
    monkeypatch.setattr(key_follower, "admin", made)
    monkeypatch.setattr(key_follower, "PartitionReader", lambda _, begin, on_batch, name: Reader(made, on_batch))
    monkeypatch.setattr(key_follower, "REGISTRY_S", 0.0)
    return made


def entry() -> dict[str, Any]:
    return new_key(1, tenant="acme")[0].to_dict()


async def followed(topic: Topic) -> tuple[KeyFollower, KeyBook]:
    kafka: Any = topic
    codec: Any = topic
    book = KeyBook(unread="not yet")
    return KeyFollower(kafka, codec, book), book


async def test_keys_stay_in_force_while_the_topic_is_read_again(topic: Topic) -> None:
    """Its reader ends, and at the next probe the broker is away."""
    follower, book = await followed(topic)
    told: list[Any] = []
    book.on_limits = lambda tenant, limits: told.append((tenant, limits))
    topic.put("key/a", entry())
    topic.put("tenant/acme", {"outstanding": 1})
    assert await follower.look() is None
    assert book.get("a") is not None

    topic.readers[-1].failure = ValueError("odd")
    topic.failing = BrokerUnavailable("away", retry_after_s=1)
    for _ in range(2):
        assert (await follower.look()).cause == "away"
        assert book.get("a") is not None
        with pytest.raises(BrokerUnavailable, match="away"):
            await follower.catch_up()
    assert topic.readers[0].stopped

    topic.failing = None
    topic.put("key/b", entry())
    assert await follower.look() is None
    assert book.get("b") is not None
    assert told == [("acme", {"outstanding": 1})] * 2, "the limits held all the time"


async def test_another_topic_counts_once_it_is_read_and_a_revocation_at_once(topic: Topic) -> None:
    follower, book = await followed(topic)
    topic.put("key/a", entry())
    topic.put("key/b", entry())
    await follower.look()
    topic.id, topic.records = "second", []
    readers = len(topic.readers)
    slow = BrokerUnavailable("not read to its end", retry_after_s=1)

    def late(_: Any, begin: Any, on_batch: Any, name: str) -> Reader:
        reader = Reader(topic, on_batch)
        reader.behind = slow
        return reader

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_follower, "PartitionReader", late)
        assert await follower.look() is not None
    topic.put("revoked/a", {})
    topic.put("key/c", entry())
    assert await follower.look() is not None
    assert [book.keys.keys(), len(topic.readers)] == [{"b"}, readers + 1], "the same reading goes on"
    topic.readers[-1].behind = None
    assert await follower.look() is None
    assert book.keys.keys() == {"c"}


async def test_a_reader_that_gets_nothing_more_is_a_problem(topic: Topic) -> None:
    follower, _ = await followed(topic)
    assert await follower.look() is None
    reader = topic.readers[-1]
    reader.behind = BrokerUnavailable("not read to its end", retry_after_s=1)
    assert await follower.look() is not None
    reader.behind, reader.rights.reason = None, "grant READ"
    assert (await follower.look()).cause == "grant READ"


async def test_a_record_that_cannot_be_decoded_ends_the_rights_that_it_replaces(topic: Topic) -> None:
    follower, book = await followed(topic)
    await follower.look()
    topic.put("key/a", entry())
    topic.may_decode = Mock(side_effect=BadAvro("odd"))
    topic.put("key/a", entry())
    topic.put("key/b", entry())
    topic.put("revoked/c", "not even read")
    await follower.look()
    assert (book.get("a"), book.get("b"), book.is_revoked("c")) == (None, None, True)


async def test_without_the_registry_revocations_arrive_and_the_rest_is_read_later(topic: Topic) -> None:
    follower, book = await followed(topic)
    topic.put("key/a", entry())
    topic.put("key/b", entry())
    await follower.look()
    topic.may_decode = Mock(side_effect=RegistryUnavailable("no registry", retry_after_s=1))
    topic.put("key/c", entry())
    topic.put("revoked/a", {})
    for _ in range(2):
        assert (await follower.look()).cause == "no registry"
        assert book.keys.keys() == {"b"}
    fresh, unread = await followed(topic)
    await fresh.look()
    with pytest.raises(BrokerUnavailable, match="not yet"):
        unread.get("b")
    topic.may_decode = lambda text: None
    assert await follower.look() is None
    assert book.keys.keys() == {"b", "c"}


async def test_a_topic_that_is_missing_has_no_keys_until_it_is_there(topic: Topic) -> None:
    follower, book = await followed(topic)
    topic.id = None
    assert await follower.look() is not None
    assert book.get("a") is None
    with pytest.raises(BrokerUnavailable, match="penstock topics create"):
        await follower.catch_up()
    topic.id = "first"
    topic.put("key/a", entry())
    assert await follower.look() is None
    assert book.get("a") is not None
