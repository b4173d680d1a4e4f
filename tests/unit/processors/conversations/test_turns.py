"""Turns against a log in memory: own input once, answers found again, lowest offset wins, contexts from the past."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from typing import Any

import pytest

from penstock.processors.conversations.messages import answer_message, as_summary, input_messages
from penstock.processors.conversations.turns import LostOwnership, Turns, TurnStart
from penstock.processors.kafka.broker_watch import BrokerWatch
from penstock.processors.past import Summary
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import BrokerUnavailable, Cancelled, Conflict, NotFound, Overloaded
from penstock.schemas.records import ArtifactRef, ConversationMessage, InferenceRequest, conversation_message_key
from penstock.schemas.topics import TopicNames
from support import wait_until_async

CODEC = default_codec()
TOPIC = TopicNames().conversation("default", "c1")


class MemoryLog:
    """A conversation topic as a list; `before_append` lets a rival write first."""

    is_shared = False

    def __init__(self) -> None:
        self.records: list[tuple[int, bytes, bytes | None]] = []
        self.topic_id = "first"
        self.made = False
        self.reads: list[int] = []
        self.rival: list[tuple[bytes, bytes | None]] = []
        self.away = False
        self.lose_answers = 0

    def find(self, topic: str, timeout_s: float) -> str | None:
        self.raise_if_away()
        return self.topic_id if self.made else None

    def raise_if_away(self) -> None:
        if self.away:
            raise BrokerUnavailable("away")

    def open(self, topic: str, timeout_s: float) -> str:
        self.raise_if_away()
        self.made = True
        return self.topic_id

    def read(self, topic: str, from_offset: int, timeout_s: float) -> list[tuple[int, bytes, bytes | None]]:
        self.reads.append(from_offset)
        return [record for record in self.records if record[0] >= from_offset]

    async def append(self, topic: str, records: Sequence[tuple[bytes, bytes | None]]) -> list[int]:
        if not self.made:
            raise NotFound(f"there is no topic {topic}")
        rival, self.rival = self.rival, []
        for key, value in rival:
            self.records.append((len(self.records), key, value))
        offsets: list[int] = []
        for key, value in records:
            offsets.append(len(self.records))
            self.records.append((len(self.records), key, value))
        if self.lose_answers:
            self.lose_answers -= 1
            raise BrokerUnavailable("appended, but nobody said so")
        return offsets

    def keys(self) -> list[str]:
        return [key.decode() for _, key, _ in self.records]


def make(log: MemoryLog, cached_bytes: int = 1 << 20) -> Turns:
    watch = BrokerWatch(lambda _: not log.away)
    return Turns(log, CODEC, TopicNames().conversation, threads=1, cached_bytes=cached_bytes, watch=watch)


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


async def take(turns: Turns, of: InferenceRequest, epoch: int = 1) -> TurnStart:
    """A whole start: read, then begin at once."""
    start = await turns.read(of, mine)
    if start.answer is None:
        assert await turns.begin(of, epoch, 0, mine, start.mark)
    return start


def contents(history: Sequence[dict[str, Any]]) -> list[str]:
    return [message["content"] for message in history]


async def test_a_turn_appends_its_input_once_and_sees_only_its_past() -> None:
    log = MemoryLog()
    turns = make(log)
    first, second = request("r1", "a", "b"), request("r2", "c")
    assert (await take(turns, first)).past.messages == []
    await turns.finish(answer(first, "A"), mine, "first")
    start = await take(turns, second)
    assert contents(start.past.messages) == ["a", "b", "A"]
    assert log.keys() == ["r1/in/0/1", "r1/in/1/1", "r1/out/1", "r2/in/0/1"]
    # Begun again in a later epoch, in another worker: nothing is appended twice, and the context is the same.
    again = await take(make(log), second, epoch=2)
    assert contents(again.past.messages) == ["a", "b", "A"]
    assert len(log.records) == 4


async def test_reading_ahead_writes_nothing_and_makes_no_topic() -> None:
    log = MemoryLog()
    turns = make(log)
    start = await turns.read(request("r1", "a"), mine)
    assert (start.answer, start.past.messages) == (None, [])
    assert not log.made
    assert await turns.begin(request("r1", "a"), 1, 0, mine, start.mark)
    assert log.keys() == ["r1/in/0/1"]


async def test_a_log_that_moved_after_reading_is_read_again() -> None:
    log = MemoryLog()
    turns = make(log)
    first, second = request("r1", "a"), request("r2", "b")
    ahead = await turns.read(second, mine)
    await take(turns, first)
    await turns.finish(answer(first, "A"), mine, "first")
    assert not await turns.begin(second, 1, 0, mine, ahead.mark)
    assert log.keys()[-1] == "r1/out/1", "nothing was appended"
    again = await turns.read(second, mine)
    assert contents(again.past.messages) == ["a", "A"]
    assert await turns.begin(second, 1, 0, mine, again.mark)


async def test_what_an_erasure_removed_after_reading_is_noticed() -> None:
    log = MemoryLog()
    turns = make(log)
    first, second = request("r1", "a"), request("r2", "b")
    await take(turns, first)
    ahead = await turns.read(second, mine)
    assert await turns.erase("default", "c1", "r1") == 1
    assert not await turns.begin(second, 1, 0, mine, ahead.mark)


async def test_records_that_do_not_count_do_not_ask_for_another_preparation() -> None:
    log = MemoryLog()
    turns = make(log)
    start = await turns.read(request("r1", "a"), mine)
    log.records.append((0, b"?", b"garbage"))
    assert await turns.begin(request("r1", "a"), 1, 0, mine, start.mark)


async def test_a_rival_between_reading_and_appending_is_seen_after_the_append() -> None:
    log = MemoryLog()
    turns = make(log)
    start = await turns.read(request("r1", "a"), mine)
    rival = request("r0", "first")
    log.rival = [(b"r0/in/0/1", CODEC.encode(input_messages(rival, 1, 0)[0]))]
    assert not await turns.begin(request("r1", "a"), 1, 0, mine, start.mark)
    again = await turns.read(request("r1", "a"), mine)
    assert contents(again.past.messages) == ["first"]
    assert await turns.begin(request("r1", "a"), 1, 0, mine, again.mark)
    assert log.keys() == ["r0/in/0/1", "r1/in/0/1"], "the input is appended once"


async def test_an_answer_that_came_before_the_append_is_not_run_over() -> None:
    """The append waited for Kafka, in a worker that others took for gone; they answered meanwhile (seed 27418)."""
    log = MemoryLog()
    asked = request("r1", "a")
    turns = make(log)
    start = await turns.read(asked, mine)
    log.rival = [
        (b"r1/in/0/1", CODEC.encode(input_messages(asked, 1, 0)[0])),
        (b"r1/out/2", CODEC.encode(answer(asked, "theirs", epoch=2))),
    ]
    assert not await turns.begin(asked, 1, 0, mine, start.mark)
    again = await turns.read(asked, mine)
    assert again.answer is not None
    assert again.answer.content == "theirs"


async def test_an_answer_that_came_after_reading_is_not_run_over() -> None:
    log = MemoryLog()
    asked = request("r1", "a")
    turns = make(log)
    start = await turns.read(asked, mine)
    assert await turns.begin(asked, 1, 0, mine, start.mark)
    await make(log).finish(answer(asked, "a dead worker's"), mine, "first")
    assert not await turns.begin(asked, 2, 0, mine, start.mark)
    again = await turns.read(asked, mine)
    assert again.answer is not None
    assert again.answer.content == "a dead worker's"


async def test_the_lowest_offset_of_an_input_counts() -> None:
    """Two workers appended the same input: the turn stands where the first one is."""
    log = MemoryLog()
    asked, other = request("r1", "a"), request("r2", "b")
    await take(make(log), asked)
    await take(make(log), other)
    log.records.append((2, b"r1/in/0/2", CODEC.encode(input_messages(asked, 2, 0)[0])))
    assert (await make(log).read(asked, mine)).past.messages == []
    assert contents((await make(log).read(request("r3", "c"), mine)).past.messages) == ["a", "b"]


async def test_an_answer_that_stands_is_found() -> None:
    log = MemoryLog()
    await take(make(log), request("r1", "a"))
    await make(log).finish(answer(request("r1", "a"), "A"), mine, "first")
    start = await make(log).read(request("r1", "a"), mine)
    assert start.answer is not None
    assert start.answer.content == "A"


async def test_the_answer_with_the_lowest_offset_wins() -> None:
    log = MemoryLog()
    turns = make(log)
    asked = request("r1", "a")
    await take(turns, asked)
    log.rival = [(b"r1/out/2", CODEC.encode(answer(asked, "the rival's", epoch=2)))]
    winner = await turns.finish(answer(asked, "mine"), mine, "first")
    assert winner.content == "the rival's"


async def test_a_crash_between_two_inputs_appends_the_missing_one() -> None:
    log = MemoryLog()
    await take(make(log), request("r1", "a"))
    await take(make(log), request("r1", "a", "b"), epoch=2)
    assert log.keys() == ["r1/in/0/1", "r1/in/1/2"]


async def test_only_the_tail_is_read_again() -> None:
    log = MemoryLog()
    turns = make(log)
    for number in range(3):
        asked = request(f"r{number}", "x")
        await take(turns, asked)
        await turns.finish(answer(asked, "y"), mine, "first")
    assert log.reads == [0, 2, 2, 4, 4]


async def test_the_cache_is_bounded_by_bytes() -> None:
    log = MemoryLog()
    small = make(log, cached_bytes=10_000)
    asked = request("r1", "x" * 9_000)
    await take(small, asked)
    log.reads.clear()
    await small.read(asked, mine)
    assert log.reads == [0], "it is larger than the cache, so it is not kept"


async def test_a_reused_id_starts_empty() -> None:
    log = MemoryLog()
    turns = make(log)
    await take(turns, request("r1", "a"))
    ahead = await turns.read(request("r2", "b"), mine)
    log.records.clear()
    log.topic_id = "second"
    assert not await turns.begin(request("r2", "b"), 1, 0, mine, ahead.mark)
    assert (await turns.read(request("r2", "b"), mine)).past.messages == []


async def test_a_lost_partition_writes_nothing() -> None:
    log = MemoryLog()
    turns = make(log)
    start = await turns.read(request("r1", "a"), mine)
    with pytest.raises(LostOwnership):
        await turns.begin(request("r1", "a"), 1, 0, lambda: False, start.mark)
    with pytest.raises(LostOwnership):
        await turns.finish(answer(request("r1", "a"), "A"), lambda: False, "first")
    assert log.records == []


async def test_erase_tombstones_every_record_of_the_request() -> None:
    log = MemoryLog()
    turns = make(log)
    first = request("r1", "a", "b")
    await take(turns, first)
    await turns.finish(answer(first, "A"), mine, "first")
    await take(turns, request("r2", "c"))
    assert await turns.erase("default", "c1", "r1") == 3
    assert {key for _, key, value in log.records if value is None} == {b"r1/in/0/1", b"r1/in/1/1", b"r1/out/1"}
    assert contents((await turns.read(request("r3", "d"), mine)).past.messages) == ["c"]
    assert await turns.erase("default", "c1", "r1") == 0


async def test_a_standing_answer_is_looked_up_without_writing() -> None:
    log = MemoryLog()
    turns = make(log)
    asked = request("r1", "a")
    assert await turns.answer(asked, mine) is None
    assert not log.made, "looking makes no topic"
    await take(turns, asked)
    assert await turns.answer(asked, mine) is None
    await turns.finish(answer(asked, "A"), mine, "first")
    keys = log.keys()
    standing = await turns.answer(asked, mine)
    assert standing is not None
    assert standing.content == "A"
    assert log.keys() == keys


async def test_erasing_makes_no_topic() -> None:
    log = MemoryLog()
    assert await make(log).erase("default", "c1", "r1") == 0
    assert not log.made


async def test_turns_wait_for_kafka_and_go_on_when_it_is_back() -> None:
    log = MemoryLog()
    turns = make(log)
    log.away = True
    reading = [asyncio.create_task(turns.read(request(f"r{n}", "a"), mine)) for n in range(3)]
    await asyncio.sleep(0.3)
    assert not any(task.done() for task in reading)
    log.away = False
    starts = await asyncio.wait_for(asyncio.gather(*reading), 2)
    assert [start.past.messages for start in starts] == [[], [], []]


async def test_who_waits_for_kafka_lets_go_when_the_work_is_lost() -> None:
    log = MemoryLog()
    turns = make(log)
    asked = request("r1", "a")
    start = await turns.read(asked, mine)
    log.away, ours = True, True
    waiting = [
        asyncio.create_task(turns.read(asked, lambda: ours)),
        asyncio.create_task(turns.begin(asked, 1, 0, lambda: ours, start.mark)),
        asyncio.create_task(turns.finish(answer(asked, "A"), lambda: ours, "first")),
        asyncio.create_task(turns.answer(asked, lambda: ours)),
    ]
    await asyncio.sleep(0.1)
    ours = False
    outcomes = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5)
    assert [type(outcome) for outcome in outcomes] == [LostOwnership] * 4


async def test_closing_lets_all_go() -> None:
    log = MemoryLog()
    turns = make(log)
    log.away = True
    waiting = asyncio.create_task(turns.read(request("r1", "a"), mine))
    await asyncio.sleep(0.1)
    turns.close()
    with pytest.raises(LostOwnership):
        await asyncio.wait_for(waiting, 5)


@pytest.mark.parametrize("step", ["begin", "finish"])
async def test_an_append_whose_answer_was_lost_is_found_and_not_repeated(step: str) -> None:
    log = MemoryLog()
    turns = make(log)
    asked = request("r1", "a")
    start = await turns.read(asked, mine)
    log.lose_answers = step == "begin"
    assert await turns.begin(asked, 1, 0, mine, start.mark)
    log.lose_answers = step == "finish"
    assert (await turns.finish(answer(asked, "A"), mine, "first")).content == "A"
    assert log.keys() == ["r1/in/0/1", "r1/out/1"]


async def test_calls_of_one_conversation_follow_each_other_and_a_cancelled_one_leaves_no_thread_behind() -> None:
    log = MemoryLog()
    turns = make(log)
    inside, gate = threading.Event(), threading.Event()
    read = log.read

    def slow(topic: str, from_offset: int, timeout_s: float) -> list[tuple[int, bytes, bytes | None]]:
        inside.set()
        gate.wait(5)
        return read(topic, from_offset, timeout_s)

    await take(turns, request("r1", "a"))
    log.read = slow
    first = asyncio.create_task(turns.read(request("r2", "b"), mine))
    await asyncio.to_thread(inside.wait, 5)
    second = asyncio.create_task(turns.read(request("r3", "c"), mine))
    first.cancel()
    inside.clear()
    await asyncio.sleep(0.05)
    assert not inside.is_set(), "the second must not be in the log while the first one's thread is"
    gate.set()
    assert contents((await asyncio.wait_for(second, 5)).past.messages) == ["a"]
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_a_kafka_that_is_there_and_slow_is_given_longer() -> None:
    """Short attempts alone would never get through."""
    log = MemoryLog()
    turns = make(log)
    find = log.find

    def slow(topic: str, timeout_s: float) -> str | None:
        if timeout_s < 3:
            raise BrokerUnavailable("no answer in time")
        return find(topic, timeout_s)

    log.find = slow
    assert (await asyncio.wait_for(turns.read(request("r1", "a"), mine), 10)).past.messages == []


# -- deleted conversations


class Commands:
    """Which turns were cancelled: a worker knows of it once it has caught up."""

    def __init__(self) -> None:
        self.cancelled = self.known = False
        self.looks = 0

    def catch_up(self, within_s: float) -> None:
        self.looks += 1
        self.known = self.cancelled

    def mine(self) -> bool:
        return not self.known


def commanded(log: MemoryLog) -> tuple[Turns, Commands]:
    commands, watch = Commands(), BrokerWatch(lambda _: not log.away)
    naming = TopicNames().conversation
    made = Turns(
        log, CODEC, naming, threads=1, cached_bytes=1 << 20, watch=watch, catch_up=commands.catch_up
    )  # fmt: skip
    return made, commands


def standing(log: MemoryLog) -> list[str]:
    """Keys of the records that no tombstone removes."""
    values = {key.decode(): value for _, key, value in log.records}
    return [key for key, value in values.items() if value is not None]


def make_anew(log: MemoryLog) -> None:
    """Delete the topic and make it again."""
    log.records.clear()
    log.topic_id = "second"


async def test_a_cancelled_turn_makes_no_topic() -> None:
    log = MemoryLog()
    turns, commands = commanded(log)
    start = await turns.read(request("r1", "a"), commands.mine)
    commands.cancelled = True
    with pytest.raises(LostOwnership):
        await turns.begin(request("r1", "a"), 1, 0, commands.mine, start.mark)
    assert (log.made, log.records) == (False, [])


async def test_a_cancelled_turn_writes_nothing_to_a_topic_that_was_made_anew() -> None:
    log = MemoryLog()
    turns, commands = commanded(log)
    await take(turns, request("r1", "a"))
    make_anew(log)
    start = await turns.read(request("r2", "b"), commands.mine)
    commands.cancelled = True
    with pytest.raises(LostOwnership):
        await turns.begin(request("r2", "b"), 1, 0, commands.mine, start.mark)
    assert log.records == []


async def test_who_makes_a_topic_looks_again_at_the_commands() -> None:
    """One may have been given, and the conversation deleted and made anew, between the look and the making."""
    log = MemoryLog()
    turns, commands = commanded(log)
    start = await turns.read(request("r1", "a"), commands.mine)
    opening = log.open

    def opened_late(topic: str, timeout_s: float) -> str:
        commands.cancelled = True
        return opening(topic, timeout_s)

    log.open = opened_late
    with pytest.raises(LostOwnership):
        await turns.begin(request("r1", "a"), 1, 0, commands.mine, start.mark)
    assert log.records == []


async def test_the_commands_are_looked_at_once_for_a_topic() -> None:
    log = MemoryLog()
    turns, commands = commanded(log)
    for number in range(3):
        asked = request(f"r{number}", "x")
        await take(turns, asked)
        await turns.finish(answer(asked, "y"), mine, "first")
    assert commands.looks == 2, "when there is no topic, and when there is one"


async def test_a_turn_whose_topic_is_gone_is_read_again_and_makes_none_before() -> None:
    log = MemoryLog()
    turns = make(log)
    await take(turns, request("r1", "a"))
    ahead = await turns.read(request("r2", "b"), mine)
    log.records.clear()
    log.topic_id, log.made = "second", False
    assert await turns.begin(request("r2", "b"), 1, 0, mine, ahead.mark) is None
    assert not log.made
    start = await turns.read(request("r2", "b"), mine)
    assert start.past.messages == []
    assert await turns.begin(request("r2", "b"), 1, 0, mine, start.mark) == "second"


@pytest.mark.parametrize("anew", [False, True], ids=["deleted", "made anew"])
async def test_an_answer_whose_topic_is_gone_is_not_written(anew: bool) -> None:
    log = MemoryLog()
    turns, marks = holding(log)
    asked = drawing("r1", "a cat")
    await take(turns, asked)
    make_anew(log)
    log.made = anew
    with pytest.raises(Cancelled, match="its conversation was deleted"):
        await asyncio.wait_for(turns.finish(drawn(asked, "cat"), mine, "first"), 10)
    assert standing(log) == []
    assert log.made == anew
    assert marks.held == set()


async def test_an_answer_that_another_turn_s_reading_left_without_its_topic_is_not_written() -> None:
    log = MemoryLog()
    turns = make(log)
    asked = request("r1", "a")
    await take(turns, asked)
    make_anew(log)
    assert (await turns.read(request("r2", "b"), mine)).past.messages == []
    with pytest.raises(Cancelled, match="its conversation was deleted"):
        await turns.finish(answer(asked, "A"), mine, "first")
    assert log.records == []


async def test_an_input_that_came_into_the_next_topic_is_taken_back() -> None:
    log = MemoryLog()
    turns = make(log)
    await take(turns, request("r1", "a"))
    start = await turns.read(request("r2", "b"), mine)
    appending = log.append

    async def late(topic: str, records: Sequence[tuple[bytes, bytes | None]]) -> list[int]:
        log.append = appending
        make_anew(log)
        return await appending(topic, records)

    log.append = late
    assert await turns.begin(request("r2", "b"), 1, 0, mine, start.mark) is None
    assert standing(log) == []


async def test_a_broker_that_does_not_know_a_new_topic_yet_changes_nothing() -> None:
    """It may hear of the topic a moment after the others."""
    log = MemoryLog()
    turns = make(log)
    asked = request("r1", "a")
    await take(turns, asked)
    finding = log.find

    def not_yet(topic: str, timeout_s: float) -> str | None:
        log.find = finding
        return None

    log.find = not_yet
    assert (await turns.finish(answer(asked, "A"), mine, "first")).content == "A"
    assert log.keys() == standing(log) == ["r1/in/0/1", "r1/out/1"]


async def test_what_lands_in_the_next_topic_after_its_turn_was_cancelled_is_taken_back() -> None:
    log = MemoryLog()
    turns = make(log)
    asked, ours = request("r1", "a"), True
    await take(turns, asked)
    start = await turns.read(request("r2", "b"), mine)
    appending, inside, sent = log.append, asyncio.Event(), asyncio.Event()

    async def slow(topic: str, records: Sequence[tuple[bytes, bytes | None]]) -> list[int]:
        inside.set()
        await sent.wait()
        log.append = appending
        return await appending(topic, records)

    log.append = slow
    begins = asyncio.create_task(turns.begin(request("r2", "b"), 1, 0, lambda: ours, start.mark))
    await asyncio.wait_for(inside.wait(), 10)
    ours = False
    with pytest.raises(LostOwnership):
        await asyncio.wait_for(begins, 10)
    make_anew(log)
    sent.set()
    await wait_until_async(lambda: len(log.records) == 2, 10, "its tombstone")
    assert standing(log) == []


@pytest.mark.parametrize("cancelled", [True, False], ids=["cancelled", "waiting"])
async def test_an_append_that_the_broker_answers_after_the_close_is_no_fault(cancelled: bool) -> None:
    log = MemoryLog()
    turns = make(log)
    start = await turns.read(request("r1", "a"), mine)
    appending, inside, sent = log.append, asyncio.Event(), asyncio.Event()

    async def slow(topic: str, records: Sequence[tuple[bytes, bytes | None]]) -> list[int]:
        inside.set()
        await sent.wait()
        return await appending(topic, records)

    log.append = slow
    unheard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    begins = asyncio.create_task(turns.begin(request("r1", "a"), 1, 0, mine, start.mark))
    await asyncio.wait_for(inside.wait(), 10)
    if cancelled:
        begins.cancel()
        await asyncio.wait({begins})
    turns.close()
    sent.set()
    await wait_until_async(lambda: log.records, 10, "it is appended")
    with pytest.raises(asyncio.CancelledError if cancelled else LostOwnership):
        await begins
    del begins  # its traceback holds what it waited for
    for _ in range(5):  # whoever went on behind it ends
        await asyncio.sleep(0)
    gc.collect()
    assert unheard == []


# -- images


class Marks:
    """What is held, and the order of everything that was done."""

    def __init__(self, log: MemoryLog) -> None:
        self.held: set[str] = set()
        self.done: list[tuple[str, int]] = []
        self.erased: str | None = None
        self.fails = 0
        self._log = log

    def hold(self, tenant: str, conversation_id: str, artifact_ids: Iterable[str]) -> None:
        if self.fails:
            self.fails -= 1
            raise Overloaded("the store is away")
        assert (tenant, conversation_id) == ("default", "c1")
        self.held |= set(artifact_ids)
        self.done.append(("hold", len(self._log.records)))

    def let_go(self, tenant: str, conversation_id: str, artifact_ids: Iterable[str]) -> None:
        self.held -= set(artifact_ids)

    def keep_only(self, tenant: str, conversation_id: str, artifact_ids: Set[str], erased: str) -> None:
        self.held &= artifact_ids
        self.erased = erased


def picture(name: str) -> ArtifactRef:
    return ArtifactRef(artifact_id=name, uri=name, media_type="image/png", size_bytes=1, sha256=name)


def drawn(of: InferenceRequest, *names: str, epoch: int = 1) -> ConversationMessage:
    return answer_message(
        of, "", epoch=epoch, attempt=1, model="m", finish_reason="stop", usage=None, now_ms=0,
        artifacts=[picture(name) for name in names],
    )  # fmt: skip


def holding(log: MemoryLog) -> tuple[Turns, Marks]:
    marks, watch = Marks(log), BrokerWatch(lambda _: not log.away)
    naming = TopicNames().conversation
    return Turns(log, CODEC, naming, threads=1, cached_bytes=1 << 20, watch=watch, held=marks), marks


def drawing(request_id: str, prompt: str) -> InferenceRequest:
    return InferenceRequest(
        request_id=request_id,
        task="image_generation",
        conversation_id="c1",
        created_at=0,
        image_generation={"prompt": prompt},
    )


async def test_images_are_held_before_their_turns_are_written() -> None:
    log = MemoryLog()
    turns, marks = holding(log)
    asked = drawing("r1", "a cat")
    start = await turns.read(asked, mine)
    assert await turns.begin(asked, 1, 0, mine, start.mark, {0: [picture("brought")]})
    assert marks.done == [("hold", 0)]
    await turns.finish(drawn(asked, "cat-1", "cat-2"), mine, "first")
    assert marks.done == [("hold", 0), ("hold", 1)], "before each record"
    assert marks.held == {"brought", "cat-1", "cat-2"}
    later = await turns.read(drawing("r2", "another"), mine)
    assert [(one.role, one.content, [a.artifact_id for a in one.artifacts]) for one in later.pictured] == [
        ("user", "a cat", ["brought"]),
        ("assistant", "", ["cat-1", "cat-2"]),
    ]
    assert (await turns.read(asked, mine)).shown == {0: [picture("brought")]}


async def test_a_store_that_is_away_is_waited_for_and_nothing_is_written_before() -> None:
    log = MemoryLog()
    turns, marks = holding(log)
    marks.fails = 2
    asked = drawing("r1", "a cat")
    start = await turns.read(asked, mine)
    assert await turns.begin(asked, 1, 0, mine, start.mark, {0: [picture("brought")]})
    assert marks.held == {"brought"}
    assert log.keys() == ["r1/in/0/1"]


async def test_images_of_an_answer_that_lost_are_let_go() -> None:
    log = MemoryLog()
    turns, marks = holding(log)
    asked = drawing("r1", "a cat")
    await take(turns, asked)
    first = drawn(asked, "theirs")
    log.rival = [(conversation_message_key(first).encode(), CODEC.encode(first))]
    winner = await turns.finish(drawn(asked, "ours", epoch=2), mine, "first")
    assert [one.artifact_id for one in winner.artifacts] == ["theirs"]
    assert "ours" not in marks.held


async def test_an_erasure_keeps_only_what_other_turns_refer_to() -> None:
    log = MemoryLog()
    turns, marks = holding(log)
    first, second = drawing("r1", "a cat"), drawing("r2", "a dog")
    await take(turns, first)
    await turns.finish(drawn(first, "cat", "both"), mine, "first")
    start = await turns.read(second, mine)
    assert await turns.begin(second, 1, 0, mine, start.mark, {0: [picture("both")]})
    marks.held |= {"of an attempt that died"}
    assert await turns.erase("default", "c1", "r1") == 2
    assert (marks.held, marks.erased) == ({"both"}, "r1")
    assert await turns.erase("default", "c1", "r2") == 1
    assert marks.held == set()


async def test_an_erasure_lets_go_of_nothing_that_an_answer_is_about_to_refer_to() -> None:
    """Its images were held already, and it waited for the erasure: the conversation's own images could be swept."""
    log = MemoryLog()
    turns, marks = holding(log)
    first, second = drawing("r1", "a cat"), drawing("r2", "a dog")
    await take(turns, first)
    await turns.finish(drawn(first, "cat"), mine, "first")
    await take(turns, second)
    appending, finishing = log.append, list[asyncio.Task[ConversationMessage]]()

    async def answered_meanwhile(topic: str, records: Sequence[tuple[bytes, bytes | None]]) -> list[int]:
        log.append = appending
        finishing.append(asyncio.create_task(turns.finish(drawn(second, "dog"), mine, "first")))
        await wait_until_async(lambda: "dog" in marks.held, 5)
        return await appending(topic, records)

    log.append = answered_meanwhile
    assert await turns.erase("default", "c1", "r1") == 2
    await asyncio.gather(*finishing)
    assert standing(log)[-1] == "r2/out/1"
    assert marks.held == {"dog"}
    assert await turns.erase("default", "c1", "r2") == 2
    assert marks.held == set()


