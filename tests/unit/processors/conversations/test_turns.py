"""Turns against a log in memory: own input once, answers found again, lowest offset wins, contexts from the past."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock.processors.conversations.turns import LostOwnership, Turns, answer_message
from penstock.schemas.codec import default_codec
from penstock.schemas.records import ConversationMessage, InferenceRequest
from penstock.schemas.topics import TopicNames

CODEC = default_codec()
TOPIC = TopicNames().conversation("default", "c1")


class MemoryLog:
    """A conversation topic as a list; `before_append` lets a rival write first."""

    def __init__(self) -> None:
        self.records: list[tuple[int, bytes, bytes | None]] = []
        self.topic_id = "first"
        self.made = False
        self.reads: list[int] = []
        self.rival: list[tuple[bytes, bytes | None]] = []

    def find(self, topic: str) -> str | None:
        return self.topic_id if self.made else None

    def open(self, topic: str) -> str:
        self.made = True
        return self.topic_id

    def read(self, topic: str, from_offset: int) -> list[tuple[int, bytes, bytes | None]]:
        self.reads.append(from_offset)
        return [record for record in self.records if record[0] >= from_offset]

    def append(self, topic: str, records: Sequence[tuple[bytes, bytes | None]]) -> list[int]:
        rival, self.rival = self.rival, []
        for key, value in rival:
            self.records.append((len(self.records), key, value))
        offsets: list[int] = []
        for key, value in records:
            offsets.append(len(self.records))
            self.records.append((len(self.records), key, value))
        return offsets

    def keys(self) -> list[str]:
        return [key.decode() for _, key, _ in self.records]


def make(log: MemoryLog) -> Turns:
    return Turns(log, CODEC, TopicNames().conversation, threads=1, cached=8)


def request(request_id: str, *texts: str) -> InferenceRequest:
    messages = [{"role": "user", "content": text} for text in texts]
    return InferenceRequest(
        request_id=request_id,
        task="text_generation",
        conversation_id="c1",
        created_at=0,
        text_generation={"messages": messages},
    )


def answer(of: InferenceRequest, text: str, *, epoch: int = 1) -> ConversationMessage:
    return answer_message(of, text, epoch=epoch, attempt=1, model="m", finish_reason="stop", usage=None, now_ms=0)


def mine() -> bool:
    return True


def contents(history: list[dict[str, str]]) -> list[str]:
    return [message["content"] for message in history]


async def test_a_turn_appends_its_input_once_and_sees_only_its_past() -> None:
    log = MemoryLog()
    turns = make(log)
    first, second = request("r1", "a", "b"), request("r2", "c")
    assert (await turns.begin(first, 1, 0, mine)).history == []
    await turns.finish(answer(first, "A"), mine)
    start = await turns.begin(second, 1, 0, mine)
    assert contents(start.history) == ["a", "b", "A"]
    assert log.keys() == ["r1/in/0/1", "r1/in/1/1", "r1/out/1", "r2/in/0/1"]
    # Begun again in a later epoch, in another worker: nothing is appended twice, and the context is the same.
    again = await make(log).begin(second, 2, 0, mine)
    assert contents(again.history) == ["a", "b", "A"]
    assert len(log.records) == 4


async def test_an_answer_that_stands_is_found() -> None:
    log = MemoryLog()
    await make(log).begin(request("r1", "a"), 1, 0, mine)
    await make(log).finish(answer(request("r1", "a"), "A"), mine)
    start = await make(log).begin(request("r1", "a"), 2, 0, mine)
    assert start.answer is not None
    assert start.answer.content == "A"


async def test_the_answer_with_the_lowest_offset_wins() -> None:
    log = MemoryLog()
    turns = make(log)
    asked = request("r1", "a")
    await turns.begin(asked, 1, 0, mine)
    log.rival = [(b"r1/out/2", CODEC.encode(answer(asked, "the rival's", epoch=2)))]
    winner = await turns.finish(answer(asked, "mine"), mine)
    assert winner.content == "the rival's"


async def test_a_crash_between_two_inputs_appends_the_missing_one() -> None:
    log = MemoryLog()
    await make(log).begin(request("r1", "a"), 1, 0, mine)
    await make(log).begin(request("r1", "a", "b"), 2, 0, mine)
    assert log.keys() == ["r1/in/0/1", "r1/in/1/2"]


async def test_only_the_tail_is_read_again() -> None:
    log = MemoryLog()
    turns = make(log)
    for number in range(3):
        asked = request(f"r{number}", "x")
        await turns.begin(asked, 1, 0, mine)
        await turns.finish(answer(asked, "y"), mine)
    assert log.reads == [0, 2, 4]


async def test_a_reused_id_starts_empty() -> None:
    log = MemoryLog()
    turns = make(log)
    await turns.begin(request("r1", "a"), 1, 0, mine)
    log.records.clear()
    log.topic_id = "second"
    assert (await turns.begin(request("r2", "b"), 1, 0, mine)).history == []


async def test_a_lost_partition_writes_nothing() -> None:
    log = MemoryLog()
    turns = make(log)
    with pytest.raises(LostOwnership):
        await turns.begin(request("r1", "a"), 1, 0, lambda: False)
    with pytest.raises(LostOwnership):
        await turns.finish(answer(request("r1", "a"), "A"), lambda: False)
    assert log.records == []


async def test_erase_tombstones_every_record_of_the_request() -> None:
    log = MemoryLog()
    turns = make(log)
    first = request("r1", "a", "b")
    await turns.begin(first, 1, 0, mine)
    await turns.finish(answer(first, "A"), mine)
    await turns.begin(request("r2", "c"), 1, 0, mine)
    assert await turns.erase("default", "c1", "r1") == 3
    assert {key for _, key, value in log.records if value is None} == {b"r1/in/0/1", b"r1/in/1/1", b"r1/out/1"}
    start = await turns.begin(request("r3", "d"), 1, 0, mine)
    assert contents(start.history) == ["c"]
    assert await turns.erase("default", "c1", "r1") == 0


async def test_a_standing_answer_is_found_without_writing() -> None:
    log = MemoryLog()
    turns = make(log)
    asked = request("r1", "a")
    assert await turns.answer(asked) is None
    assert not log.made, "looking makes no topic"
    await turns.begin(asked, 1, 0, mine)
    assert await turns.answer(asked) is None
    await turns.finish(answer(asked, "A"), mine)
    before = log.keys()
    found = await turns.answer(asked)
    assert found is not None
    assert found.content == "A"
    assert log.keys() == before


async def test_erasing_makes_no_topic() -> None:
    log = MemoryLog()
    assert await make(log).erase("default", "c1", "r1") == 0
    assert not log.made
