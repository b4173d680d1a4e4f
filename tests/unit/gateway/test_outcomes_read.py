"""Outcomes that are read again from the topic: what may happen to a request meanwhile, and what its readers get."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from kit.gateway_records import CONTROL, KEY, NAMES, RESULTS, command, outcome
from kit.view_gateway import ViewGateway
from penstock.common import log_records
from penstock.common.reader import RawMessage
from penstock.common.settings import KafkaSettings
from penstock.gateway.service.lookups import Lookups
from penstock.gateway.view import outcomes as outcomes_module
from penstock.gateway.view.outcomes import Outcomes
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import BrokerUnavailable, Gone, InternalError, Overloaded
from penstock.schemas.topics import TP

OUTCOME = outcome(text="secret")
RECORD = default_codec().encode(OUTCOME)


class Refetcher:
    """Gives `record` for every offset, or that it is gone, when the test releases it."""

    def __init__(self) -> None:
        self.released = False
        self.record: Any = RECORD
        self.wanted: list[tuple[TP, int]] = []

    def __call__(self, settings: Any, loop: Any, on_fetched: Any, on_gone: Any) -> Refetcher:
        self.on_fetched, self.on_gone = on_fetched, on_gone
        return self

    def start(self) -> None:
        pass

    def request(self, tp: TP, offsets: Sequence[int]) -> None:
        self.wanted += [(tp, offset) for offset in offsets]
        if self.released:
            self.release()

    def release(self) -> None:
        self.released = True
        while self.wanted:
            tp, offset = self.wanted.pop()
            if self.record is None:
                self.on_gone(tp, [offset])
            else:
                self.on_fetched(tp, [RawMessage(*tp, offset, 1_000, b"r", self.record)])


class Site(ViewGateway):
    """A gateway that started after the request had ended."""

    def __init__(self, path: Path, recent_bytes: int = 1 << 20) -> None:
        super().__init__(path)
        self.read(RESULTS, OUTCOME)
        self.flush()
        self.restart(recent_bytes=recent_bytes)
        self.outcomes = Outcomes(KafkaSettings(topic_prefix=NAMES.prefix), self.codec, self.view)
        self.lookups = Lookups(self.view, cast("Any", self), self.hub, self.threads, self.outcomes, self.turns)

    async def read_commands(self) -> None:
        """As the follower does it: nobody else has written any."""

    async def next_frame(self) -> Any:
        return await asyncio.wait_for(self.subscriptions.subscribe(*KEY).next_frame(), 5)


@pytest.fixture
def refetcher(monkeypatch: pytest.MonkeyPatch) -> Refetcher:
    made = Refetcher()
    monkeypatch.setattr(log_records, "Refetcher", made)
    return made


@pytest.fixture(params=[1 << 20, 1], ids=["kept", "not-kept"])
def site(tmp_path: Path, refetcher: Refetcher, request: pytest.FixtureRequest) -> Iterator[Site]:
    """Ended requests stay in memory, or they do not."""
    made = Site(tmp_path / "view.sqlite", request.param)
    yield made
    made.threads.close()
    made.close()


async def test_an_outcome_is_read_once_and_held(site: Site, refetcher: Refetcher) -> None:
    refetcher.released = True
    whole = await site.outcomes.whole(site.entry())
    assert whole.to_json()["result"]["text"] == "secret"
    assert await site.outcomes.whole(whole) is whole


async def test_nobody_gets_what_is_erased_while_it_is_read(site: Site, refetcher: Refetcher) -> None:
    reader = site.subscriptions.subscribe(*KEY)
    asking = asyncio.ensure_future(site.lookups.public(site.entry()))
    listing = asyncio.ensure_future(site.outcomes.all_whole([site.entry()], 1))
    await asyncio.sleep(0)
    site.read(CONTROL, command("erase"))
    site.flush()
    refetcher.release()
    with pytest.raises(Gone):
        await asking
    assert await listing == []
    with pytest.raises(Gone):
        await asyncio.wait_for(reader.next_frame(), 5)
    assert site.entry().erased, "and it stays erased"


async def test_an_outcome_that_the_topic_has_lost_is_shown_by_its_facts(site: Site, refetcher: Refetcher) -> None:
    refetcher.record, refetcher.released = None, True
    assert b'"result_omitted":true' in await site.lookups.public(site.entry())
    (listed,) = await site.outcomes.all_whole([site.entry()], 1)
    assert listed.to_json()["status"] == "completed"


@pytest.mark.parametrize("record", [b"junk", default_codec().encode(replace(OUTCOME, tenant="other"))])
async def test_another_record_at_the_offset_is_not_the_outcome(site: Site, refetcher: Refetcher, record: bytes) -> None:
    """The topic was created again."""
    refetcher.record, refetcher.released = record, True
    with pytest.raises(Gone):
        await site.outcomes.whole(site.entry())


async def test_readers_get_an_internal_error_at_once(site: Site, refetcher: Refetcher) -> None:
    """The next reader causes another read."""
    refetcher.record, refetcher.released = object(), True
    with pytest.raises(InternalError):
        await site.next_frame()
    refetcher.record = RECORD
    assert await site.next_frame() is not None


async def test_outcomes_that_are_waited_for_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refetcher: Refetcher
) -> None:
    """While the broker is away every look adds one."""
    monkeypatch.setattr(outcomes_module, "MOST_WANTED", 2)
    site = Site(tmp_path / "view.sqlite")

    async def look_at(offset: int) -> None:
        entry = site.entry()
        entry.terminal_offset = offset
        await site.outcomes.whole(entry, 0.01)

    for offset, error in ((0, BrokerUnavailable), (1, BrokerUnavailable), (1, BrokerUnavailable), (2, Overloaded)):
        with pytest.raises(error):
            await look_at(offset)
    refetcher.on_gone(RESULTS, [0])
    with pytest.raises(BrokerUnavailable):
        await look_at(2)
    site.threads.close()
    site.close()
