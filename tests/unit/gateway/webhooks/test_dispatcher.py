"""What the dispatcher sends and keeps, with a broker, a log and receivers that are objects."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.common.clock import now_ms
from penstock.common.group_consumer import Read
from penstock.common.reader import RawMessage
from penstock.common.settings import KafkaSettings
from penstock.gateway.callbacks import Callbacks, WebhooksSection
from penstock.gateway.webhooks import records, registry
from penstock.gateway.webhooks.bodies import webhook_body
from penstock.gateway.webhooks.dispatcher import ERASED_MS, Dispatcher, Tools
from penstock.gateway.webhooks.metrics import WebhookMetrics
from penstock.gateway.webhooks.policy import Answer
from penstock.gateway.webhooks.records import Erasures
from penstock.schemas.codec import Codec, default_codec
from penstock.schemas.errors import RegistryUnavailable
from penstock.schemas.records import ControlCommand, DeadLetter, Origin, Place, ResultEvent, WebhookDelivery
from penstock.schemas.topics import HEADER_CALLBACK, HORIZON_MS, TP
from support import wait_until_async

TP0: TP = ("inference.result", 0)
KEY = "whsec_" + base64.b64encode(bytes(32)).decode()
CODEC = default_codec()


def outcome(request_id: str, since_ms: int = 1) -> ResultEvent:
    return ResultEvent(
        request_id=request_id,
        tenant="t",
        kind="terminal",
        origin=Origin(topic="inference.request.medium", partition=0, offset=1, append_time_ms=since_ms),
        attempt=1,
        epoch=1,
        task="text_generation",
        created_at=now_ms(),
        worker_id="w",
        status="completed",
        text_generation={"text": "SECRET"},
    )


def delivery(number: int, **fields: Any) -> WebhookDelivery:
    known: dict[str, Any] = {
        "webhook_id": "m",
        "request_id": f"r{number}",
        "tenant": "t",
        "type": "request.completed",
        "url": f"http://h/{number}",
        "state": "waiting",
        "place": Place(topic=TP0[0], partition=0, offset=number),
        "created_at": now_ms(),
        "updated_at": 1,
        "next_at": 1,
    }
    return WebhookDelivery(**{**known, **fields})


@dataclass
class World:
    """The log holds the outcome of `r<offset>` at each offset."""

    answer: Answer
    sent: list[str] = field(default_factory=list)
    kept: list[tuple[str, bytes]] = field(default_factory=list)
    events: dict[int, ResultEvent] = field(default_factory=dict)
    before_read: Callable[[], None] = lambda: None
    takes: float = 0.0
    committed: dict[TP, int] = field(default_factory=dict)

    async def read(self, tp: TP, offset: int) -> RawMessage | None:
        self.before_read()
        if tp != TP0:
            return None
        event = self.events.get(offset) or outcome(f"r{offset}")
        return RawMessage(*tp, offset, now_ms(), b"r", CODEC.encode(event))

    def commit(self, offsets: dict[TP, int]) -> None:
        self.committed |= offsets

    async def produce(self, topic: str, value: bytes, **_: Any) -> None:
        self.kept.append((topic, value))

    async def post(self, tenant: str, url: str, headers: Sequence[Any], body: bytes) -> Answer:
        self.sent.append(url)
        await asyncio.sleep(self.takes)
        return self.answer

    def states(self) -> list[tuple[str, str]]:
        found = [CODEC.decode(value, WebhookDelivery) for topic, value in self.kept if topic == "inference.delivery"]
        return [(one.request_id, one.state) for one in found]

    def letters(self) -> list[DeadLetter]:
        return [CODEC.decode(value, DeadLetter) for topic, value in self.kept if topic == "inference.dlq"]


class Rig:
    """A dispatcher that owns one partition. Tests call what its loops call."""

    def __init__(self, world: World, codec: Codec = CODEC) -> None:
        section = WebhooksSection.model_validate({"secret": KEY, "max_in_flight": 16})
        any_world: Any = world
        tools = Tools(
            kafka=KafkaSettings(bootstrap_servers="127.0.0.1:1"),
            codec=codec,
            prompt=codec,
            transport=any_world,
            records=any_world,
            sender=any_world,
            callbacks=Callbacks(section),
            metrics=WebhookMetrics(),
            consumer=lambda _: any_world,
            load=lambda _: [],
        )
        self.it: Any = Dispatcher(tools, section)
        self.it._owned.add(TP0)
        self.it._read_here.add(TP0)
        self.it._log.assign(TP0)

    def begin(self, *found: WebhookDelivery) -> None:
        for one in found:
            self.it._deliveries.add(one)
        self.it._begin()

    async def take(self, offset: int, event: ResultEvent) -> None:
        """The event comes on the result topic."""
        self.it._tools.records.events[offset] = event
        headers = ((HEADER_CALLBACK, b"http://h/hook"),)
        await self.it._take([Read(TP0, offset, b"r", CODEC.encode(event), now_ms(), headers)])
        await self.done()

    async def reads(self, offset: int, event: ResultEvent) -> None:
        """The consumer has read the event alone."""
        headers = ((HEADER_CALLBACK, b"http://h/hook"),)
        await self.it._take([Read(TP0, offset, b"r", CODEC.encode(event), now_ms(), headers)])
        await self.it._passed({TP0: offset + 1})

    async def arrive(self) -> None:
        """What waits has its turn."""
        while not self.it._arriving.empty():
            await self.it._arriving.get_nowait()

    async def done(self) -> None:
        await wait_until_async(lambda: not self.it._calls, 5)
        assert not self.it.over.done(), self.it.over.result()


async def test_a_failed_webhook_has_a_letter_without_its_outcome() -> None:
    """It outlived the request: an operator could read what the tenant had erased."""
    world = World(Answer(status_code=410))
    rig = Rig(world)
    rig.begin(delivery(1))
    await rig.done()
    (letter,) = world.letters()
    assert (letter.original, letter.origin.offset) == (b"", 1)
    assert letter.original_headers == {"penstock-callback": b"http://h/1"}
    assert world.states() == [("r1", "failed")]


async def test_what_is_erased_before_its_call_is_not_sent() -> None:
    world = World(Answer(status_code=200))
    rig = Rig(world)
    world.before_read = lambda: rig.it.erased(("t", "r1"), now_ms())
    rig.begin(delivery(1))
    await rig.done()
    assert (world.sent, world.states(), world.letters()) == ([], [("r1", "dropped")], [])


async def test_what_is_erased_during_its_last_call_has_no_letter() -> None:
    world = World(Answer(status_code=410), takes=0.1)
    rig = Rig(world)
    rig.begin(delivery(1))
    await wait_until_async(lambda: world.sent, 5)
    rig.it.erased(("t", "r1"), now_ms())
    await rig.done()
    assert (world.states(), world.letters()) == ([("r1", "dropped")], [])


async def test_a_partition_that_is_given_away_begins_no_more_calls() -> None:
    """They were begun while the last calls were waited for, and ended after another process had the partition."""
    world = World(Answer(status_code=500), takes=0.1)
    rig = Rig(world)
    rig.begin(*[delivery(number) for number in range(5)])
    await wait_until_async(lambda: len(world.sent) == len(rig.it._calls) > 0, 5)
    before = list(world.sent)
    giving = asyncio.ensure_future(rig.it._revoked([TP0]))
    while not giving.done():
        rig.it._begin()
        await asyncio.sleep(0.01)
    assert world.sent == before
    assert not rig.it._calls
    assert len(rig.it._deliveries) == 0
    assert sorted(world.states()) == [(f"r{number}", "waiting") for number in range(len(before))]


async def test_a_partition_that_comes_back_meanwhile_is_read_again() -> None:
    world = World(Answer(status_code=500), takes=0.1)
    rig = Rig(world)
    rig.begin(*[delivery(number) for number in range(5)])
    await wait_until_async(lambda: len(world.sent) == len(rig.it._calls) > 0, 5)
    giving = asyncio.ensure_future(rig.it._revoked([TP0]))
    await asyncio.sleep(0)
    rig.it._assigned([TP0])
    await giving
    assert rig.it._arriving.qsize() == 2, "one for the assignment, one for what ended since"
    assert len(rig.it._deliveries) == len(world.sent), "what landed waits here"
    while not rig.it._arriving.empty():
        rig.it._arriving.get_nowait().close()


async def test_what_comes_while_a_partition_is_given_away_is_left_to_who_gets_it() -> None:
    """Its offset was committed: nobody was ever called for it."""
    world = World(Answer(status_code=200), takes=0.1)
    rig = Rig(world)
    rig.begin(delivery(1))
    await wait_until_async(lambda: world.sent, 5)
    giving = asyncio.ensure_future(rig.it._revoked([TP0]))
    await asyncio.sleep(0)
    assert not giving.done()
    await rig.reads(2, outcome("r2"))
    await giving
    assert world.states() == [("r1", "delivered")]
    assert world.committed.get(TP0, 0) <= 2


async def test_what_was_read_before_a_partition_came_back_counts_for_nothing() -> None:
    """It is read again from what was committed, and the records before it too."""
    world = World(Answer(status_code=200), takes=0.1)
    rig = Rig(world)
    rig.begin(delivery(1))
    await wait_until_async(lambda: world.sent, 5)
    giving = asyncio.ensure_future(rig.it._revoked([TP0]))
    await asyncio.sleep(0)
    await rig.reads(2, outcome("r2"))
    rig.it._assigned([TP0])
    await rig.reads(3, outcome("r3"))  # it stands in the queue in front of the assignment
    await giving
    assert max((rig.it._log.commits() | world.committed).values(), default=0) <= 2
    await rig.arrive()
    await rig.reads(2, outcome("r2"))
    await rig.done()
    assert ("r2", "delivered") in world.states()
    assert rig.it._log.commits() == {TP0: 3}


async def test_a_request_id_that_is_used_again_is_called_again() -> None:
    """It was taken for a repeat, and nobody was called."""
    world = World(Answer(status_code=200))
    rig = Rig(world)
    later = now_ms() + HORIZON_MS + 60_000
    for offset, event in enumerate([outcome("nightly"), outcome("nightly"), outcome("nightly", later)]):
        await rig.take(offset, event)
        assert len(world.sent) == (2 if offset == 2 else 1)
    first, *_, last = [CODEC.decode(value, WebhookDelivery).webhook_id for _, value in world.kept]
    assert first != last


class Registry:
    """Away for some calls."""

    def __init__(self, away: int) -> None:
        self.away = away

    def codec(self) -> Any:
        return SimpleNamespace(encode=CODEC.encode, decode=self.decode)

    def decode(self, value: bytes, kind: Any) -> Any:
        self.away -= 1
        if self.away >= 0:
            raise RegistryUnavailable("the registry is away")
        return CODEC.decode(value, kind)


@pytest.mark.parametrize("away", [1, 4])
async def test_a_registry_that_is_away_is_waited_for(monkeypatch: pytest.MonkeyPatch, away: int) -> None:
    """It ended the process, or the webhook said nothing of its request."""
    monkeypatch.setattr(registry, "AGAIN_S", 0.01)
    world = World(Answer(status_code=200))
    rig = Rig(world, Registry(away).codec())
    rig.it.waits_for = None
    rig.begin(delivery(1))
    await rig.done()
    assert (world.states(), rig.it.waits_for) == ([("r1", "delivered")], None)


async def test_a_partition_that_goes_while_the_registry_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended the process, and with it the calls for all other partitions."""
    monkeypatch.setattr(registry, "AGAIN_S", 0.01)
    world = World(Answer(status_code=200))
    rig = Rig(world, Registry(3).codec())
    reading = asyncio.ensure_future(rig.reads(2, outcome("r2")))
    await wait_until_async(lambda: rig.it.waits_for not in (None, "the broker was not asked yet"), 5)
    await rig.it._revoked([TP0])
    await reading
    assert (world.sent, world.committed) == ([], {})


