"""Outcomes read again from the topic: what may happen to a request meanwhile, and what becomes of who waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.common import log_records
from penstock.common.reader import RawMessage
from penstock.common.settings import KafkaSettings
from penstock.gateway.service.lookups import Lookups
from penstock.gateway.service.subscriptions import Subscriptions
from penstock.gateway.threads import Threads
from penstock.gateway.view import outcomes as outcomes_module
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.hub import Hub
from penstock.gateway.view.outcomes import Outcomes
from penstock.gateway.view.store import Store
from penstock.gateway.view.view import View
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import BrokerUnavailable, Gone, InternalError, Overloaded
from penstock.schemas.records import ControlCommand, Origin, ResultEvent
from penstock.schemas.topics import TP, TopicNames

NAMES = TopicNames()
KEY = ("default", "r")
OUTCOME = ResultEvent(
    request_id="r",
    tenant="default",
    kind="terminal",
    origin=Origin(topic="inference.request.medium", partition=0, offset=0, append_time_ms=1_000),
    attempt=1,
    epoch=1,
    task="text_generation",
    created_at=2_000,
    worker_id="w",
    status="completed",
    text_generation={"text": "secret"},
)
RECORD = RawMessage(NAMES.result, 0, 0, 1_000, b"r", default_codec().encode(OUTCOME))


class Reread(Outcomes):
    """Gives the record when it is told to; `fails` with what it is given."""

    def __init__(self, view: View) -> None:
        super().__init__(KafkaSettings(), default_codec(), view)
        self.release = asyncio.Event()
        self.fails: Exception | None = None
        self.record: RawMessage | None = RECORD

    async def _fetch(self, tp: TP, offset: int, patience_s: float) -> RawMessage | None:
        await self.release.wait()
        if self.fails is not None:
            raise self.fails
        return self.record


class Site:
    """A gateway that began after the request had ended."""

    def __init__(self, path: Path, recent_bytes: int = 1 << 20) -> None:
        self.store = Store(path, "cluster")
        self.hub = Hub()
        self.threads = Threads()
        view = View(self.store, self.hub, NAMES, 1)
        view.apply([RECORD])
        flush(view)
        self.view = View(self.store, self.hub, NAMES, 1, recent_bytes=recent_bytes)
        self.outcomes = Reread(self.view)

    def entry(self) -> Entry:
        found = self.view.find(KEY)
        assert found is not None
        return found

    def erase(self) -> None:
        command = ControlCommand(kind="erase", request_id="r", tenant="default", created_at=1)
        self.view.apply([RawMessage(NAMES.control, 0, 0, 9_000, None, default_codec().encode(command))])
        flush(self.view)


def flush(view: View) -> None:
    written = threading.Event()
    assert view.flush(written)
    assert written.wait(10)


@pytest.fixture(params=[1 << 20, 1], ids=["kept", "not-kept"])
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    """Ended requests stay in memory, or they do not."""
    made = Site(tmp_path / "view.sqlite", request.param)
    yield made
    made.threads.close()
    made.store.close()


async def test_it_is_read_once_and_held(site: Site) -> None:
    site.outcomes.release.set()
    whole = await site.outcomes.whole(site.entry())
    assert whole.to_json()["result"]["text"] == "secret"
    assert await site.outcomes.whole(whole) is whole


async def test_what_is_erased_while_it_is_read_is_told_to_nobody(site: Site) -> None:
    unused: Any = None
    lookups = Lookups(site.view, unused, site.hub, site.threads, site.outcomes)
    reader = Subscriptions(site.view, unused, site.hub, NAMES).subscribe(*KEY)
    asking = asyncio.ensure_future(lookups.public(site.entry()))
    listing = asyncio.ensure_future(site.outcomes.all_whole([site.entry()], 1))
    await asyncio.sleep(0)
    site.erase()
    site.outcomes.release.set()
    with pytest.raises(Gone):
        await asking
    assert await listing == []
    with pytest.raises(Gone):
        await asyncio.wait_for(reader.next_frame(), 5)
    assert site.entry().erased, "and it stays erased"


async def test_what_the_topic_has_lost_is_shown_by_its_facts(site: Site) -> None:
    unused: Any = None
    site.outcomes.record = None
    site.outcomes.release.set()
    lookups = Lookups(site.view, unused, site.hub, site.threads, site.outcomes)
    assert b'"result_omitted":true' in await lookups.public(site.entry())
    (listed,) = await site.outcomes.all_whole([site.entry()], 1)
    assert listed.to_json()["status"] == "completed"


@pytest.mark.parametrize("record", [b"junk", default_codec().encode(replace(OUTCOME, tenant="other"))])
async def test_a_record_of_somebody_else_is_not_taken_for_it(site: Site, record: bytes) -> None:
    """The topic was made anew: the offset is another record's."""
    site.outcomes.record = RawMessage(NAMES.result, 0, 0, 1_000, b"r", record)
    site.outcomes.release.set()
    with pytest.raises(Gone):
        await site.outcomes.whole(site.entry())


async def test_a_fault_of_ours_keeps_nobody_waiting(site: Site) -> None:
    unused: Any = None
    subscriptions = Subscriptions(site.view, unused, site.hub, NAMES)
    site.outcomes.fails = RuntimeError("ours")
    site.outcomes.release.set()
    with pytest.raises(InternalError):
        await asyncio.wait_for(subscriptions.subscribe(*KEY).next_frame(), 5)
    site.outcomes.fails = None
    assert await asyncio.wait_for(subscriptions.subscribe(*KEY).next_frame(), 5) is not None


async def test_what_is_asked_for_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the broker is away every look adds one."""
    monkeypatch.setattr(outcomes_module, "MOST_WANTED", 2)
    monkeypatch.setattr(log_records, "Refetcher", SilentRefetcher)
    with_view = Site(tmp_path / "view.sqlite")
    outcomes = Outcomes(KafkaSettings(), default_codec(), with_view.view)
    for offset in range(2):
        with pytest.raises(BrokerUnavailable):
            await outcomes._fetch((NAMES.result, 0), offset, 0.01)
    with pytest.raises(BrokerUnavailable):
        await outcomes._fetch((NAMES.result, 0), 1, 0.01)
    with pytest.raises(Overloaded):
        await outcomes._fetch((NAMES.result, 0), 2, 0.01)
    outcomes._records._on_gone((NAMES.result, 0), [0])
    with pytest.raises(BrokerUnavailable):
        await outcomes._fetch((NAMES.result, 0), 2, 0.01)
    with_view.threads.close()
    with_view.store.close()


class SilentRefetcher:
    """Of a broker that is away."""

    def __init__(self, *args: object) -> None:
        pass

    def start(self) -> None:
        pass

    def request(self, tp: TP, offsets: object) -> None:
        pass