# -- summaries


def summing(request_id: str, *, conversation_id: str | None = "c1") -> InferenceRequest:
    return InferenceRequest(
        request_id=request_id,
        task="summarization",
        conversation_id=conversation_id,
        created_at=0,
        summarization={} if conversation_id else {"conversation_id": "c1"},
    )


def summary_of(of: InferenceRequest, text: str, through: int) -> ConversationMessage:
    return as_summary(answer(of, text), through)


async def add(turns: Turns, request_id: str, through: int | None = None) -> ConversationMessage:
    """A summary, from what is to be summed up to its record."""
    of = summing(request_id)
    told = await turns.to_sum_up(of, "c1", through, mine)
    assert told is not None
    text = f"{request_id}: " + " ".join(contents(told.past.messages))
    return await turns.add_summary(summary_of(of, text, told.through), mine, told.mark)


async def two_turns(turns: Turns) -> None:
    for name, question in (("r1", "a"), ("r2", "b")):
        of = request(name, question)
        await take(turns, of)
        await turns.finish(answer(of, question.upper()), mine, "first")


async def test_a_summary_stands_for_the_turns_that_it_covers_wholly() -> None:
    log = MemoryLog()
    turns = make(log)
    await two_turns(turns)
    made = await add(turns, "s1", through=2)  # the second question, and not its answer
    assert (made.covers_through, log.keys()[-1]) == (2, "s1/summary/1")
    for reader in (turns, make(log)):
        past = (await reader.read(request("r3", "c"), mine)).past
        assert contents(past.messages) == ["a", "A", "b", "B"], "it is no message"
        assert past.summary == Summary(text="s1: a A b", through=2, turns=1)