def test_a_request_that_cannot_be_decoded_now_makes_no_body_without_it() -> None:
    message = RawMessage("inference.request.medium", 0, 1, 1, b"r", b"...")
    with pytest.raises(RegistryUnavailable):
        webhook_body(delivery(1).place, outcome("r"), message, Registry(1).codec())


async def test_erasures_wait_for_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "AGAIN_S", 0.01)
    found: list[Any] = []
    erasures = Erasures(KafkaSettings(), Registry(2).codec(), lambda *erased: found.append(erased))
    command = ControlCommand(kind="erase", request_id="r", tenant="t", created_at=1)
    message = RawMessage("inference.control", 0, 0, 1, b"r", CODEC.encode(command))
    await asyncio.to_thread(erasures._on_batch, [message])
    await asyncio.sleep(0)
    assert len(found) == 1


async def test_erasures_are_forgotten_with_what_they_were_about() -> None:
    """They were remembered until the process ended."""
    rig = Rig(World(Answer(status_code=200)))
    rig.it.erased(("t", "old"), now_ms() - ERASED_MS - 1)
    assert list(rig.it._erased) == []
    rig.it._erased = {("t", "older"): 1, ("t", "recent"): now_ms()}
    rig.it.erased(("t", "new"), now_ms())
    assert list(rig.it._erased) == [("t", "recent"), ("t", "new")]
