"""Turns against a log in memory: own input once, answers found again, lowest offset wins, contexts from the past."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from kit.worker_turns import Holds, MemoryLog, answer, contents, mine, picture, request, take, turn, turns_of
from penstock.processors.conversations.messages import as_summary, input_messages
from penstock.processors.conversations.turns import ConversationTurns, LostOwnership, ToSumUp
from penstock.processors.earlier_messages import EarlierMessages, Summary
from penstock.schemas.errors import BrokerUnavailable, Cancelled, Conflict
from penstock.schemas.records import ConversationMessage, InferenceRequest
from support import wait_until_async


class Commands:
    """Whether the turn is cancelled. The worker knows once it has caught up."""

    def __init__(self) -> None:
        self.cancelled = self.known = False
        self.looks = 0

    def catch_up(self, within_s: float) -> None:
        self.looks += 1
        self.known = self.cancelled

    def mine(self) -> bool:
        return not self.known


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog()


@pytest.fixture
def commands() -> Commands:
    return Commands()


@pytest.fixture
def holds(log: MemoryLog) -> Holds:
    return Holds(log)


@pytest.fixture
async def turns(log: MemoryLog, commands: Commands, holds: Holds) -> ConversationTurns:
    return turns_of(log, catch_up=commands.catch_up, held=holds)


async def test_a_turn_appends_its_input_once_and_sees_only_its_past(log: MemoryLog, turns: ConversationTurns) -> None:
    first, second = request("r1", "a", "b"), request("r2", "c")
    ahead = await turns.read(first, mine)
    assert (ahead.answer, ahead.past.messages, log.made) == (None, [], False), "reading makes no topic"
    assert await turns.begin(first, 1, 0, mine, ahead.mark)
    await turns.finish(answer(first, "A"), mine, "first")
    start = await take(turns, second)
    assert contents(start.past.messages) == ["a", "b", "A"]
    assert log.keys() == ["r1/in/0/1", "r1/in/1/1", "r1/out/1", "r2/in/0/1"]
    # Begun again in a later epoch, in another worker: nothing is appended twice, and the context is the same.
    again = await take(turns_of(log), second, epoch=2)
    assert contents(again.past.messages) == ["a", "b", "A"]
    assert len(log.records) == 4


@pytest.mark.parametrize(("change", "past"), [("turn", ["a", "A"]), ("erasure", []), ("rival", ["first"])])
async def test_a_log_that_changes_after_the_read_is_read_again(
    log: MemoryLog, turns: ConversationTurns, change: str, past: list[str]
) -> None:
    first, second = request("r1", "a"), request("r2", "b")
    if change == "erasure":
        await take(turns, first)
    ahead = await turns.read(second, mine)
    if change == "turn":
        await turn(turns, first, "A")
    elif change == "erasure":
        assert await turns.erase("default", "c1", "r1") == 1
    else:
        log.rivals = input_messages(request("r0", "first"), 1, 0)
    assert not await turns.begin(second, 1, 0, mine, ahead.mark)
    assert log.keys().count("r2/in/0/1") == int(change == "rival"), "what was seen before appends nothing"
    again = await turns.read(second, mine)
    assert contents(again.past.messages) == past
    log.records.append((len(log.records), b"?", b"garbage"))
    assert await turns.begin(second, 1, 0, mine, again.mark), "garbage repeats no preparation"
    assert log.keys().count("r2/in/0/1") == 1


@pytest.mark.parametrize("when", ["while the append waited", "after the input"])
async def test_an_answer_of_another_worker_is_the_outcome(log: MemoryLog, turns: ConversationTurns, when: str) -> None:
    """The append waited for Kafka, the group gave the partition to another worker, and that one answered."""
    asked = request("r1", "a")
    start = await turns.read(asked, mine)
    if when == "after the input":
        assert await turns.begin(asked, 1, 0, mine, start.mark)
        await turns_of(log).finish(answer(asked, "theirs"), mine, "first")
    else:
        log.rivals = [*input_messages(asked, 1, 0), answer(asked, "theirs", epoch=2)]
    assert not await turns.begin(asked, 2, 0, mine, start.mark)
    assert (await turns.read(asked, mine)).answer.content == "theirs"


async def test_the_lowest_offset_of_an_input_counts(log: MemoryLog) -> None:
    asked, other = request("r1", "a"), request("r2", "b")
    await take(turns_of(log), asked)
    await take(turns_of(log), other)
    log.put(*input_messages(asked, 2, 0))
    assert (await turns_of(log).read(asked, mine)).past.messages == []
    assert contents((await turns_of(log).read(request("r3", "c"), mine)).past.messages) == ["a", "b"]


async def test_a_crash_between_two_inputs_appends_the_missing_one(log: MemoryLog) -> None:
    await take(turns_of(log), request("r1", "a"))
    await take(turns_of(log), request("r1", "a", "b"), epoch=2)
    assert log.keys() == ["r1/in/0/1", "r1/in/1/2"]


async def test_only_the_tail_is_read_again(log: MemoryLog, turns: ConversationTurns) -> None:
    for number in range(3):
        await turn(turns, request(f"r{number}", "x"), "y")
    assert log.reads == [0, 2, 2, 4, 4]


async def test_the_cache_is_bounded_by_bytes(log: MemoryLog) -> None:
    small, asked = turns_of(log, cached_bytes=10_000), request("r1", "x" * 9_000)
    await take(small, asked)
    log.reads.clear()
    await small.read(asked, mine)
    assert log.reads == [0], "it is larger than the cache, so it is not kept"


async def test_a_lost_partition_writes_nothing(log: MemoryLog, turns: ConversationTurns) -> None:
    start = await turns.read(request("r1", "a"), mine)
    with pytest.raises(LostOwnership):
        await turns.begin(request("r1", "a"), 1, 0, lambda: False, start.mark)
    with pytest.raises(LostOwnership):
        await turns.finish(answer(request("r1", "a"), "A"), lambda: False, "first")
    assert log.records == []


async def test_erase_tombstones_every_record_of_the_request(log: MemoryLog, turns: ConversationTurns) -> None:
    first = request("r1", "a", "b")
    await turn(turns, first, "A")
    await take(turns, request("r2", "c"))
    assert await turns.erase("default", "c1", "r1") == 3
    assert {key for _, key, value in log.records if value is None} == {b"r1/in/0/1", b"r1/in/1/1", b"r1/out/1"}
    assert contents((await turns.read(request("r3", "d"), mine)).past.messages) == ["c"]
    assert await turns.erase("default", "c1", "r1") == 0


async def test_a_standing_answer_is_looked_up_without_writing(log: MemoryLog, turns: ConversationTurns) -> None:
    asked = request("r1", "a")
    assert await turns.answer(asked, mine) is None
    assert await turns.erase("default", "c1", "r1") == 0
    assert not log.made, "looking and erasing make no topic"
    await take(turns, asked)
    assert await turns.answer(asked, mine) is None
    await turns.finish(answer(asked, "A"), mine, "first")
    keys = log.keys()
    assert (await turns.answer(asked, mine)).content == "A"
    assert log.keys() == keys


async def test_turns_wait_for_kafka_and_continue(log: MemoryLog, turns: ConversationTurns) -> None:
    log.away = True
    reading = [asyncio.create_task(turns.read(request(f"r{n}", "a"), mine)) for n in range(3)]
    await asyncio.sleep(0.3)
    assert not any(task.done() for task in reading)
    log.away = False
    starts = await asyncio.wait_for(asyncio.gather(*reading), 2)
    assert [start.past.messages for start in starts] == [[], [], []]


@pytest.mark.parametrize("end", ["lost", "closed"])
async def test_waiting_for_kafka_ends_with_the_work_or_the_worker(
    log: MemoryLog, turns: ConversationTurns, end: str
) -> None:
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
    ours = end != "lost"
    if end == "closed":
        turns.close()
    outcomes = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5)
    assert [type(outcome) for outcome in outcomes] == [LostOwnership] * 4


@pytest.mark.parametrize("step", ["begin", "finish"])
async def test_an_append_without_acknowledgement_is_not_repeated(
    log: MemoryLog, turns: ConversationTurns, step: str
) -> None:
    asked = request("r1", "a")
    start = await turns.read(asked, mine)
    log.lost_acks = step == "begin"
    assert await turns.begin(asked, 1, 0, mine, start.mark)
    log.lost_acks = step == "finish"
    assert (await turns.finish(answer(asked, "A"), mine, "first")).content == "A"
    assert log.keys() == ["r1/in/0/1", "r1/out/1"]


async def test_calls_of_one_conversation_run_one_by_one_also_after_a_cancel(
    log: MemoryLog, turns: ConversationTurns
) -> None:
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


async def test_a_slow_kafka_gets_longer_attempts(log: MemoryLog, turns: ConversationTurns) -> None:
    """Short attempts alone would never get through."""
    find = log.find

    def slow(topic: str, timeout_s: float) -> str | None:
        if timeout_s < 3:
            raise BrokerUnavailable("no answer in time")
        return find(topic, timeout_s)

    log.find = slow
    assert (await asyncio.wait_for(turns.read(request("r1", "a"), mine), 10)).past.messages == []


# -- deleted conversations


def hold_append(log: MemoryLog) -> tuple[asyncio.Event, asyncio.Event]:
    """The next append waits for the second event. The first one is set when it waits."""
    waiting, released = asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        waiting.set()
        await released.wait()

    log.before["append"] = slow
    return waiting, released


@pytest.mark.parametrize("topic", ["none", "recreated", "made now"])
async def test_a_cancelled_turn_writes_nothing(
    log: MemoryLog, turns: ConversationTurns, commands: Commands, topic: str
) -> None:
    """Its cancel comes after its commands were read; also between that and the creation of the topic."""
    if topic == "recreated":
        await take(turns, request("r1", "a"))
        log.recreate()
    start = await turns.read(request("r2", "b"), commands.mine)
    if topic == "made now":
        log.before["open"] = lambda: setattr(commands, "cancelled", True)
    else:
        commands.cancelled = True
    with pytest.raises(LostOwnership):
        await turns.begin(request("r2", "b"), 1, 0, commands.mine, start.mark)
    assert (log.made, log.records) == (topic != "none", [])


async def test_commands_are_read_once_for_a_topic(turns: ConversationTurns, commands: Commands) -> None:
    for number in range(3):
        await turn(turns, request(f"r{number}", "x"), "y")
    assert commands.looks == 2, "when there is no topic, and when there is one"


@pytest.mark.parametrize("exists", [False, True], ids=["deleted", "recreated"])
async def test_a_turn_whose_topic_is_gone_is_read_again(log: MemoryLog, turns: ConversationTurns, exists: bool) -> None:
    await take(turns, request("r1", "a"))
    ahead = await turns.read(request("r2", "b"), mine)
    log.recreate()
    log.made = exists
    assert await turns.begin(request("r2", "b"), 1, 0, mine, ahead.mark) is None
    assert log.made == exists
    start = await turns.read(request("r2", "b"), mine)
    assert start.past.messages == []
    assert await turns.begin(request("r2", "b"), 1, 0, mine, start.mark) == "second"


@pytest.mark.parametrize("seen", [False, True], ids=["", "another turn saw the deletion"])
@pytest.mark.parametrize("exists", [False, True], ids=["deleted", "recreated"])
async def test_an_answer_whose_topic_is_gone_is_not_written(
    log: MemoryLog, turns: ConversationTurns, holds: Holds, exists: bool, seen: bool
) -> None:
    asked = drawing("r1", "a cat")
    await take(turns, asked)
    log.recreate()
    log.made = exists
    if seen:
        assert (await turns.read(request("r2", "b"), mine)).past.messages == []
    with pytest.raises(Cancelled, match="its conversation was deleted"):
        await asyncio.wait_for(turns.finish(answer(asked, "", "cat"), mine, "first"), 10)
    assert (log.live_keys(), log.made, holds.held) == ([], exists, set())


async def test_an_input_appended_to_the_next_topic_is_removed(log: MemoryLog, turns: ConversationTurns) -> None:
    await take(turns, request("r1", "a"))
    start = await turns.read(request("r2", "b"), mine)
    log.before["append"] = log.recreate
    assert await turns.begin(request("r2", "b"), 1, 0, mine, start.mark) is None
    assert log.live_keys() == []


async def test_a_broker_that_does_not_know_the_new_topic_yet(log: MemoryLog, turns: ConversationTurns) -> None:
    """It may hear of the topic a moment after the others."""
    asked = request("r1", "a")
    await take(turns, asked)
    log.find = Mock(side_effect=itertools.chain([None], itertools.repeat(log.topic_id)))
    assert (await turns.finish(answer(asked, "A"), mine, "first")).content == "A"
    assert log.keys() == log.live_keys() == ["r1/in/0/1", "r1/out/1"]


async def test_a_late_append_of_a_cancelled_turn_is_removed_from_the_next_topic(
    log: MemoryLog, turns: ConversationTurns
) -> None:
    asked, ours = request("r1", "a"), True
    await take(turns, asked)
    start = await turns.read(request("r2", "b"), mine)
    waiting, released = hold_append(log)
    begins = asyncio.create_task(turns.begin(request("r2", "b"), 1, 0, lambda: ours, start.mark))
    await asyncio.wait_for(waiting.wait(), 10)
    ours = False
    with pytest.raises(LostOwnership):
        await asyncio.wait_for(begins, 10)
    log.recreate()
    released.set()
    await wait_until_async(lambda: len(log.records) == 2, 10, "its tombstone")
    assert log.live_keys() == []


@pytest.mark.parametrize("cancelled", [True, False], ids=["cancelled", "waiting"])
async def test_an_acknowledgement_after_close_is_no_fault(
    log: MemoryLog, turns: ConversationTurns, cancelled: bool
) -> None:
    start = await turns.read(request("r1", "a"), mine)
    waiting, released = hold_append(log)
    unheard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    begins = asyncio.create_task(turns.begin(request("r1", "a"), 1, 0, mine, start.mark))
    await asyncio.wait_for(waiting.wait(), 10)
    if cancelled:
        begins.cancel()
        await asyncio.wait({begins})
    turns.close()
    released.set()
    await wait_until_async(lambda: log.records, 10, "it is appended")
    with pytest.raises(asyncio.CancelledError if cancelled else LostOwnership):
        await begins
    del begins  # its traceback holds what it waited for
    for _ in range(5):  # whoever went on behind it ends
        await asyncio.sleep(0)
    gc.collect()
    assert unheard == []


# -- images


def drawing(request_id: str, prompt: str) -> InferenceRequest:
    return request(request_id, image_generation={"prompt": prompt})


async def test_images_are_held_before_their_turns_are_written(turns: ConversationTurns, holds: Holds) -> None:
    """Nothing is written while the store is away."""
    holds.failures = 2
    asked = drawing("r1", "a cat")
    start = await turns.read(asked, mine)
    assert await turns.begin(asked, 1, 0, mine, start.mark, {0: [picture("brought")]})
    await turns.finish(answer(asked, "", "cat-1", "cat-2"), mine, "first")
    assert (holds.failures, holds.records_before) == (0, [0, 1]), "before each record"
    assert holds.held == {"brought", "cat-1", "cat-2"}
    later = await turns.read(drawing("r2", "another"), mine)
    assert [(one.role, one.content, [a.artifact_id for a in one.artifacts]) for one in later.pictured] == [
        ("user", "a cat", ["brought"]),
        ("assistant", "", ["cat-1", "cat-2"]),
    ]
    assert (await turns.read(asked, mine)).shown == {0: [picture("brought")]}


async def test_images_of_a_losing_answer_are_released(log: MemoryLog, turns: ConversationTurns, holds: Holds) -> None:
    asked = drawing("r1", "a cat")
    await take(turns, asked)
    log.rivals = [answer(asked, "", "theirs")]
    winner = await turns.finish(answer(asked, "", "ours", epoch=2), mine, "first")
    assert [one.artifact_id for one in winner.artifacts] == ["theirs"]
    assert "ours" not in holds.held


async def test_an_erasure_keeps_only_what_other_turns_refer_to(turns: ConversationTurns, holds: Holds) -> None:
    first, second = drawing("r1", "a cat"), drawing("r2", "a dog")
    await turn(turns, first, "", "cat", "both")
    start = await turns.read(second, mine)
    assert await turns.begin(second, 1, 0, mine, start.mark, {0: [picture("both")]})
    holds.held |= {"of an attempt that died"}
    assert await turns.erase("default", "c1", "r1") == 2
    assert (holds.held, holds.erased) == ({"both"}, "r1")
    assert await turns.erase("default", "c1", "r2") == 1
    assert holds.held == set()


async def test_an_erasure_keeps_images_of_an_answer_in_progress(
    log: MemoryLog, turns: ConversationTurns, holds: Holds
) -> None:
    """The answer already holds its images while it waits for the erasure."""
    first, second = drawing("r1", "a cat"), drawing("r2", "a dog")
    await turn(turns, first, "", "cat")
    await take(turns, second)
    finishing = list[asyncio.Task[ConversationMessage]]()

    async def answered_meanwhile() -> None:
        finishing.append(asyncio.create_task(turns.finish(answer(second, "", "dog"), mine, "first")))
        await wait_until_async(lambda: "dog" in holds.held, 5)

    log.before["append"] = answered_meanwhile
    assert await turns.erase("default", "c1", "r1") == 2
    await asyncio.gather(*finishing)
    assert log.live_keys()[-1] == "r2/out/1"
    assert holds.held == {"dog"}
    assert await turns.erase("default", "c1", "r2") == 2
    assert holds.held == set()


# -- summaries


def summary_of(request_id: str, text: str, through: int) -> ConversationMessage:
    return as_summary(answer(request(request_id, summarization={}), text), through)


async def to_sum_up(turns: ConversationTurns, request_id: str, through: int | None = None) -> ToSumUp:
    found = await turns.to_sum_up(request(request_id, summarization={}), "c1", through, mine)
    assert found is not None
    return found


async def add(turns: ConversationTurns, request_id: str, through: int | None = None) -> ConversationMessage:
    """A summary, from its input to its record."""
    found = await to_sum_up(turns, request_id, through)
    text = f"{request_id}: " + " ".join(contents(found.past.messages))
    return await turns.add_summary(summary_of(request_id, text, found.through), mine, found.mark)


async def two_turns(turns: ConversationTurns) -> None:
    await turn(turns, request("r1", "a"), "A")
    await turn(turns, request("r2", "b"), "B")


async def past_of(turns: ConversationTurns) -> EarlierMessages:
    return (await turns.read(request("reader", "?"), mine)).past


async def test_a_summary_replaces_only_whole_turns(log: MemoryLog, turns: ConversationTurns) -> None:
    await two_turns(turns)
    made = await add(turns, "s1", through=2)  # the second question, and not its answer
    assert (made.covers_through, log.keys()[-1]) == (2, "s1/summary/1")
    for reader in (turns, turns_of(log)):
        past = await past_of(reader)
        assert contents(past.messages) == ["a", "A", "b", "B"], "it is no message"
        assert past.summary == Summary(text="s1: a A b", through=2, turns=1)


async def test_a_turn_sees_only_summaries_that_stood_before_its_input(turns: ConversationTurns) -> None:
    await two_turns(turns)
    await take(turns, request("r3", "c"))
    await add(turns, "s1", through=1)
    assert (await turns.read(request("r3", "c"), mine)).past.summary is None, "as in its first attempt"
    assert (await turns.read(request("r4", "d"), mine)).past.summary is not None


async def test_the_summary_with_the_widest_cover_counts_then_the_newest(
    log: MemoryLog, turns: ConversationTurns
) -> None:
    await two_turns(turns)
    for name, through in (("s1", 3), ("s2", 1), ("s3", 3)):
        await add(turns, name, through)
    summary = (await past_of(turns)).summary
    assert (summary.text.split(":")[0], summary.turns) == ("s3", 2)
    for erased, left in (("s3", "s1"), ("s1", "s2")):
        assert await turns.erase("default", "c1", erased) == 1
        assert (await past_of(turns_of(log))).summary.text.split(":")[0] == left


async def test_the_next_summary_continues_the_last(turns: ConversationTurns) -> None:
    await two_turns(turns)
    await add(turns, "s1", through=1)
    found = await to_sum_up(turns, "s2")
    assert contents(found.past.messages) == ["b", "B"]
    assert found.past.summary == Summary(text="s1: a A", through=1, turns=0)
    again = await to_sum_up(turns, "s3", 1)
    assert (contents(again.past.messages), again.past.summary) == (["a", "A"], None), "made anew, not of itself"
    elsewhere = request("s4", conversation_id=None, summarization={"conversation_id": "c1"})
    read_only = await turns.to_sum_up(elsewhere, "c1", None, mine)
    assert contents(read_only.past.messages) == ["a", "A", "b", "B"]


async def test_a_request_adds_one_summary(log: MemoryLog, turns: ConversationTurns) -> None:
    await two_turns(turns)
    first = await add(turns, "s1", through=1)
    found = await to_sum_up(turns_of(log), "s1")
    assert found.standing == first
    log.lost_acks = 1
    await add(turns, "s2")
    assert sum(b"/summary/" in key for _, key, _ in log.records) == 2


async def test_an_empty_range_has_no_summary(log: MemoryLog, turns: ConversationTurns) -> None:
    assert await turns.to_sum_up(request("s", summarization={}), "c1", None, mine) is None
    assert not log.made
    await two_turns(turns)
    log.records = [(offset + 5, key, value) for offset, key, value in log.records]
    assert await turns_of(log).to_sum_up(request("s", summarization={}), "c1", 4, mine) is None


@pytest.mark.parametrize("change", ["recreated", "erased"])
async def test_a_summary_of_what_is_gone_is_refused(log: MemoryLog, turns: ConversationTurns, change: str) -> None:
    await two_turns(turns)
    found = await to_sum_up(turns, "s")
    if change == "recreated":
        log.recreate()
    else:
        await turns.erase("default", "c1", "r1")
    with pytest.raises(Cancelled if change == "recreated" else Conflict):
        await turns.add_summary(summary_of("s", "a A b B", found.through), mine, found.mark)
    assert not any(b"/summary/" in key for _, key, _ in log.records)
    assert log.records or change == "recreated"


async def test_an_erasure_removes_summaries_of_the_turn(log: MemoryLog, turns: ConversationTurns) -> None:
    await two_turns(turns)
    await add(turns, "s1", through=1)
    await add(turns, "s2")
    assert await turns.erase("default", "c1", "r2") == 3, "its input, its answer, a summary"
    past = await past_of(turns)
    assert contents(past.messages) == ["a", "A"]
    assert past.summary.text == "s1: a A"
    assert await turns.erase("default", "c1", "s1") == 1
    assert (await past_of(turns_of(log))).summary is None


async def test_a_summary_whose_base_is_erased_is_refused(turns: ConversationTurns) -> None:
    await two_turns(turns)
    await add(turns, "s1", through=1)
    found = await to_sum_up(turns, "s2")
    beside = await add(turns, "s3", through=2)
    made = await turns.add_summary(summary_of("s2", "x", found.through), mine, found.mark)
    assert made.content == "x", "another summary came between, and nothing has gone"
    assert beside.covers_through == 2
    late = await to_sum_up(turns, "s4", 2)
    await turns.erase("default", "c1", "s1")
    with pytest.raises(Conflict):
        await turns.add_summary(summary_of("s4", "y", late.through), mine, late.mark)


async def test_an_interrupted_erasure_finds_the_summaries_again(log: MemoryLog, turns: ConversationTurns) -> None:
    await two_turns(turns)
    await add(turns, "s1")
    append, keys = log.append, list[bytes]()

    async def append_two(topic: str, records: Sequence[tuple[bytes, bytes | None]]) -> list[int]:
        keys.extend(key for key, _ in records)
        await append(topic, records[:2])
        raise ConnectionAbortedError

    log.append = append_two
    with pytest.raises(ConnectionAbortedError):
        await turns.erase("default", "c1", "r2")
    assert keys == [b"s1/summary/1", b"r2/out/1", b"r2/in/0/1"], "the oldest of its own last"
    log.append = append
    log.put(summary_of("s2", "b B", 3))
    assert await turns_of(log).erase("default", "c1", "r2") == 2, "the question, and a summary that came meanwhile"
    assert (await past_of(turns_of(log))).summary is None


async def test_a_summary_during_preparation_repeats_the_preparation(log: MemoryLog, turns: ConversationTurns) -> None:
    """Otherwise the next attempt would have another prompt."""
    await two_turns(turns)
    asked = request("r3", "c")
    start = await turns.read(asked, mine)
    await add(turns, "s1", through=1)
    assert await turns.begin(asked, 1, 0, mine, start.mark) is None
    again = await turns.read(asked, mine)
    assert await turns.begin(asked, 1, 0, mine, again.mark)
    assert (await turns_of(log).read(asked, mine)).past == again.past


async def test_two_copies_of_a_request_leave_one_summary_that_counts(log: MemoryLog, turns: ConversationTurns) -> None:
    await two_turns(turns)
    first = summary_of("s", "first", 1)
    second = replace(summary_of("s", "second", 3), epoch=2)
    log.put(first, second)
    assert await turns.summary(request("s", summarization={}), mine) == first
    assert (await past_of(turns)).summary.text == "first"