async def test_a_turn_sees_only_summaries_that_stood_before_its_input() -> None:
    log = MemoryLog()
    turns = make(log)
    await two_turns(turns)
    await take(turns, request("r3", "c"))
    await add(turns, "s1", through=1)
    assert (await turns.read(request("r3", "c"), mine)).past.summary is None, "as in its first attempt"
    assert (await turns.read(request("r4", "d"), mine)).past.summary is not None


async def test_the_summary_that_covers_most_counts_and_of_two_alike_the_newer() -> None:
    log = MemoryLog()
    turns = make(log)
    await two_turns(turns)
    for name, through in (("s1", 3), ("s2", 1), ("s3", 3)):
        await add(turns, name, through)
    summary = (await turns.read(request("r3", "c"), mine)).past.summary
    assert summary is not None
    assert (summary.text.split(":")[0], summary.turns) == ("s3", 2)


async def test_the_next_summary_goes_on_from_the_last() -> None:
    log = MemoryLog()
    turns = make(log)
    await two_turns(turns)
    await add(turns, "s1", through=1)
    told = await turns.to_sum_up(summing("s2"), "c1", None, mine)
    assert told is not None
    assert contents(told.past.messages) == ["b", "B"]
    assert told.past.summary == Summary(text="s1: a A", through=1, turns=0)
    again = await turns.to_sum_up(summing("s3"), "c1", 1, mine)
    assert again is not None
    assert (contents(again.past.messages), again.past.summary) == (["a", "A"], None), "made anew, not of itself"
    read_only = await turns.to_sum_up(summing("s4", conversation_id=None), "c1", None, mine)
    assert read_only is not None
    assert contents(read_only.past.messages) == ["a", "A", "b", "B"]


