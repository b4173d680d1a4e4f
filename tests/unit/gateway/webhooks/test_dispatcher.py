"""What the dispatcher sends and keeps, with a broker, a log and receivers that are objects."""

from __future__ import annotations

import asyncio
import base64
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import httpcore
import pytest
from pydantic import ValidationError

from kit.gateway_readers import fake_readers
from kit.records import CODEC, ORIGIN, delivery, outcome
from penstock.common.clock import now_ms
from penstock.common.group_consumer import Listener, Read
from penstock.common.reader import RawMessage
from penstock.common.settings import KafkaSettings
from penstock.gateway.callbacks import Callbacks, WebhooksSection
from penstock.gateway.webhooks import dispatcher, records, registry
from penstock.gateway.webhooks.bodies import webhook_body
from penstock.gateway.webhooks.dispatcher import ERASED_MS, Dispatcher, Tools
from penstock.gateway.webhooks.metrics import WebhookMetrics
from penstock.gateway.webhooks.policy import Answer
from penstock.gateway.webhooks.records import Erasures
from penstock.gateway.webhooks.sender import NAMES_OF_ONE, Sender, retry_after_s
from penstock.gateway.webhooks.status_calls import StatusCalls
from penstock.schemas.errors import InvalidRequest, RegistryUnavailable, UnsupportedParameter
from penstock.schemas.records import ControlCommand, DeadLetter, ResultEvent, WebhookDelivery
from penstock.schemas.topics import HEADER_CALLBACK, HORIZON_MS, TP
from support import wait_until_async

TP0: TP = ("inference.result", 0)
KEY = "whsec_" + base64.b64encode(bytes(32)).decode()
SECRET = {"text_generation": {"text": "SECRET"}, "tenant": "t"}


def waiting(number: int) -> WebhookDelivery:
    return delivery(f"r{number}", number, url=f"http://h/{number}", created_at=now_ms(), next_at=1)


class Registry:
    """A codec whose schema registry is away for some calls."""

    def __init__(self, away: int) -> None:
        self.away = away
        self.encode = CODEC.encode

    def decode(self, value: bytes, kind: Any) -> Any:
        self.away -= 1
        if self.away >= 0:
            raise RegistryUnavailable("the registry is away")
        return CODEC.decode(value, kind)


