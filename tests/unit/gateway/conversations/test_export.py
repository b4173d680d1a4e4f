"""Exports while the conversation changes: all messages of its beginning, or an error as the last line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from conversation_logs import FakeLog, message, reader
from gateway_parts import service_with
from kit.gateway_http import gateway_app
from penstock.gateway.routes import conversation_export
from penstock.schemas.topics import TopicNames

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


def lines(client: TestClient, query: str = "") -> list[dict[str, Any]]:
    return [json.loads(line) for line in client.get(f"/v1/conversations/c/export{query}").text.splitlines()]


def test_an_export_of_several_pages_is_whole_and_leaves_out_erased_messages(log: FakeLog, client: TestClient) -> None:
    write(log, *range(250))
    write(log, 7, erased=True)
    head, *told = lines(client)
    assert (head["messages"], head["log_id"], len(told)) == (249, "id-0", 249)
    assert [line["source"]["offset"] for line in told] == [n for n in range(250) if n != 7]


def test_a_tree_is_exported_by_several_pages_with_many_erased_messages_between(
    log: FakeLog, client: TestClient
) -> None:
    write(log, *range(1_300))
    write(log, *range(100, 400), erased=True)
    head, *told = lines(client, "?tree=true")
    assert (head["version"], head["messages"], head["forks"]) == (2, 1_000, 0)
    assert [line["source"]["offset"] for line in told] == [*range(100), *range(400, 1_300)]


def while_the_first_page_is_read(log: FakeLog, act: Any) -> None:
    """The read before is that of the index."""
    calls = iter(range(1_000))
    log.before_read = lambda: act() if next(calls) == 1 else None


def test_messages_appended_meanwhile_are_not_exported(log: FakeLog, client: TestClient) -> None:
    write(log, *range(150))
    while_the_first_page_is_read(log, lambda: write(log, 150))
    assert len(lines(client)) == 1 + 150


@pytest.mark.parametrize(("query", "count"), [("", 150), ("?tree=true", 1_100)])
@pytest.mark.parametrize("made_anew", [False, True])
def test_an_export_that_loses_messages_meanwhile_ends_with_an_error(
    log: FakeLog, client: TestClient, made_anew: bool, query: str, count: int
) -> None:
    write(log, *range(count))

    def change() -> None:
        if made_anew:
            log.ids[TOPIC] = "id-1"
        else:
            write(log, count - 10, erased=True)

    while_the_first_page_is_read(log, change)
    last = lines(client, query)[-1]
    assert (last["type"], last["error"]["code"]) == ("error", "conflict")
