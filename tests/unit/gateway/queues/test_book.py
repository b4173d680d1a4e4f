"""Queues: the book with its order and window, merge policies, messages in and answers out."""

from __future__ import annotations

import base64
import json
from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from kit.examples import examples
from kit.records import request
from penstock.gateway.bridge.settings import BridgeSettings
from penstock.gateway.queues.book import QueueBook, QueueMessage
from penstock.gateway.queues.formats import BadMessage, answered, read_llmd, read_penstock, refused, request_key
from penstock.gateway.queues.merge import Merge
from penstock.gateway.queues.settings import QueueSection
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import BadJson, DecodeError, Expired, InvalidRequest, PenstockError
from penstock.schemas.records import InferenceRequest

A, B = ("a", 0), ("b", 0)


def book(window: int = 2, policy: Any = "strict", partitions: tuple[Any, ...] = (A, B)) -> QueueBook:
    made = QueueBook(Merge(policy, [1, 1], Random(7)), 2, window)
    made.offsets.assign(partitions)
    return made


def message(queue: int, offset: int, pool: str | None = None) -> QueueMessage:
    return QueueMessage(queue=queue, tp=(A, B)[queue], offset=offset, value=None, pool=pool)


def test_no_more_goes_out_than_the_window_of_its_pool_and_a_queue_is_full_at_twice_the_window() -> None:
    made = book(window=2)
    for offset in range(1, 5):
        assert made.full() == set()
        assert made.arrived(message(0, offset))
        made.arrived(message(1, min(offset, 3), "other"))
    assert made.full() == {0}
    for repeat in (4, 0):
        assert not made.arrived(message(0, repeat)), "behind what was read"
    assert [(one.queue, one.offset) for one in made.take(0)] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert made.take(0) == []
    assert made.full() == set()


def test_a_new_try_waits_for_its_time_holds_its_offset_and_leaves_its_place_to_others() -> None:
    made = book(window=1)
    first, second = message(0, 0), message(0, 1)
    for one in (first, second):
        made.arrived(one)
    assert made.take(0) == [first]
    made.again(first, 0.5, tried=False)
    assert first.tries == 0, "a refusal is no try"
    assert made.take(1) == [first]
    made.again(first, 5.0, tried=True)
    assert first.tries == 1
    assert made.take(1) == [second]
    assert made.next_time() == 5.0
    assert made.take(6) == [], "the window is full"
    made.settled(second)
    assert made.offsets.commits() == {A: 0}
    assert made.take(6) == [first]
    made.settled(first)
    assert made.offsets.commits() == {A: 2}


