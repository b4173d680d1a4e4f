"""Lookups of requests: while the gateway stops, cannot write its view, or changes under a list."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import threading
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.records import (
    CONTROL,
    KEY,
    NAMES,
    RESULTS,
    STATUSES,
    command,
    model_info,
    model_state,
    outcome,
    request,
    status,
    worker,
)
from kit.view_gateway import ViewGateway
from penstock.common import log_records
from penstock.common.clock import now_ms
from penstock.common.reader import RawMessage
from penstock.common.settings import KafkaSettings
from penstock.gateway.service.facts import Facts
from penstock.gateway.service.lookups import Lookups
from penstock.gateway.service.subscriptions import Subscription
from penstock.gateway.view import frames as frames_module
from penstock.gateway.view import outcomes as outcomes_module
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.filters import ALL, RequestFilter
from penstock.gateway.view.frames import ResultFrame
from penstock.gateway.view.hub import Gone, Hub
from penstock.gateway.view.outcomes import Outcomes
from penstock.gateway.view.outputs import LARGE_BYTES, LONG_LIST, OutcomeReader, encode_json, held_bytes, result_json
from penstock.gateway.view.request_state import ENTRY_BYTES
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import BrokerUnavailable, InternalError, InvalidRequest, Overloaded
from penstock.schemas.errors import Gone as GoneError
from penstock.schemas.records import WAITING_REASONS, Origin, WaitingFor
from penstock.schemas.topics import TP


class Gateway(ViewGateway):
    """Its follower is at the end, and says what the test lets it say."""

    def start(self, **options: Any) -> None:
        super().start(**options)
        self.follower: Any = Mock(catch_up=AsyncMock(), read_commands=AsyncMock())
        self.follower.stands_still.return_value = None
        outcomes = Outcomes(KafkaSettings(), self.codec, self.view)
        self.lookups = Lookups(self.view, self.follower, self.hub, self.threads, outcomes, self.turns)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    with Gateway(tmp_path / "view.sqlite") as made:
        made.view.accepted(request())
        yield made


@pytest.fixture
def of_the_file(tmp_path: Path) -> Iterator[Gateway]:
    """It has the requests `a` and `b`, and left both to its file."""
    with Gateway(tmp_path / "view.sqlite", held_live=0) as made:
        for request_id in "ab":
            made.view.accepted(request(request_id))
        made.evict_to_disk()
        yield made


async def test_callers_are_sent_to_another_gateway_when_this_one_stops(gateway: Gateway) -> None:
    waiting = asyncio.ensure_future(gateway.lookups.wait("default", "r", 30))
    while not gateway.hub.connected:
        await asyncio.sleep(0)
    gateway.hub.drop_all(Gone.STOPPING)
    with pytest.raises(Overloaded) as refused:
        await asyncio.wait_for(waiting, 5)
    assert refused.value.retry_after_s
    with pytest.raises(Overloaded):  # a connection that is kept alive brings one more long poll
        await asyncio.wait_for(gateway.lookups.wait("default", "r", 30), 5)
    assert not (await gateway.lookups.wait("default", "r", 0)).done, "a look without waiting is answered"


async def test_a_view_that_cannot_be_written_reports_it(gateway: Gateway) -> None:
    """Its disk is full: the request may have ended long ago."""
    gateway.follower.stands_still.return_value = "the view cannot be written"
    with pytest.raises(Overloaded, match="cannot be written"):
        await gateway.lookups.find("default", "r")


async def test_a_request_recalled_while_pages_are_read_is_listed(
    of_the_file: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.gateway.service.lookups.LIVE_AT_ONCE", 1)
    told = list[str]()
    async for entry in of_the_file.lookups.live(["default"]):
        told.append(entry.request_id)
        for request_id in "ab":
            of_the_file.entry(("default", request_id))
    assert set(told) == {"a", "b"}


async def test_a_change_written_while_rows_are_read_is_listed(
    of_the_file: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, entry = of_the_file.view, of_the_file.entry(("default", "a"))
    entry.cancelled_ms = 5
    view.known.touch(entry, 5)
    read = view.live_of_tenant

    def slow(*place: Any) -> Any:
        rows = read(*place)
        of_the_file.evict_to_disk()
        assert view.known.held_live_count == 0
        return rows

    monkeypatch.setattr(view, "live_of_tenant", slow)
    told = [(one.request_id, one.cancelled_ms or 0) async for one in of_the_file.lookups.live(["default"])]
    assert {*told} == {("a", 5), ("b", 0)}


async def test_a_single_request_is_returned_with_its_large_output(gateway: Gateway) -> None:
    event = outcome(task="embedding", embedding={"embeddings": [[0.5] * 1024] * 16, "dimensions": 1024})
    entry = Entry("default", "r", 0)
    read, large = OutcomeReader(gateway.codec)(gateway.codec.encode(event))
    entry.on_result(read, 0, large)
    assert large is not None
    assert json.loads(await gateway.lookups.public(entry))["result"]["embeddings"] == [[0.5] * 1024] * 16
    small = gateway.entry()
    assert json.loads(await gateway.lookups.public(small)) == json.loads(json.dumps(small.to_json()))


async def test_a_page_is_filled_with_what_is_behind_requests_that_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page with less is taken for the last one. While the history is read, those that may have ended are left out."""
    monkeypatch.setattr("penstock.gateway.service.lookups.PART", 2)
    with Gateway(tmp_path / "view.sqlite") as gateway:
        for number in range(8):
            gateway.view.accepted(request(f"r{number}"))
        monkeypatch.setattr(gateway.view, "is_settled", lambda entry: entry.request_id not in {"r1", "r3", "r4", "r5"})
        page: dict[str, Any] = {"limit": 3, "after": None, "newest_first": False}
        shown = await gateway.lookups.page("default", **page)
        rest = await gateway.lookups.page("default", **{**page, "after": shown[-1].key})
        assert [[one.request_id for one in part] for part in (shown, rest)] == [["r0", "r2", "r6"], ["r7"]]