async def test_a_request_adds_one_summary() -> None:
    log = MemoryLog()
    turns = make(log)
    await two_turns(turns)
    first = await add(turns, "s1", through=1)
    told = await make(log).to_sum_up(summing("s1"), "c1", None, mine)
    assert told is not None
    assert told.standing == first
    log.lose_answers = 1
    await add(turns, "s2")
    assert sum(b"/summary/" in key for _, key, _ in log.records) == 2


async def test_nothing_is_summed_up_of_what_is_not_there() -> None:
    log = MemoryLog()
    turns = make(log)
    assert await turns.to_sum_up(summing("s"), "c1", None, mine) is None
    assert not log.made
    await two_turns(turns)
    log.records = [(offset + 5, key, value) for offset, key, value in log.records]
    assert await make(log).to_sum_up(summing("s"), "c1", 4, mine) is None


async def test_a_summary_of_a_deleted_conversation_is_not_added_to_the_next() -> None:
    log = MemoryLog()
    turns = make(log)
    await two_turns(turns)
    told = await turns.to_sum_up(summing("s"), "c1", None, mine)
    assert told is not None
    log.records.clear()
    log.topic_id = "second"
    with pytest.raises(Cancelled):
        await turns.add_summary(summary_of(summing("s"), "x", 3), mine, told.mark)
    assert not log.records


