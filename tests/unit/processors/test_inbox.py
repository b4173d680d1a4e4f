"""The inbox: more urgent topics first, each partition in its order, room given back for what was taken or forgotten."""

from __future__ import annotations

from penstock.processors.inbox import Inbox
from penstock.processors.kafka.membership import Batch, Delivered

URGENCY = {"high": 0, "medium": 1, "low": 2}


class Room:
    """Batches, and which of them gave their room back."""

    def __init__(self) -> None:
        self.given_back: list[str] = []

    def batch(self, topic: str, start: int, count: int) -> Batch:
        records = [Delivered(offset, 0, None, b"", (), True) for offset in range(start, start + count)]
        name = f"{topic}@{start}"
        return Batch((topic, 0), start, start + count, 1, records, lambda: self.given_back.append(name))


def taken_in_order(inbox: Inbox) -> list[tuple[str, int]]:
    order: list[tuple[str, int]] = []
    while (place := inbox.first()) is not None:
        order += [(place.batch.topic, record.offset) for record in place.batch.records[place.at :]]
        inbox.done(place)
    return order


def test_more_urgent_topics_come_first_and_each_topic_in_its_order() -> None:
    room, inbox = Room(), Inbox(URGENCY.__getitem__)
    for topic, start in (("low", 0), ("high", 5), ("low", 2), ("medium", 0), ("high", 7)):
        inbox.put(room.batch(topic, start, 2))
    assert taken_in_order(inbox) == [
        *(("high", offset) for offset in (5, 6, 7, 8)),
        *(("medium", offset) for offset in (0, 1)),
        *(("low", offset) for offset in (0, 1, 2, 3)),
    ]


def test_urgent_records_pass_a_batch_that_is_taken_in_part_which_goes_on_where_it_was() -> None:
    room, inbox = Room(), Inbox(URGENCY.__getitem__)
    inbox.put(room.batch("low", 0, 3))
    place = inbox.first()
    assert place is not None
    assert not place.announced
    place.at, place.announced = 2, True
    inbox.put(room.batch("high", 0, 1))
    urgent = inbox.first()
    assert urgent is not None
    assert urgent.tp == ("high", 0)
    inbox.done(urgent)
    again = inbox.first()
    assert again is not None
    assert (again.tp, again.at, again.announced) == (("low", 0), 2, True), "the gate is not told of it twice"


def test_a_batch_gives_its_room_back_when_it_is_taken_to_its_end() -> None:
    room, inbox = Room(), Inbox(URGENCY.__getitem__)
    inbox.put(room.batch("low", 0, 2))
    inbox.put(room.batch("low", 2, 0))  # markers of transactions only
    place = inbox.first()
    assert place is not None
    assert room.given_back == []
    inbox.done(place)
    assert room.given_back == ["low@0"]
    place = inbox.first()
    assert place is not None
    inbox.done(place)
    assert room.given_back == ["low@0", "low@2"]
    assert inbox.first() is None
    assert not inbox


def test_what_is_forgotten_gives_its_room_back_too() -> None:
    room, inbox = Room(), Inbox(URGENCY.__getitem__)
    inbox.put(room.batch("low", 0, 5))
    inbox.put(room.batch("high", 0, 3))
    place = inbox.first()
    assert place is not None
    place.at = 1
    assert inbox.clear() == 7, "records that had not been taken"
    assert sorted(room.given_back) == ["high@0", "low@0"]
    assert not inbox
    assert inbox.clear() == 0
    inbox.put(room.batch("low", 5, 1))
    assert taken_in_order(inbox) == [("low", 5)], "it goes on with what is delivered next"