WAIT = {"short": "memory", "loads": "model_loading", "late": "scheduled", "alone": "no_worker", "held": "transaction"}


@pytest.mark.parametrize("aside", [False, True])
async def test_lists_are_filtered_by_what_requests_wait_for(tmp_path: Path, aside: bool) -> None:
    """Some reasons workers state, others the gateway judges: a list has what callers read in `waiting_for`."""
    held = Origin(topic="t", partition=1, offset=7, append_time_ms=1)
    transactions: Any = Mock(holds=lambda entry: "it is held" if entry.origin == held else None)
    transactions.held.return_value = [(("t", 1), None)]
    with Gateway(tmp_path / "view.sqlite", held_live=0 if aside else 100) as gateway:
        view, at_ms = gateway.view, now_ms()
        view.fleet.workers["w"] = worker("w", model_state("m"), updated_at=at_ms)
        view.fleet.models = {("m", "w"): model_info("m"), ("lost", "v"): model_info("lost", updated_at=at_ms)}
        facts = Facts(view, gateway.follower, gateway.hub, transactions=transactions)
        for at, name in enumerate((*WAIT, "runs")):
            later = at_ms + 60_000 if name == "late" else None
            model = "lost" if name == "alone" else "m"
            place = held if name == "held" else None
            view.accepted(request(name, model=model, start_after=later, created_at=at_ms + at), place)
        for name in ("short", "loads", "alone", "late"):
            said = WaitingFor(reason=WAIT.get(name, "") if name in ("short", "loads") else "memory")
            gateway.read(STATUSES, status("queued", request_id=name, waiting_for=said))
        gateway.read(STATUSES, status("running", request_id="runs"))
        if aside:
            gateway.evict_to_disk()
        for reason in WAITING_REASONS:
            where = RequestFilter(waits_for=facts.waits_for(reason))
            page = await gateway.lookups.page(None, limit=9, after=None, newest_first=True, where=where)
            assert [one.request_id for one in page] == [name for name, why in WAIT.items() if why == reason], reason
            assert {one["waiting_for"]["reason"] for one in facts.requests(page)} <= {reason}
            live = {one.key async for one in gateway.lookups.live(["default"]) if where.matches(one)}
            assert live == {one.key for one in page}


