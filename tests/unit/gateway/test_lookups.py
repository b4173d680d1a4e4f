"""Lookups of requests: while the gateway stops, cannot write its view, or changes under a list."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kit.gateway_records import outcome, request
from penstock.common.reader import RawMessage
from penstock.common.settings import KafkaSettings
from penstock.gateway.service.lookups import Lookups
from penstock.gateway.service.turns import Turns
from penstock.gateway.threads import Threads
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.hub import Gone, Hub
from penstock.gateway.view.outcomes import Outcomes
from penstock.gateway.view.outputs import OutcomeReader
from penstock.gateway.view.store import Store
from penstock.gateway.view.view import View
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import Gone as GoneError
from penstock.schemas.errors import InvalidRequest, Overloaded
from penstock.schemas.records import ControlCommand, Record
from penstock.schemas.topics import TopicNames

REQUEST = request()


class Follower:
    """Is at the end, and says what the test lets it say."""

    reason: str | None = None

    async def catch_up(self) -> None:
        pass

    async def read_commands(self) -> None:
        pass

    def stands_still(self) -> str | None:
        return self.reason


class Gateway:
    def __init__(self, path: Path, **options: Any) -> None:
        self.store = Store(path, "cluster")
        self.hub = Hub()
        self.view = View(self.store, self.hub, TopicNames(), 1, **options)
        self.follower: Any = Follower()
        self.threads = Threads()
        outcomes = Outcomes(KafkaSettings(), default_codec(), self.view)
        self.lookups = Lookups(
            self.view, self.follower, self.hub, self.threads, outcomes, Turns(self.view, self.threads)
        )

    def leave_all_to_the_file(self) -> None:
        written = threading.Event()
        assert self.view.flush(written)
        assert written.wait(10)
        self.view.put_aside(9)

    def close(self) -> None:
        self.threads.close()
        self.store.close()


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    made = Gateway(tmp_path / "view.sqlite")
    made.view.accepted(REQUEST)
    yield made
    made.close()


async def test_a_waiting_caller_is_sent_to_another_gateway_when_this_one_stops(gateway: Gateway) -> None:
    waiting = asyncio.ensure_future(gateway.lookups.wait("default", "r", 30))
    while not gateway.hub.connected:
        await asyncio.sleep(0)
    gateway.hub.drop_all(Gone.STOPPING)
    with pytest.raises(Overloaded) as refused:
        await asyncio.wait_for(waiting, 5)
    assert refused.value.retry_after_s


async def test_a_caller_that_comes_during_the_stop_does_not_wait(gateway: Gateway) -> None:
    """A connection that is kept alive brings one more long poll, which nobody would wake."""
    gateway.hub.drop_all(Gone.STOPPING)
    with pytest.raises(Overloaded):
        await asyncio.wait_for(gateway.lookups.wait("default", "r", 30), 5)
    assert not (await gateway.lookups.wait("default", "r", 0)).done, "a look without waiting is answered"


async def test_a_view_that_cannot_be_written_reports_it(gateway: Gateway) -> None:
    """Its disk is full: the request may have ended long ago."""
    gateway.follower.reason = "the view cannot be written"
    with pytest.raises(Overloaded, match="cannot be written"):
        await gateway.lookups.find("default", "r")


async def test_a_request_recalled_while_pages_are_read_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancel of 100,000 left out the one that began to run meanwhile: all others had ended before its page came."""
    monkeypatch.setattr("penstock.gateway.service.lookups.LIVE_AT_ONCE", 1)
    gateway = Gateway(tmp_path / "view.sqlite", held_live=0)
    for request_id in "ab":
        gateway.view.accepted(replace(REQUEST, request_id=request_id))
    gateway.leave_all_to_the_file()
    told = list[str]()
    async for entry in gateway.lookups.live(["default"]):
        told.append(entry.request_id)
        for request_id in "ab":
            gateway.view.find(("default", request_id))
    assert set(told) == {"a", "b"}
    gateway.close()