class World(WebhookMetrics):
    """A dispatcher with one partition, whose log holds the outcome of `r<offset>` at each offset. Calls last until
    `answers` is set."""

    def __init__(self, status_code: int = 200, codec: Any = CODEC, *, slow: bool = False) -> None:
        super().__init__()
        self.answer = Answer(status_code=status_code)
        self.answers = asyncio.Event()
        if not slow:
            self.answers.set()
        self.sent: list[str] = []
        self.kept: list[tuple[str, bytes]] = []
        self.loaded: list[WebhookDelivery] = []
        self.loads = 0
        self.events: dict[int, ResultEvent] = {}
        self.committed: dict[TP, int] = {}
        self.before_read: Callable[[], object] = lambda: None
        self.later_ms = 0
        section = WebhooksSection.model_validate({"secret": KEY, "max_in_flight": 16})
        mine: Any = self
        tools = Tools(
            kafka=KafkaSettings(bootstrap_servers="127.0.0.1:1"),
            codec=codec,
            prompt=codec,
            transport=mine,
            records=mine,
            sender=mine,
            callbacks=Callbacks(section),
            metrics=self,
            consumer=self.join,
            load=self.load,
            now_ms=lambda: now_ms() + self.later_ms,
        )
        self.it = Dispatcher(tools, section)

    async def __aenter__(self) -> World:
        self.it.work.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.answers.set()
        await self.it.cancel()
        assert not self.it.work.over.done(), self.it.work.over.result()

    # -- as the dispatcher's tools

    def join(self, listener: Listener) -> Any:
        self.listener: Any = listener
        return SimpleNamespace(
            waits_for=None, start=lambda: None, commit=self.committed.update, hold=lambda topics: None
        )

    def watch(self, **gauges: Callable[[], float]) -> None:
        super().watch(**gauges)
        self.gauges = gauges

    def load(self, partitions: Sequence[int]) -> list[WebhookDelivery]:
        found, self.loaded = self.loaded, []
        self.loads += 1
        return found

    async def read(self, tp: TP, offset: int) -> RawMessage | None:
        self.before_read()
        if tp != TP0:
            return None
        event = self.events.get(offset) or outcome(f"r{offset}", **SECRET)
        return RawMessage(*tp, offset, now_ms(), b"r", CODEC.encode(event))

    async def produce(self, topic: str, value: bytes, **_: Any) -> None:
        self.kept.append((topic, value))

    async def post(self, tenant: str, url: str, headers: Sequence[Any], body: bytes) -> Answer:
        self.sent.append(url)
        await self.answers.wait()
        return self.answer

    # -- what happens to it

    async def takes_over(self, *found: WebhookDelivery, sent: int = 0) -> None:
        """The partition is assigned, and these wait there; so many calls begin."""
        self.loaded = list(found)
        self.listener.on_assigned([TP0])
        await wait_until_async(lambda: self.loads, 5)
        await wait_until_async(lambda: len(self.sent) == sent == self.gauges["in_flight"]() or not sent, 5)

    async def begins_to_lose(self) -> asyncio.Future[None]:
        """The partition is revoked, while a call is open."""
        giving = asyncio.ensure_future(self.listener.on_revoked([TP0]))
        await asyncio.sleep(0)
        assert not giving.done()
        return giving

    async def ends(self, giving: asyncio.Future[None]) -> None:
        self.answers.set()
        await giving
        await self.all_read()

    def reads(self, offset: int, event: ResultEvent | None = None, url: bytes = b"http://h/hook") -> None:
        """The consumer reads this event at the offset."""
        event = self.events[offset] = event or outcome(f"r{offset}", **SECRET)
        headers = ((HEADER_CALLBACK, url),)
        self.listener.on_batch([Read(TP0, offset, b"r", CODEC.encode(event), now_ms(), headers)])
        self.listener.on_passed({TP0: offset + 1})

    async def all_read(self) -> None:
        """The dispatcher has handled all that the consumer read, and looked for calls to begin."""
        handled = asyncio.Event()

        def last() -> Iterator[Read]:
            handled.set()
            yield from ()

        self.listener.on_batch(last())
        await asyncio.wait_for(handled.wait(), 5)
        await asyncio.sleep(0.01)

    async def has(self, *states: tuple[str, str]) -> None:
        """In the end the records of deliveries say this."""
        await wait_until_async(lambda: self.states() == [*states], 5, lambda: str(self.states()))

    def states(self) -> list[tuple[str, str]]:
        return [(one.request_id, one.state) for one in self.deliveries()]

    def deliveries(self) -> list[WebhookDelivery]:
        return [CODEC.decode(value, WebhookDelivery) for topic, value in self.kept if topic == "inference.delivery"]

    def letters(self) -> list[DeadLetter]:
        return [CODEC.decode(value, DeadLetter) for topic, value in self.kept if topic == "inference.dlq"]


async def test_the_letter_of_a_failed_webhook_does_not_hold_its_outcome() -> None:
    async with World(410) as world:
        await world.takes_over(waiting(1))
        await world.has(("r1", "failed"))
    (letter,) = world.letters()
    assert (letter.original, letter.origin.offset) == (b"", 1)
    assert letter.original_headers == {"penstock-callback": b"http://h/1"}


async def test_a_partition_that_comes_back_meanwhile_is_read_again() -> None:
    async with World(500, slow=True) as world:
        await world.takes_over(*(waiting(number) for number in range(5)), sent=2)
        giving = await world.begins_to_lose()
        world.listener.on_assigned([TP0])
        await world.ends(giving)
        await wait_until_async(lambda: world.loads == 3, 5, "one for the assignment, one for what ended since")
        assert world.gauges["waiting"]() == 2, "what landed waits here"


@pytest.mark.parametrize("comes_back", [False, True])
async def test_an_outcome_read_while_its_partition_is_revoked_is_not_committed(comes_back: bool) -> None:
    async with World(slow=True) as world:
        await world.takes_over(waiting(1), sent=1)
        giving = await world.begins_to_lose()
        world.reads(2)
        if comes_back:
            world.reads(3)
            world.listener.on_assigned([TP0])
        else:
            await world.all_read()
        await world.ends(giving)
        assert world.committed.get(TP0, 0) <= 2
        if comes_back:
            world.reads(2)
            await wait_until_async(lambda: world.committed == {TP0: 3}, 5)
        await world.has(("r1", "delivered"), *([("r2", "delivered")] if comes_back else []))


async def test_a_request_id_that_is_used_again_is_sent_again() -> None:
    async with World() as world:
        await world.takes_over()
        later = outcome("nightly", tenant="t", origin=replace(ORIGIN, append_time_ms=now_ms() + HORIZON_MS + 60_000))
        for offset, (event, sent) in enumerate([(outcome("nightly", tenant="t"), 1)] * 2 + [(later, 2)]):
            world.reads(offset, event)
            await world.all_read()
            await wait_until_async(lambda: not world.gauges["in_flight"](), 5)
            assert len(world.sent) == sent
    first, *_, last = [one.webhook_id for one in world.deliveries()]
    assert first != last