class Books(RuleBasedStateMachine):
    """Messages that come, go out, end, fail and change hands in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.book = book(window=3, policy="weighted")
        self.owned = {A, B}
        self.next = {A: 0, B: 0}
        self.read = {A: 0, B: 0}
        """By partition, the offset after the newest message."""
        self.done: set[tuple[Any, int]] = set()
        self.committed = {A: 0, B: 0}
        self.out: list[QueueMessage] = []
        self.now = 0.0

    @rule(queue=st.sampled_from([0, 1]), gap=st.integers(1, 3))
    def arrive(self, queue: int, gap: int) -> None:
        tp = (A, B)[queue]
        one = message(queue, self.next[tp])
        assert self.book.arrived(one) == (tp in self.owned)
        if tp in self.owned:
            self.done.discard((tp, one.offset))  # it may come a second time
            self.read[tp] = one.offset + 1
            for skipped in range(1, gap):
                self.done.add((tp, self.next[tp] + skipped))
            self.next[tp] += gap

    @rule(seconds=st.floats(0, 3))
    def take(self, seconds: float) -> None:
        self.now += seconds
        self.out += self.book.take(self.now)
        assert len(self.out) <= 3

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        one = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
        self.book.settled(one)
        if one.taken:  # what was revoked meanwhile ends without a trace: it may have come again, and be open
            self.done.add((one.tp, one.offset))

    @precondition(lambda self: self.out)
    @rule(data=st.data(), wait=st.floats(0, 5))
    def fail(self, data: st.DataObject, wait: float) -> None:
        one = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
        self.book.again(one, self.now + wait, tried=True)

    @rule(tp=st.sampled_from([A, B]))
    def lose(self, tp: Any) -> None:
        self.book.revoke([tp])
        self.owned.discard(tp)

    @rule(tp=st.sampled_from([A, B]))
    def gain(self, tp: Any) -> None:
        if tp not in self.owned:
            self.book.offsets.assign([tp])
            self.owned.add(tp)
            self.next[tp] = self.read[tp] = self.committed[tp]

    @rule()
    def commit(self) -> None:
        """Of each partition as far as all is done: no record before it is open, and nothing is committed late."""
        for tp, offset in self.book.offsets.commits().items():
            assert tp in self.owned
            for before in range(self.committed[tp], offset):
                assert (tp, before) in self.done, f"{before} of {tp} is not done"
            self.committed[tp] = max(self.committed[tp], offset)
        for tp in self.owned:
            at = self.committed[tp]
            assert at >= self.read[tp] or (tp, at) not in self.done, f"{at} of {tp} is done"

    def teardown(self) -> None:
        """All that is ours comes to its end."""
        for _ in range(1000):
            self.now += 10
            self.out += self.book.take(self.now)
            if not self.out:
                break
            for one in self.out:
                self.book.settled(one)
                self.done.add((one.tp, one.offset))
            self.out = []
        self.commit()
        assert all(self.committed[tp] >= self.read[tp] for tp in self.owned), "all that was read is committed"
        assert self.book.next_time() is None


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


# -- the merge policies


POLICIES: list[Any] = ["strict", "weighted", "round_robin", "random"]


def drawn(policy: Any, weights: list[int], count: int, ready: set[int] | None = None) -> list[int]:
    merge = Merge(policy, weights, Random(7))
    return [merge.next(ready or set(range(len(weights)))) for _ in range(count)]


@pytest.mark.parametrize(
    ("policy", "weights", "ready", "chosen"),
    [
        ("strict", [1, 1, 1], {0, 1, 2}, [0, 0, 0]),
        ("strict", [1, 1, 1], {2, 1}, [1, 1, 1]),
        ("round_robin", [1, 9, 1], {0, 1, 2}, [0, 1, 2, 0, 1, 2]),
        ("round_robin", [1, 9, 1], {0, 2}, [0, 2, 0, 2]),
        ("weighted", [5, 1, 1], {0, 1, 2}, [0, 0, 1, 0, 2, 0, 0]),
    ],
)
def test_the_order_of_a_policy(policy: Any, weights: list[int], ready: set[int], chosen: list[int]) -> None:
    assert drawn(policy, weights, len(chosen), ready) == chosen


def test_an_empty_queue_does_not_catch_up_later_and_random_is_in_proportion() -> None:
    merge = Merge("weighted", [1, 1], Random(7))
    for _ in range(100):
        merge.next({0})
    assert Counter(merge.next({0, 1}) for _ in range(100)) == {0: 50, 1: 50}
    assert 2800 < Counter(drawn("random", [3, 1], 4000))[0] < 3200


@given(policy=st.sampled_from(POLICIES), weights=st.lists(st.integers(1, 20), min_size=1, max_size=6), data=st.data())
def test_only_ready_queues_are_chosen(policy: Any, weights: list[int], data: st.DataObject) -> None:
    merge = Merge(policy, weights, Random(7))
    for ready in data.draw(st.lists(st.sets(st.integers(0, len(weights) - 1), min_size=1), max_size=30)):
        assert merge.next(ready) in ready
    with pytest.raises(ValueError, match="ready"):
        merge.next([])


@given(weights=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_no_weighted_queue_waits_longer_than_the_sum_of_weights(weights: list[int]) -> None:
    chosen = drawn("weighted", weights, 3 * sum(weights))
    for queue, weight in enumerate(weights):
        assert chosen.count(queue) == 3 * weight


# -- messages of queues in, answers out


BODY = {"model": "m", "prompt": "hi", "max_tokens": 3}
QUEUE = QueueSection(topic="jobs", tenant="team")


def llmd(**values: Any) -> bytes:
    return json.dumps({"id": "1", "deadline": "1764045130", "payload": BODY, **values}).encode()


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"payload": {"messages": []}}, "kind", "chat"),
        ({"payload": {"prompt": ""}}, "kind", "completion"),
        ({"payload": {"input": ""}}, "kind", "embedding"),
        ({"deadline": 1764045130}, "deadline_s", 1764045130),
        ({"deadline": "1764045130"}, "deadline_s", 1764045130),
        ({"deadline": 1764045130.9}, "deadline_s", 1764045130),
        ({"deadline": None}, "deadline_s", None),
        ({"deadline": ""}, "deadline_s", None),
        ({"deadline": 1764045130000}, "deadline_s", 1764045130),
        ({"deadline": "2025-11-25T04:32:10Z"}, "deadline_s", 1764045130),
        ({"deadline": "9" * 30}, "deadline_s", 10**11),
    ],
)
def test_what_a_message_says(change: Any, field: str, value: Any) -> None:
    assert getattr(read_llmd(llmd(**change)), field) == value


@pytest.mark.parametrize(
    ("payload", "form"),
    [(BODY, "object"), (json.dumps(BODY), "text"), (base64.b64encode(json.dumps(BODY).encode()).decode(), "base64")],
)
def test_a_payload_in_any_form_is_answered_in_the_same(payload: Any, form: str) -> None:
    found = read_llmd(llmd(payload=payload))
    assert (found.id, found.kind, found.form, found.body) == ("1", "completion", form, BODY)
    answer = json.loads(answered("1", found.form, {"a": "é"}))
    back = answer["payload"]
    if form == "base64":
        back = base64.b64decode(back).decode()
    assert (answer["id"], json.loads(back) if form != "object" else back) == ("1", {"a": "é"})
    assert json.loads(refused("1", Expired("deadline exceeded"))) == {"id": "1", "error": "deadline exceeded"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"payload": None}, "payload must be a JSON object"),
        ({"payload": "no base64"}, "payload must be a JSON object"),
        ({"payload": {"messages": [], "prompt": ""}}, "one of messages, prompt and input"),
        ({"payload": {}}, "one of messages, prompt and input"),
        ({"payload": {"prompt": "x", "stream": True}}, "stream is not supported"),
        ({"deadline": "soon"}, "Unix seconds"),
        ({"deadline": True}, "Unix seconds"),
        ({"deadline": 1e400}, "Unix seconds"),
        ({"payload": {"prompt": "x", "user": 1e400}}, "payload.user is NaN, infinite"),
        ({"payload": '{"prompt": "x", "user": {"a": NaN}}'}, "payload.user.a is NaN, infinite"),
        ({"payload": base64.b64encode(b'{"prompt": "\\ud83d"}').decode()}, "payload.prompt holds a lone surrogate"),
    ],
)
def test_a_bad_message_with_an_id_is_answered(change: Any, says: str) -> None:
    with pytest.raises(BadMessage, match=says) as caught:
        read_llmd(llmd(**change))
    answer = json.loads(refused(caught.value.message_id, caught.value.error))
    assert (answer.keys(), answer["id"]) == ({"id", "error"}, "1")
    assert says in answer["error"]


@pytest.mark.parametrize("value", [b"", b"\xff", b"[]", b"{", b"{}", b'{"id": 5}', b'{"id": ""}', b"[" * 100_000])
def test_a_message_without_an_id_goes_to_the_dead_letters(value: bytes) -> None:
    with pytest.raises(BadJson):
        read_llmd(value)


@given(st.binary(max_size=200))
def test_any_bytes_end_in_a_typed_error(value: bytes) -> None:
    for reading in (read_llmd, read):
        with pytest.raises((PenstockError, BadMessage)):
            reading(value)


def test_the_key_of_a_request_stands_for_the_message_and_the_try() -> None:
    other = QueueSection(topic="other")
    keys = {
        request_key(queue, one, tries) for queue in (QUEUE, other) for one in ("1", "2", "\ud800") for tries in (0, 1)
    }
    assert len(keys) == 12
    assert all(len(key) <= 255 for key in keys)
    assert request_key(QUEUE, "1", 0) == request_key(QUEUE, "1", 0)


def read(value: bytes) -> InferenceRequest:
    return read_penstock(value, QUEUE, default_codec(), ("jobs", 0, 1, 2))


@pytest.mark.parametrize(
    "value",
    [
        b'{"task": "text_generation", "payload": {"prompt": "x"}, "tenant": "someone-else"}',
        default_codec().encode(request(tenant="else")),
    ],
    ids=["JSON", "Avro"],
)
def test_a_request_in_our_own_format_belongs_to_the_tenant_of_its_queue(value: bytes) -> None:
    assert read(value).tenant == "team"
    assert read(value).request_id == read(value).request_id


@pytest.mark.parametrize(
    ("value", "error"), [(b'{"task": "text_generation"}', InvalidRequest), (b"\x00\x00\x00\x00\x01x", DecodeError)]
)
def test_a_request_in_our_own_format_is_checked(value: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        read(value)


@pytest.mark.parametrize(
    ("queues", "says"),
    [
        ([{"topic": "a"}, {"topic": "a"}], "two queues read the topic a"),
        ([{"topic": "a", "result_topic": "b"}, {"topic": "b"}], "would be requests"),
        ([{"topic": "a b"}], "name of a topic"),
        ([{"topic": "a", "tenant": "A"}], "tenant must match"),
        ([{"topic": "a", "extra": {f"x-{n}": "v" for n in range(65)}}], "more than 64 entries"),
        ([{"topic": "a", "extra": {"x": "\ud800"}}], "surrogate"),
    ],
)
def test_settings_that_cannot_work_are_refused(queues: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        BridgeSettings(queues=[QueueSection(**queue) for queue in queues])