async def test_a_change_written_while_rows_are_read_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows were old, and memory had the requests no more: they were commanded, and counted, twice."""
    gateway = Gateway(tmp_path / "view.sqlite", held_live=0)
    for request_id in "ab":
        gateway.view.accepted(replace(REQUEST, request_id=request_id))
    gateway.leave_all_to_the_file()
    entry = gateway.view.find(("default", "a"))
    assert entry is not None
    entry.cancelled_ms = 5
    gateway.view.known.touch(entry, 5)
    read = gateway.view.live_of_tenant

    def slow(*place: Any) -> Any:
        rows = read(*place)
        gateway.leave_all_to_the_file()
        assert gateway.view.known.held_live_count == 0
        return rows

    monkeypatch.setattr(gateway.view, "live_of_tenant", slow)
    told = [(one.request_id, one.cancelled_ms) async for one in gateway.lookups.live(["default"])]
    assert {("a", 5), ("b", 0)} == {(request_id, cancelled_ms or 0) for request_id, cancelled_ms in told}
    gateway.close()


async def test_a_page_after_an_unknown_request_is_refused(gateway: Gateway) -> None:
    page: dict[str, Any] = {"limit": 5, "newest_first": True}
    assert [entry.request_id for entry in await gateway.lookups.page("default", after=None, **page)] == ["r"]
    with pytest.raises(InvalidRequest) as refused:
        await gateway.lookups.page("default", after="pruned", **page)
    assert refused.value.param == "after"


async def test_slow_conversations_do_not_hold_up_lists(gateway: Gateway) -> None:
    release = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow() -> None:
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result(30)

    blocked = [asyncio.ensure_future(gateway.threads.conversations.run(slow)) for _ in range(40)]
    blocked += [asyncio.ensure_future(gateway.threads.metadata.run(slow)) for _ in range(40)]
    page = gateway.lookups.page("default", limit=5, after=None, newest_first=True)
    assert len(await asyncio.wait_for(page, 5)) == 1
    release.set()
    await asyncio.gather(*blocked)


async def test_a_single_request_is_returned_with_its_large_output(gateway: Gateway) -> None:
    event = outcome(task="embedding", embedding={"embeddings": [[0.5] * 1024] * 16, "dimensions": 1024})
    entry = Entry("default", "r", 0)
    read, large = OutcomeReader(default_codec())(default_codec().encode(event))
    entry.on_result(read, 0, large)
    assert large is not None
    assert json.loads(await gateway.lookups.public(entry))["result"]["embeddings"] == [[0.5] * 1024] * 16
    small = gateway.view.find(("default", "r"))
    assert small is not None
    assert json.loads(await gateway.lookups.public(small)) == json.loads(json.dumps(small.to_json()))


async def test_what_another_gateway_has_erased_is_not_shown(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was shown until this gateway happened to have read the command."""
    codec, names = default_codec(), TopicNames()
    page: dict[str, Any] = {"limit": 5, "after": None, "newest_first": True}

    def read(topic: str, record: Record, offset: int) -> None:
        gateway.view.apply([RawMessage(topic, 0, offset, 1_000, None, codec.encode(record))])

    asked = [0]

    async def read_commands() -> None:
        asked[0] += 1
        if asked[0] > 2:
            command = ControlCommand(kind="erase", request_id="r", tenant="default", created_at=1, created_by="gateway")
            read(names.control, command, 0)

    monkeypatch.setattr(gateway.follower, "read_commands", read_commands)
    await gateway.lookups.find("default", "r")
    assert asked == [0], "one that has not ended cannot be erased"
    read(names.result, outcome(), 0)
    assert (await gateway.lookups.find("default", "r")).done
    assert len(await gateway.lookups.page("default", **page)) == 1
    assert await gateway.lookups.page("default", **page) == []
    with pytest.raises(GoneError):
        await gateway.lookups.find("default", "r")