async def test_an_erasure_takes_the_summaries_along_into_which_the_turn_went() -> None:
    log = MemoryLog()
    turns = make(log)
    await two_turns(turns)
    await add(turns, "s1", through=1)
    await add(turns, "s2")
    assert await turns.erase("default", "c1", "r2") == 3, "its input, its answer, a summary"
    past = (await turns.read(request("r3", "c"), mine)).past
    assert contents(past.messages) == ["a", "A"]
    assert past.summary is not None
    assert past.summary.text == "s1: a A"
    assert await turns.erase("default", "c1", "s1") == 1
    assert (await make(log).read(request("r3", "c"), mine)).past.summary is None


async def test_what_is_erased_while_it_is_summed_up_stays_erased() -> None:
    log = MemoryLog()
    turns = make(log)
    await two_turns(turns)
    told = await turns.to_sum_up(summing("s"), "c1", None, mine)
    assert told is not None
    await turns.erase("default", "c1", "r1")
    with pytest.raises(Conflict):
        await turns.add_summary(summary_of(summing("s"), "a A b B", told.through), mine, told.mark)
    assert not any(b"/summary/" in key for _, key, _ in log.records)


async def test_a_summary_whose_base_is_erased_is_not_added_and_one_beside_others_is() -> None:
    log = MemoryLog()
    turns = make(log)
    await two_turns(turns)
    await add(turns, "s1", through=1)
    told = await turns.to_sum_up(summing("s2"), "c1", None, mine)
    assert told is not None
    beside = await add(turns, "s3", through=2)
    made = await turns.add_summary(summary_of(summing("s2"), "x", told.through), mine, told.mark)
    assert made.content == "x", "another summary came between, and nothing has gone"
    assert beside.covers_through == 2
    late = await turns.to_sum_up(summing("s4"), "c1", 2, mine)
    assert late is not None
    await turns.erase("default", "c1", "s1")
    with pytest.raises(Conflict):
        await turns.add_summary(summary_of(summing("s4"), "y", late.through), mine, late.mark)