async def test_what_another_gateway_has_erased_is_not_shown(gateway: Gateway) -> None:
    page: dict[str, Any] = {"limit": 5, "after": None, "newest_first": True}
    read_commands = gateway.follower.read_commands
    await gateway.lookups.find("default", "r")
    assert read_commands.await_count == 0, "one that has not ended cannot be erased"
    gateway.read(RESULTS, outcome())
    assert (await gateway.lookups.find("default", "r")).done
    assert len(await gateway.lookups.page("default", **page)) == 1
    read_commands.side_effect = lambda: gateway.read(CONTROL, command("erase"))
    assert await gateway.lookups.page("default", **page) == []
    with pytest.raises(GoneError):
        await gateway.lookups.find("default", "r")


@pytest.mark.parametrize("erased", ["own", "r"])
async def test_a_narrowed_caller_reads_its_list_again_when_any_request_was_erased(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, erased: str
) -> None:
    """What is erased says no more whose it was: it is not told by its id, which may be a foreign one."""
    monkeypatch.setattr("penstock.gateway.service.lookups.time", Mock(monotonic=itertools.count().__next__))
    gateway.view.accepted(request("own", user_id="u"))
    gateway.read(RESULTS, outcome(erased))
    cursor, own = gateway.lookups.changes_cursor(), RequestFilter(user_id="u")
    gateway.read(CONTROL, command("erase", erased))
    assert await gateway.lookups.changes("default", cursor, own, own, 9) is None
    assert (await gateway.lookups.changes("default", cursor, ALL, ALL, 9)).left == [("default", erased)]


async def test_an_operator_names_the_tenant_of_an_id_that_several_have(gateway: Gateway) -> None:
    gateway.view.accepted(request("shared", tenant="a"))
    assert await gateway.lookups.tenant_of("shared", "operators") == "a"
    gateway.view.accepted(request("shared", tenant="b"))
    with pytest.raises(InvalidRequest, match="2 tenants have a request of this id: a, b; name one"):
        await gateway.lookups.tenant_of("shared", "a")
    assert await gateway.lookups.tenant_of("unknown", "operators") == "operators"


# -- outcomes that are read again from the topic


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
    with Site(tmp_path / "view.sqlite", request.param) as made:
        yield made


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
    with pytest.raises(GoneError):
        await asking
    assert await listing == []
    with pytest.raises(GoneError):
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
    with pytest.raises(GoneError):
        await site.outcomes.whole(site.entry())


async def test_readers_get_an_internal_error_at_once(site: Site, refetcher: Refetcher) -> None:
    refetcher.record, refetcher.released = object(), True
    with pytest.raises(InternalError):
        await site.next_frame()
    refetcher.record = RECORD
    assert await site.next_frame() is not None


async def test_outcomes_that_are_waited_for_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refetcher: Refetcher
) -> None:
    monkeypatch.setattr(outcomes_module, "MOST_WANTED", 2)
    with Site(tmp_path / "view.sqlite") as site:

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


# -- large outputs


VECTORS = [[float(number + at) / 8 for number in range(512)] for at in range(32)]
EVENT = outcome(task="embedding", embedding={"embeddings": VECTORS, "dimensions": 512})
LARGE_RECORD = default_codec().encode(EVENT)


def entry_of(record: bytes) -> Entry:
    entry = Entry("default", "r", 0)
    event, large = OutcomeReader(default_codec())(record)
    entry.on_result(event, 5, large)
    return entry


TEXT = {"text": "x", "tool_calls": None, "logprobs": None, "choices": None}
TOKEN = {"token": "abc", "logprob": -0.25, "bytes": [97, 98, 99]}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


LARGE_TEXT = {**TEXT, "text": "x" * 20_000, "logprobs": [{**TOKEN, "top_logprobs": None}] * 500}


