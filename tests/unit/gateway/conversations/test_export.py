"""Exports while the conversation changes: all that stood there when it began, or an error as the last line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from conversation_logs import FakeLog, message, reader
from gateway_parts import edge_of, service_with
from penstock.gateway.context import GatewayContext, put_context
from penstock.gateway.edge.auth import AuthPolicy
from penstock.gateway.edge.edge import install_edge
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.routes import conversation_export
from penstock.gateway.settings import GatewaySettings
from penstock.schemas.topics import TopicNames

TOPIC = TopicNames().conversation("default", "c")


@pytest.fixture
def log() -> FakeLog:
    return FakeLog(TOPIC)


@pytest.fixture
def client(log: FakeLog) -> Iterator[TestClient]:
    context = GatewayContext(settings=GatewaySettings(), policy=AuthPolicy.build(), allowances=Allowances())
    context.connected = service_with(reader(log))
    app = FastAPI()
    put_context(app, context)
    app.include_router(conversation_export.router)
    install_edge(app, edge_of(context))
    with TestClient(app, base_url="http://127.0.0.1", client=("127.0.0.1", 1)) as made:
        yield made


def write(log: FakeLog, number: int, *, erased: bool = False) -> None:
    log.write(message(f"r{number}", "in", 0, 1), tombstone=erased, topic=TOPIC)


def lines(client: TestClient, query: str = "") -> list[dict[str, Any]]:
    return [json.loads(line) for line in client.get(f"/v1/conversations/c/export{query}").text.splitlines()]


def test_more_than_a_page_comes_whole_and_without_what_is_erased(log: FakeLog, client: TestClient) -> None:
    for number in range(250):
        write(log, number)
    write(log, 7, erased=True)
    head, *told = lines(client)
    assert (head["messages"], head["log_id"], len(told)) == (249, "id-0", 249)
    assert [line["source"]["offset"] for line in told] == [n for n in range(250) if n != 7]


def test_a_tree_of_one_comes_by_several_pages_also_where_much_between_is_erased(
    log: FakeLog, client: TestClient
) -> None:
    for number in range(1_300):
        write(log, number)
    for number in range(100, 400):
        write(log, number, erased=True)
    head, *told = lines(client, "?tree=true")
    assert (head["version"], head["messages"], head["forks"]) == (2, 1_000, 0)
    assert [line["source"]["offset"] for line in told] == [*range(100), *range(400, 1_300)]


def while_the_first_page_is_read(log: FakeLog, act: Any) -> None:
    """The read before is that of the index."""
    calls = iter(range(1_000))
    log.before_read = lambda: act() if next(calls) == 1 else None


def test_what_is_appended_meanwhile_is_not_in_it(log: FakeLog, client: TestClient) -> None:
    for number in range(150):
        write(log, number)
    while_the_first_page_is_read(log, lambda: write(log, 150))
    assert len(lines(client)) == 1 + 150


@pytest.mark.parametrize(("query", "count"), [("", 150), ("?tree=true", 1_100)])
@pytest.mark.parametrize("made_anew", [False, True])
def test_one_that_loses_messages_meanwhile_ends_with_an_error(
    log: FakeLog, client: TestClient, made_anew: bool, query: str, count: int
) -> None:
    for number in range(count):
        write(log, number)

    def change() -> None:
        if made_anew:
            log.ids[TOPIC] = "id-1"
        else:
            write(log, count - 10, erased=True)

    while_the_first_page_is_read(log, change)
    last = lines(client, query)[-1]
    assert (last["type"], last["error"]["code"]) == ("error", "conflict")