async def test_an_erasure_that_is_cut_off_finds_the_summaries_again() -> None:
    log = MemoryLog()
    turns = make(log)
    await two_turns(turns)
    await add(turns, "s1")
    keys = turns._refreshed(TOPIC, 1.0).keys_of("r2")  # pyright: ignore[reportPrivateUsage]
    assert keys == [b"s1/summary/1", b"r2/out/1", b"r2/in/0/1"], "the oldest of its own last"
    await log.append(TOPIC, [(key, None) for key in keys[:2]])
    await log.append(TOPIC, [(b"s2/summary/1", CODEC.encode(summary_of(summing("s2"), "b B", 3)))])
    assert await make(log).erase("default", "c1", "r2") == 2, "the question, and a summary that came meanwhile"
    assert (await make(log).read(request("r9", "c"), mine)).past.summary is None


async def test_a_summary_that_comes_while_a_turn_is_prepared_makes_it_prepare_again() -> None:
    """Else its next attempt would have another prompt than the first."""
    log = MemoryLog()
    turns = make(log)
    await two_turns(turns)
    asked = request("r3", "c")
    start = await turns.read(asked, mine)
    await add(turns, "s1", through=1)
    assert await turns.begin(asked, 1, 0, mine, start.mark) is None
    again = await turns.read(asked, mine)
    assert await turns.begin(asked, 1, 0, mine, again.mark)
    assert (await make(log).read(asked, mine)).past == again.past


async def test_two_copies_of_a_request_leave_one_summary_that_counts() -> None:
    log = MemoryLog()
    turns = make(log)
    await two_turns(turns)
    first = summary_of(summing("s"), "first", 1)
    second = replace(summary_of(summing("s"), "second", 3), epoch=2)
    await log.append(TOPIC, [(conversation_message_key(one).encode(), CODEC.encode(one)) for one in (first, second)])
    assert (await turns.summary(summing("s"), mine)) == first
    summary = (await turns.read(request("r3", "c"), mine)).past.summary
    assert summary is not None
    assert summary.text == "first"


async def test_an_erased_summary_leaves_that_of_another_request() -> None:
    log = MemoryLog()
    turns = make(log)
    await two_turns(turns)
    await add(turns, "s1", through=1)
    await add(turns, "s2", through=1)
    assert await turns.erase("default", "c1", "s1") == 1
    summary = (await make(log).read(request("r3", "c"), mine)).past.summary
    assert summary is not None
    assert summary.text == "s2: a A"
