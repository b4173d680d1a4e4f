"""What pages and items are read with: consumers that are used again, items in OpenAI's form, exports."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, repeat
from typing import Any
from unittest.mock import Mock

import pytest
from fastapi.testclient import TestClient

from conversation_logs import FakeLog, message, reader
from gateway_parts import service_with
from kit.gateway_http import gateway_app
from kit.records import conversation_message
from penstock.cli.commands.item_words import item_role, item_text
from penstock.common.conversations import Turn
from penstock.common.reader import RawMessage
from penstock.common.settings import KafkaSettings
from penstock.gateway.conversations import log as log_module
from penstock.gateway.conversations.log import IDLE, USES, KafkaLog
from penstock.gateway.conversations.topics import OwnTopics
from penstock.gateway.openai.conversation_items import items_of_turn
from penstock.gateway.routes import conversation_export
from penstock.gateway.routes.item_ids import offset_of
from penstock.gateway.settings import GatewaySettings
from penstock.schemas.errors import BrokerUnavailable, InvalidRequest, NotFound
from penstock.schemas.topics import TopicNames


class Stage:
    """In the place of librdkafka: the consumers that were made, and what comes of the next readings."""

    def __init__(self) -> None:
        self.made: list[Mock] = []
        self.on_read = Mock()

    def make(self, *_: Any, **__: Any) -> Mock:
        self.made.append(Mock(**{"list_topics.side_effect": lambda *_, **__: self.on_read()}))
        return self.made[-1]

    def fails(self, *errors: Exception) -> None:
        self.on_read.side_effect = chain(errors, repeat(None))

    @property
    def reads(self) -> list[int]:
        return [one.list_topics.call_count for one in self.made]

    @property
    def closed(self) -> list[bool]:
        return [one.close.called for one in self.made]

    @property
    def opened(self) -> int:
        return self.closed.count(False)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    made = Stage()
    monkeypatch.setattr(log_module, "make_consumer", made.make)
    monkeypatch.setattr(log_module, "read_with", lambda *_: [])
    return made


def read(log: KafkaLog) -> None:
    log.read("t", 0, 1, time.monotonic() + 20)


def test_one_consumer_reads_again_and_again_until_it_is_replaced(stage: Stage) -> None:
    log = KafkaLog(KafkaSettings())
    for _ in range(USES):
        read(log)
    assert (stage.reads, stage.opened) == ([USES], 0)
    read(log)
    assert stage.reads == [USES, 1]
    log.close()
    assert stage.opened == 0


def test_a_used_consumer_that_fails_is_replaced_and_a_new_one_tells_the_failure(stage: Stage) -> None:
    log = KafkaLog(KafkaSettings())
    read(log)
    stage.fails(BrokerUnavailable("stale"))
    read(log)
    assert stage.closed == [True, False]
    stage.fails(BrokerUnavailable("stale"), BrokerUnavailable("away"))
    with pytest.raises(BrokerUnavailable, match="away"):
        read(log)
    assert stage.opened == 0
    stage.fails(RuntimeError("a defect"))
    with pytest.raises(RuntimeError):
        read(log)
    assert stage.opened == 0


def test_a_long_reading_that_fails_goes_on_with_another_consumer_where_it_was(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = KafkaLog(KafkaSettings())
    read(log)
    failures = {4: BrokerUnavailable("stale")}

    def batches(_: Any, tp: tuple[str, int], begin: int, end: int, *__: Any, **___: Any) -> Iterator[list[RawMessage]]:
        for first in range(begin, end, 2):
            if first in failures:
                raise failures.pop(first)
            yield [RawMessage(tp[0], 0, offset, 0, None, None) for offset in range(first, min(end, first + 2))]

    monkeypatch.setattr(log_module, "read_batches", batches)
    give_up = time.monotonic() + 20
    found = [[one.offset for one in some] for some in log.batches("t", 0, 7, give_up, 2)]
    assert found == [[0, 1], [2, 3], [4, 5], [6]]
    assert stage.closed == [True, False]
    assert list(log.batches("t", 7, 7, give_up, 2)) == []
    failures[2] = BrokerUnavailable("away")
    log.close()
    with pytest.raises(BrokerUnavailable, match="away"):
        list(log.batches("t", 0, 7, give_up, 2))
    assert stage.opened == 0


def test_the_pool_keeps_some_consumers_and_none_after_the_end(stage: Stage) -> None:
    log, together = KafkaLog(KafkaSettings()), threading.Barrier(IDLE + 3)
    stage.on_read.side_effect = together.wait
    with ThreadPoolExecutor(IDLE + 3) as threads:
        list(threads.map(lambda _: read(log), range(IDLE + 3)))
    assert (len(stage.made), stage.opened) == (IDLE + 3, IDLE)
    stage.on_read.side_effect = log.close
    read(log)
    assert stage.opened == 0


def test_a_topic_that_is_deleted_while_last_records_are_read_is_left_out(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics = {"a": 3, "b": 2, "empty": 0}

    def ends(_: Any, partitions: list[tuple[str, int]]) -> dict[tuple[str, int], int]:
        if topics.pop("b", None) is not None:
            raise NotFound("b")
        return {tp: topics[tp[0]] for tp in partitions}

    monkeypatch.setattr(log_module.admin, "partition_counts", lambda _, names: dict.fromkeys(set(topics) & {*names}, 1))
    monkeypatch.setattr(log_module.admin, "end_offsets", ends)
    log = KafkaLog(KafkaSettings())
    assert log.last_records(["a", "b", "empty"], time.monotonic() + 20) == {"a": None}
    with pytest.raises(BrokerUnavailable):
        log.last_records(["a"], time.monotonic())


def test_a_broker_without_any_topics_is_not_taken_for_one_without_conversations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known: dict[str, int] = {}
    monkeypatch.setattr(log_module.admin, "partition_counts", lambda *_, **__: known)
    layout = OwnTopics(GatewaySettings())
    with pytest.raises(BrokerUnavailable):
        layout.everyone()
    known |= {"inference.result": 1, "conversation.trip": 1, "conversations.acme.plan": 1}
    assert layout.everyone() == [("default", "trip"), ("acme", "plan")]
    assert layout.ids("acme") == ["plan"]


# -- messages as OpenAI's items


CALLS = [{"id": f"c{n}", "type": "function", "function": {"name": "gate", "arguments": f"[{n}]"}} for n in (0, 1)]


def turn(role: str = "user", **fields: Any) -> Turn:
    known: dict[str, Any] = {"direction": "in", "content": "hello", "created_at": 7_000, "request_id": "r"}
    return Turn(offset=5, message=conversation_message(role, **{**known, **fields}))


def test_a_message_is_one_item_with_the_place_in_its_id() -> None:
    (item,) = items_of_turn(turn())
    assert (item["id"], item["type"], item["role"], item["created_at"]) == ("msg_5", "message", "user", 7)
    assert item["content"] == [{"type": "input_text", "text": "hello"}]
    (answer,) = items_of_turn(turn(role="assistant"))
    assert answer["content"] == [{"type": "output_text", "text": "hello", "annotations": []}]
    assert (item_role(item), item_text(item)) == ("user", "hello")


def test_calls_of_tools_and_their_answers_are_items_of_their_own() -> None:
    calls = items_of_turn(turn(role="assistant", content="", tool_calls=CALLS))
    found = [(one["type"], one["id"], one["call_id"]) for one in calls]
    assert found == [("function_call", "fc_5_0", "c0"), ("function_call", "fc_5_1", "c1")]
    assert (item_role(calls[1]), item_text(calls[1])) == ("assistant", "gate([1])")
    said = items_of_turn(turn(role="assistant", content="I look.", tool_calls=CALLS))
    assert [one["id"] for one in said] == ["msg_5", "fc_5_0", "fc_5_1"]
    (output,) = items_of_turn(turn(role="tool", content="shut", tool_call_id="c0"))
    expected = {"type": "function_call_output", "id": "fco_5", "call_id": "c0", "output": "shut"}
    assert {name: output[name] for name in expected} == expected
    assert (item_role(output), item_text(output)) == ("tool", "shut")
    assert {offset_of(one["id"], "after") for one in [*said, output]} == {5}


@pytest.mark.parametrize("name", ["", "5", "msg_", "msg_x", "other_5", "fc", "msg_-1"])
def test_what_is_no_items_id_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest):
        offset_of(name, "after")


# -- exports while the conversation changes


TOPIC = TopicNames().conversation("default", "c")


@pytest.fixture
def log() -> FakeLog:
    return FakeLog(TOPIC)


@pytest.fixture
def client(log: FakeLog) -> Iterator[TestClient]:
    app = gateway_app(conversation_export.router, service=service_with(reader(log)))
    with TestClient(app, base_url="http://127.0.0.1", client=("127.0.0.1", 1)) as made:
        yield made


def write(log: FakeLog, *numbers: int, erased: bool = False) -> None:
    for number in numbers:
        log.write(message(f"r{number}", "in", 0, 1), tombstone=erased, topic=TOPIC)


def lines(client: TestClient) -> list[dict[str, Any]]:
    return [json.loads(line) for line in client.get("/v1/conversations/c/export").text.splitlines()]


def test_an_export_of_several_pages_is_whole_and_leaves_out_erased_messages(log: FakeLog, client: TestClient) -> None:
    write(log, *range(250))
    write(log, 7, erased=True)
    head, *told = lines(client)
    assert (head["messages"], head["log_id"], len(told)) == (249, "id-0", 249)
    assert [line["source"]["offset"] for line in told] == [n for n in range(250) if n != 7]


def while_the_first_page_is_read(log: FakeLog, act: Any) -> None:
    """The read before is that of the index."""
    calls = iter(range(1_000))
    log.before_read = lambda: act() if next(calls) == 1 else None


def test_messages_appended_meanwhile_are_not_exported(log: FakeLog, client: TestClient) -> None:
    write(log, *range(150))
    while_the_first_page_is_read(log, lambda: write(log, 150))
    assert len(lines(client)) == 1 + 150


@pytest.mark.parametrize("made_anew", [False, True])
def test_an_export_that_loses_messages_meanwhile_ends_with_an_error(
    log: FakeLog, client: TestClient, made_anew: bool
) -> None:
    write(log, *range(150))

    def change() -> None:
        if made_anew:
            log.ids[TOPIC] = "id-1"
        else:
            write(log, 140, erased=True)

    while_the_first_page_is_read(log, change)
    last = lines(client)[-1]
    assert (last["type"], last["error"]["code"]) == ("error", "conflict")