async def test_a_webhook_that_cannot_be_made_fails_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(place: Any, event: Any, *others: Any) -> bytes:
        if event.request_id == "r1":
            raise ValueError("as of a record that nobody can write out")
        return webhook_body(place, event, *others)

    monkeypatch.setattr(dispatcher, "webhook_body", made)
    async with World() as world:
        await world.takes_over()
        world.reads(0, url=b"http://[h/hook")
        world.reads(1)
        world.reads(2)
        await wait_until_async(lambda: {("r0", "delivered"), ("r2", "delivered")} <= {*world.states()}, 5)
        world.later_ms = 2 * 86_400_000
        await wait_until_async(world.letters, 5)
    assert [one.request_id for one in world.letters()] == ["r1"]
    assert world.states()[-1] == ("r1", "failed")


@pytest.mark.usefixtures("soon_again")
async def test_what_arrives_while_the_registry_is_away_is_bounded() -> None:
    held, heard, tp = list[list[str]](), list[Listener](), ("inference.status", 0)
    codec = Registry(10**9)
    consumer: Any = SimpleNamespace(
        waits_for=None, hold=lambda topics: held.append([*topics]), start=lambda: None, commit=lambda offsets: None
    )
    tools: Any = SimpleNamespace(kafka=KafkaSettings(), prompt=codec, now_ms=now_ms)
    section = WebhooksSection.model_validate({"secret": KEY})
    calls = StatusCalls(tools, section, lambda listener: heard.append(listener) or consumer)
    calls.work.start()
    (listener,) = heard
    listener.on_assigned([tp])
    batches = 0
    while not held:
        batches += 1
        assert batches < 100, "nothing holds the consumer back"
        headers = ((HEADER_CALLBACK, b"http://h/hook"),)
        listener.on_batch([Read(tp, batches, b"r", b"...", now_ms(), headers)])
        listener.on_passed({tp: batches + 1})
    await wait_until_async(lambda: calls.work.waits_for, 5)
    codec.away = 0
    await wait_until_async(lambda: len(held) == 2, 5)
    await calls.cancel()
    assert held == [["inference.status"], []]


