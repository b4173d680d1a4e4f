"""The inbox: more urgent topics first, each partition in its order, room given back for what was taken or forgotten."""

from __future__ import annotations

from penstock.processors.inbox import FIRST_WAIT_S, LONG, LONGEST_WAIT_S, Inbox
from penstock.processors.kafka.batches import Batch, DeliveredRecord


def new_inbox() -> Inbox:
    return Inbox({"high": 0, "medium": 1, "low": 2}.__getitem__)


class Room:
    """Batches, and which of them gave their room back."""

    def __init__(self) -> None:
        self.given_back: list[str] = []

    def batch(self, topic: str, start: int, count: int) -> Batch:
        records = [DeliveredRecord(offset, 0, None, b"", (), True) for offset in range(start, start + count)]
        name = f"{topic}@{start}"
        return Batch((topic, 0), start, start + count, 1, records, lambda: self.given_back.append(name))


def taken_in_order(inbox: Inbox) -> list[tuple[str, int]]:
    order: list[tuple[str, int]] = []
    while (place := inbox.first(0.0)) is not None:
        order += [(place.batch.topic, record.offset) for record in place.batch.records[place.at :]]
        inbox.done(place)
    return order


def test_more_urgent_topics_come_first_and_each_topic_in_its_order() -> None:
    room, inbox = Room(), new_inbox()
    for topic, start in (("low", 0), ("high", 5), ("low", 2), ("medium", 0), ("high", 7)):
        inbox.put(room.batch(topic, start, 2))
    assert taken_in_order(inbox) == [
        *(("high", offset) for offset in (5, 6, 7, 8)),
        *(("medium", offset) for offset in (0, 1)),
        *(("low", offset) for offset in (0, 1, 2, 3)),
    ]


def test_urgent_records_pass_a_batch_that_is_taken_in_part_which_goes_on_where_it_was() -> None:
    room, inbox = Room(), new_inbox()
    inbox.put(room.batch("low", 0, 3))
    place = inbox.first(0.0)
    assert not place.announced
    place.at, place.announced = 2, True
    inbox.put(room.batch("high", 0, 1))
    urgent = inbox.first(0.0)
    assert urgent.batch.tp == ("high", 0)
    inbox.done(urgent)
    again = inbox.first(0.0)
    assert (again.batch.tp, again.at, again.announced) == (("low", 0), 2, True), "the gate is not told of it twice"


def test_a_batch_gives_its_room_back_when_it_is_taken_to_its_end() -> None:
    room, inbox = Room(), new_inbox()
    inbox.put(room.batch("low", 0, 2))
    inbox.put(room.batch("low", 2, 0))  # markers of transactions only
    for before in ([], ["low@0"]):
        place = inbox.first(0.0)
        assert place is not None
        assert room.given_back == before
        inbox.done(place)
    assert room.given_back == ["low@0", "low@2"]
    assert inbox.first(0.0) is None
    assert not inbox


def test_what_is_forgotten_gives_its_room_back_too() -> None:
    room, inbox = Room(), new_inbox()
    inbox.put(room.batch("low", 0, 5))
    inbox.put(room.batch("high", 0, 3))
    place = inbox.first(0.0)
    place.at = 1
    assert inbox.clear() == 7, "records that had not been taken"
    assert sorted(room.given_back) == ["high@0", "low@0"]
    assert not inbox
    assert inbox.clear() == 0
    inbox.put(room.batch("low", 5, 1))
    assert taken_in_order(inbox) == [("low", 5)], "it goes on with what is delivered next"


def test_a_partition_that_is_set_aside_waits_and_others_go_on() -> None:
    room, inbox = Room(), new_inbox()
    for topic, start in (("high", 0), ("high", 2), ("low", 0)):
        inbox.put(room.batch(topic, start, 2))
    stuck = inbox.first(1.0)
    assert stuck is not None
    assert inbox.set_aside(stuck, 1.0) == 1
    assert room.given_back == ["high@0", "high@2"], "or other partitions would find no room"
    assert inbox.aside == {("high", 0)}
    other = inbox.first(1.0)
    assert other.batch.tp == ("low", 0)
    inbox.done(other)
    assert inbox.first(1.0) is None
    assert inbox.first(1.0 + FIRST_WAIT_S) is stuck
    inbox.was_read(stuck)
    assert not inbox.aside
    assert taken_in_order(inbox) == [("high", offset) for offset in range(4)]
    assert room.given_back == ["high@0", "high@2", "low@0"], "once each"


def test_what_is_set_aside_again_waits_longer_up_to_a_limit() -> None:
    inbox, now, waits = new_inbox(), 0.0, list[float]()
    inbox.put(Room().batch("low", 0, 1))
    for _ in range(20):
        pending = inbox.first(now)
        assert pending is not None
        assert inbox.set_aside(pending, now) == len(waits) + 1
        assert inbox.waits_long == (len(waits) + 1 >= LONG)
        began = now
        while inbox.first(now) is None:
            now += 0.001
        waits.append(round(now - began, 2))
    assert waits[:3] == [FIRST_WAIT_S, 2 * FIRST_WAIT_S, 4 * FIRST_WAIT_S]
    assert set(waits[4:]) == {LONGEST_WAIT_S}