@pytest.mark.parametrize(
    ("fields", "held"),
    [
        ({}, {"embedding": None}),
        ({"embedding": {"embeddings": [[0.5]], "dimensions": 1}}, None),
        ({"status": "failed", "embedding": None, "metadata": {"note": "x" * 20_000}}, None),
        # Streams need the text; log probabilities and other answers take ten times their bytes.
        (
            {"embedding": None, "task": "text_generation", "text_generation": LARGE_TEXT},
            {"text_generation": LARGE_TEXT | dict.fromkeys(("logprobs", "prompt_logprobs", "covers_through"))},
        ),
    ],
    ids=["large", "small", "a large record without an output", "of a large text the text alone"],
)
def test_what_is_held_of_an_output(fields: dict[str, Any], held: dict[str, Any] | None) -> None:
    event = replace(EVENT, **fields)
    record = default_codec().encode(event)
    assert (len(record) > LARGE_BYTES) == (fields.get("embedding", "large") in ("large", None))
    entry = entry_of(record)
    assert entry.terminal == replace(event, **(held or {}))
    assert (entry.large is None) == (held is None)
    public = entry.to_json()
    assert public["status"] == event.status
    assert entry.to_json(whole=True)["result"] == result_json(event)
    assert public["result"] == (result_json(event) if held is None else None)
    assert public.get("result_omitted", False) == (held is not None)


@pytest.mark.parametrize(
    ("task", "output"),
    [
        ("embedding", {"embeddings": [[0.5] * 384], "dimensions": 384}),
        ("embedding", {"embeddings": [[0.5] * 1024], "dimensions": 1024}),
        ("embedding", {"embeddings": [[0.5] * 8] * 200, "dimensions": 8}),
        ("embedding", {"embeddings": [[0.5]] * 1_500, "dimensions": 1}),
        ("embedding", {"embeddings": VECTORS, "dimensions": 512}),
        ("text_generation", {**TEXT, "text": "x" * 10_000}),
        ("text_generation", {**TEXT, "text": "x" * 10_000 + "😀"}),
        ("text_generation", {**TEXT, "text": "x" * 100_000}),
        ("text_generation", {**TEXT, "logprobs": [{**TOKEN, "top_logprobs": None}] * 300}),
        ("text_generation", {**TEXT, "logprobs": [{**TOKEN, "top_logprobs": [TOKEN] * 20}] * 20}),
        ("text_generation", {**TEXT, "tool_calls": [CALL] * 100}),
    ],
)
def test_what_an_outcome_takes_in_memory_is_counted(task: str, output: dict[str, Any]) -> None:
    """Decoded numbers take many times their bytes on the wire; the room for ended requests is a bound on memory."""
    record = default_codec().encode(replace(EVENT, task=task, **{"embedding": None, task: output}))
    read = OutcomeReader(default_codec())
    read(record)
    tracemalloc.start()
    held = [read(bytes(bytearray(record))) for _ in range(4)]
    taken = tracemalloc.get_traced_memory()[0] / len(held)
    tracemalloc.stop()
    counted = ENTRY_BYTES + held_bytes(*held[0], len(record))
    assert taken <= counted <= 3 * taken + 2 * ENTRY_BYTES


async def test_readers_wait_for_one_thread_and_get_the_same_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    encode = frames_module.encode_json

    def noted(value: Any) -> str:
        threads.append(threading.current_thread().name)
        return encode(value)

    monkeypatch.setattr(frames_module, "encode_json", noted)
    hub = Hub()
    readers = [Subscription(hub, single=True) for _ in range(20)]
    frame = entry_of(LARGE_RECORD).result_frame()
    for reader in readers:
        reader.push([frame])
    assert readers[0].take_nowait() == [], "a frame that is not ready is to be waited for"
    got = await asyncio.gather(*(reader.next_frame() for reader in readers))
    assert all(one is frame for one in got)
    assert frame.result == result_json(EVENT)
    assert json.loads(frame.encoded())["result"] == result_json(EVENT)
    assert len(threads) == 1
    assert threads[0] != threading.main_thread().name


async def test_a_reader_that_gives_up_takes_the_frame_from_nobody() -> None:
    reader = Subscription(Hub(), single=True)
    frame = entry_of(LARGE_RECORD).result_frame()
    reader.push([frame])
    waiting = asyncio.ensure_future(reader.next_frame())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    found = await reader.next_frame()
    assert isinstance(found, ResultFrame)
    assert found.large is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JSON)
def test_json_in_steps_is_json(value: Any) -> None:
    for some in (value, [value] * (LONG_LIST + 1)):
        assert json.loads(encode_json(some)) == json.loads(json.dumps(some))
    assert encode_json({"embeddings": [[math.nan, math.inf, 0.5]]}) == '{"embeddings":[[null,null,0.5]]}'