@pytest.fixture
def soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry that is away is asked again at once."""
    for module in (records, registry):
        monkeypatch.setattr(module, "AGAIN_S", 0.01)


@pytest.mark.usefixtures("soon_again")
@pytest.mark.parametrize("away", [1, 4])
async def test_the_dispatcher_waits_for_a_registry_that_is_away(away: int) -> None:
    async with World(codec=Registry(away)) as world:
        await world.takes_over(waiting(1))
        await world.has(("r1", "delivered"))
        assert world.it.work.waits_for is None


@pytest.mark.usefixtures("soon_again")
async def test_a_partition_that_goes_while_the_registry_is_waited_for() -> None:
    async with World(codec=Registry(3)) as world:
        await world.takes_over()
        world.reads(2)
        await wait_until_async(lambda: world.it.work.waits_for, 5)
        await world.listener.on_revoked([TP0])
        await world.all_read()
        assert (world.sent, world.committed) == ([], {})


def test_a_request_that_cannot_be_decoded_now_makes_no_body_without_it() -> None:
    message = RawMessage(ORIGIN.topic, 0, 1, 1, b"r", b"...")
    with pytest.raises(RegistryUnavailable):
        webhook_body(waiting(1).place, outcome("r"), message, Registry(1))  # pyright: ignore[reportArgumentType]


@pytest.mark.usefixtures("soon_again")
async def test_erasures_wait_for_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    readers, found = fake_readers(monkeypatch, records, {}), list[Any]()
    codec: Any = Registry(2)
    erasures = Erasures(KafkaSettings(), codec, lambda *erased: found.append(erased))
    await asyncio.to_thread(erasures.start)
    command = ControlCommand(kind="erase", request_id="r", tenant="t", created_at=1)
    message = RawMessage("inference.control", 0, 0, 1, b"r", CODEC.encode(command))
    await asyncio.to_thread(readers[0].read, [message])
    await wait_until_async(lambda: len(found) == 1, 5)


async def test_an_erasure_is_forgotten_with_the_request_that_it_is_about() -> None:
    async with World() as world:
        world.it.erased(("t", "r1"), now_ms() - ERASED_MS - 1)
        world.it.erased(("t", "r2"), now_ms())
        world.later_ms = ERASED_MS + 1_000
        world.it.erased(("t", "r3"), now_ms() + world.later_ms)
        await world.takes_over(*(delivery(f"r{n}", n, created_at=now_ms() + world.later_ms) for n in (1, 2, 3)))
        await wait_until_async(lambda: len(world.states()) == 3, 5)
    assert sorted(world.states()) == [("r1", "delivered"), ("r2", "delivered"), ("r3", "dropped")]


# -- a call never raises


def sender(*options: Any, timeout_s: float = 5) -> Sender:
    return Sender(Callbacks(WebhooksSection.model_validate({"secret": KEY})), timeout_s, *options)


async def post(sender: Sender, url: str = "http://x.example/", tenant: str = "t") -> Answer:
    return await sender.post(tenant, url, [], b"{}")


@pytest.mark.parametrize("host", ["a..com", "a" * 64 + ".com", ".x.com"])
async def test_a_name_that_cannot_be_resolved_is_an_answer(host: str) -> None:
    """Some stand on the topic: the worker keeps what it took from older producers."""
    assert await post(sender(), f"http://{host}/") == Answer(error="not reached, or broken off (OSError)")


async def test_an_unexpected_error_is_an_answer() -> None:
    network, address = httpcore.AsyncMockBackend([]), AsyncMock(return_value=["93.184.215.14"])
    network.connect_tcp = AsyncMock(side_effect=LookupError("x.example"))
    assert await post(sender(address, network)) == Answer(error="LookupError")


@pytest.mark.parametrize(("value", "seconds"), [(b"7", 7.0), (b"\xb2", None), (b"soon", None), (b"1" * 10, None)])
def test_retry_after(value: bytes, seconds: float | None) -> None:
    assert retry_after_s(value) == seconds


async def test_names_that_do_not_resolve_hold_up_one_tenant_only(monkeypatch: pytest.MonkeyPatch) -> None:
    let_go, asked = threading.Event(), list[str]()

    def slow(host: str, port: int, **_: object) -> list[object]:
        asked.append(host)
        if host.endswith("slow.example"):
            let_go.wait(30)
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(4))
    one = sender(timeout_s=0.5)
    try:
        calls = [post(one, f"http://h{number}.slow.example/", "evil") for number in range(32)]
        answers = await asyncio.gather(*calls)
        assert {answer.error for answer in answers} == {"no answer within 0.5 s"}
        assert len(asked) == NAMES_OF_ONE, "a lookup counts until it has ended, not until its call has"
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "made"), 2) == "made"
        assert (await post(one, "http://fast.example/", "good")).error == "not reached, or broken off (gaierror)"
    finally:
        let_go.set()
        one.close()


# -- which callbacks are accepted, told from the settings and the URL alone


OTHER = "whsec_" + base64.b64encode(bytes(range(24))).decode()


@pytest.mark.parametrize(
    "secret", ["whsec_", "whsec_…", "whsec_AAAA", KEY.removeprefix("whsec_"), [], [KEY, "x"], KEY + "A" * 90]
)
def test_a_secret_that_signs_badly_is_refused_and_not_shown(secret: object) -> None:
    with pytest.raises(ValidationError) as caught:
        WebhooksSection.model_validate({"secret": secret})
    assert "whsec_ and the base64" in str(caught.value.errors()[0]["msg"])


def test_a_tenant_has_its_own_secrets_or_the_common_one() -> None:
    callbacks = Callbacks(WebhooksSection.model_validate({"secret": KEY, "secrets": {"acme": [OTHER, KEY]}}))
    assert callbacks.secrets("acme") == [OTHER, KEY]
    assert callbacks.secrets("other") == [KEY]
    with pytest.raises(UnsupportedParameter, match=r"webhooks\.secret"):
        Callbacks(WebhooksSection.model_validate({"secrets": {"acme": OTHER}})).check("other", "https://x.example/")
    assert WebhooksSection.model_validate({"secret": ""}).secret is None


ALLOWED = ["https://hooks.example.com/a?b=c", "http://8.8.8.8/", "http://10.0.0.7:8080/hook", "http://hooks.internal/"]
REFUSED = [
    "https://hooks.example.com:8443/",
    "http://10.0.0.7/",
    "http://10.0.0.8:8080/",
    "http://127.0.0.1/",
    "http://localhost/",
    "http://a.localhost/",
    "http://[::1]/",
    "http://[::ffff:10.0.0.8]/",
    "http://169.254.169.254/latest/meta-data",
    "http://2.hooks.internal:81/",
]


@pytest.mark.parametrize("url", [*ALLOWED, *REFUSED])
def test_hosts(url: str) -> None:
    section = {"secret": KEY, "internal_hosts": ["10.0.0.7:8080", "hooks.internal"]}
    callbacks = Callbacks(WebhooksSection.model_validate(section))
    if url in ALLOWED:
        callbacks.check("default", url)
    else:
        with pytest.raises(InvalidRequest, match=r"webhooks\.internal_hosts"):
            callbacks.check("default", url)
