"""The transport without a broker: refusals, deadlines, and outcomes on the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from kit.refusals import refused
from penstock.cli.paths import free_port
from penstock.common.outgoing import Outgoing
from penstock.common.settings import KafkaSettings
from penstock.common.transport import AsyncTransport, Delivery, Transport
from penstock.schemas.errors import BrokerUnavailable, InvalidRequest, Overloaded, PenstockError, TooLarge
from support import wait_until


@pytest.fixture
def nobody() -> KafkaSettings:
    """No broker listens at this address."""
    return KafkaSettings(bootstrap_servers=f"127.0.0.1:{free_port()}", max_record_bytes=1000)


@pytest.fixture
def transport(nobody: KafkaSettings) -> Iterator[Transport]:
    made = Transport(nobody, delivery_timeout_s=1.0, queue_max_messages=3)
    yield made
    made.close(0)


def test_a_record_over_the_limit_is_refused_with_the_limit(transport: Transport) -> None:
    with refused(TooLarge, match="max_record_bytes = 1000", details={"size_bytes": 1001, "limit_bytes": 1000}):
        transport.send("t", b"x" * 990, key=b"k" * 11)


def test_a_full_local_queue_is_refused_at_once(transport: Transport) -> None:
    for _ in range(3):
        transport.send("t", b"x")
    with pytest.raises(Overloaded):
        transport.send("t", b"x")
    assert len(transport) == 3


def test_without_a_broker_the_outcome_comes_within_the_deadline(transport: Transport) -> None:
    found: list[Delivery] = []
    began = time.monotonic()
    transport.send("t", b"x", on_delivery=found.append)
    wait_until(lambda: found)
    assert time.monotonic() - began < 5
    assert isinstance(found[0].error, BrokerUnavailable)
    assert found[0].offset == -1


def test_a_parked_producer_is_woken_by_a_send_and_by_closing(
    nobody: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.common.transport.PARK_AFTER_S", 0.0)
    monkeypatch.setattr("penstock.common.transport.PARKED_S", 3600.0)
    transport = Transport(nobody, delivery_timeout_s=0.2)
    for _ in range(3):  # at rest before each
        told = threading.Event()
        transport.send("t", b"x", on_delivery=lambda _, told=told: told.set())
        assert told.wait(10)
    closing = threading.Thread(target=transport.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()


def test_closing_reports_what_was_not_delivered(nobody: KafkaSettings) -> None:
    transport, found = Transport(nobody, delivery_timeout_s=60), list[Delivery]()
    transport.send("t", b"x", on_delivery=found.append)
    assert transport.close(0.1) == 1
    assert isinstance(found[0].error, BrokerUnavailable)
    with pytest.raises(BrokerUnavailable, match="closed"):
        transport.send("t", b"x")


def test_a_callback_that_raises_does_not_end_the_poll_thread(
    transport: Transport, caplog: pytest.LogCaptureFixture
) -> None:
    told = threading.Event()

    def fails(_: Delivery) -> None:
        raise ValueError("ours")

    transport.send("t", b"x", on_delivery=fails)
    transport.send("t", b"x", on_delivery=lambda _: told.set())
    assert told.wait(10)
    assert "callback_failed" in caplog.text


def test_settings_that_kafka_does_not_know_are_named() -> None:
    with pytest.raises(InvalidRequest, match="no\\.such\\.property"):
        Transport(KafkaSettings(security={"no.such.property": "1"}))


def test_secrets_are_not_in_the_repr() -> None:
    assert "hunter2" not in repr(KafkaSettings(security={"sasl.password": "hunter2"}))


class FakeTransport:
    """Delivers when told to, on a thread of its own, as the poll thread does."""

    def __init__(self) -> None:
        self.sent: list[Callable[[Delivery], None]] = []
        self.refusals: dict[bytes | None, PenstockError] = {}

    def send(self, topic: str, value: bytes | None, *, on_delivery: Callable[[Delivery], None], **_: Any) -> None:
        if value in self.refusals:
            raise self.refusals[value]
        self.sent.append(on_delivery)

    def deliver(self, error: BrokerUnavailable | None = None) -> None:
        def run() -> None:
            for offset, tell in enumerate(self.sent):
                tell(Delivery(topic="t", partition=0, offset=offset, timestamp_ms=1, error=error))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()


async def test_outcomes_reach_the_loop_in_order_with_one_hop_per_batch() -> None:
    fake, loop = FakeTransport(), asyncio.get_running_loop()
    hops = 0

    class Counting:
        def call_soon_threadsafe(self, action: Callable[[], None]) -> None:
            nonlocal hops
            hops += 1
            loop.call_soon_threadsafe(action)

    outcomes: list[int] = []
    transport = AsyncTransport(fake, Counting())  # type: ignore[arg-type]
    for _ in range(50):
        transport.produce_nowait("t", b"x", callback=lambda delivery: outcomes.append(delivery.offset))
    fake.deliver()
    assert outcomes == []
    await asyncio.sleep(0)
    assert outcomes == list(range(50))
    assert hops == 1


@pytest.mark.parametrize("refused", [None, 0, 2, 4])
@pytest.mark.parametrize("error", [TooLarge("x"), Overloaded("x"), BrokerUnavailable("x")], ids=lambda one: one.code)
async def test_of_a_set_nothing_is_sent_behind_the_first_record_that_is_refused(
    refused: int | None, error: PenstockError
) -> None:
    fake = FakeTransport()
    fake.refusals = {} if refused is None else {b"%d" % refused: error}
    records = [Outgoing(topic="t", key=b"k", value=b"%d" % number, headers=[]) for number in range(5)]
    sending = asyncio.ensure_future(AsyncTransport(fake).produce_all(records))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    sent = 5 if refused is None else refused
    assert len(fake.sent) == sent
    fake.deliver()
    told = [(one.offset, one.error) for one in await sending]
    assert told == [(number, None) for number in range(sent)] + ([] if refused is None else [(-1, error)])


async def test_produce_raises_the_error_of_its_delivery() -> None:
    fake = FakeTransport()
    transport = AsyncTransport(fake)  # type: ignore[arg-type]
    waiting = asyncio.ensure_future(transport.produce("t", b"x"))
    cancelled = asyncio.ensure_future(transport.produce("t", b"x"))
    await asyncio.sleep(0)
    cancelled.cancel()
    fake.deliver(BrokerUnavailable("away"))
    with pytest.raises(BrokerUnavailable):
        await waiting


# The error of librdkafka after which an idempotent producer cannot continue.
FATAL = SimpleNamespace(code=lambda: -150, fatal=lambda: True, str=lambda: "out of sequence")


# The message of a report.
SENT = SimpleNamespace(offset=lambda: 0, partition=lambda: 0, timestamp=lambda: (0, 1))


class ScriptedProducer:
    """A producer whose records wait until a test delivers them, or until they are purged."""

    made: list[ScriptedProducer]
    may_purge: threading.Event

    def __init__(self, config: dict[str, Any], **_: Any) -> None:
        self.fail = lambda: config["error_cb"](FATAL)
        self.values: list[bytes] = []
        self.refuses = self.delivers = self.purged = False
        self._queue: list[Callable[[KafkaError | None, Any], None]] = []
        self.made.append(self)

    def __len__(self) -> int:
        return len(self._queue)

    def produce(self, topic: str, value: bytes, key: Any, partition: int, report: Any, **_: Any) -> None:
        if self.refuses:
            raise KafkaException(KafkaError(KafkaError._FATAL))
        self.values.append(value)
        self._queue.append(report)

    def purge(self) -> None:
        assert self.may_purge.wait(10)
        self.purged = True

    def poll(self, timeout_s: float) -> None:
        if not (self.purged or self.delivers):
            threading.Event().wait(min(timeout_s, 0.005))
            return
        error = KafkaError(KafkaError._PURGE_QUEUE) if self.purged else None
        while self._queue:
            self._queue.pop(0)(error, SENT)


@pytest.fixture
def producers(monkeypatch: pytest.MonkeyPatch) -> list[ScriptedProducer]:
    """Those that the transport has made."""
    ScriptedProducer.made, ScriptedProducer.may_purge = [], threading.Event()
    ScriptedProducer.may_purge.set()
    monkeypatch.setattr("penstock.common.transport.Producer", ScriptedProducer)
    return ScriptedProducer.made


def test_a_new_producer_gets_what_the_failed_one_had_before_what_is_sent_now(
    nobody: KafkaSettings, producers: list[ScriptedProducer]
) -> None:
    transport, found = Transport(nobody), list[Delivery]()
    transport.send("t", b"1", on_delivery=found.append)
    transport.send("t", b"2", on_delivery=found.append)
    ScriptedProducer.may_purge.clear()
    producers[0].fail()
    began = time.monotonic()
    transport.send("t", b"3", on_delivery=found.append)  # on an event loop: it must not wait for the purge
    assert time.monotonic() - began < 5
    ScriptedProducer.may_purge.set()
    wait_until(lambda: len(producers) == 2 and len(producers[1].values) == 3)
    assert producers[1].values == [b"1", b"2", b"3"]
    assert (found, len(transport)) == ([], 3)
    producers[1].delivers = True
    wait_until(lambda: len(found) == 3)
    assert [delivery.error for delivery in found] == [None] * 3
    assert transport.close(1) == 0


def test_a_record_that_the_failed_producer_refuses_goes_to_the_next_one(
    nobody: KafkaSettings, producers: list[ScriptedProducer]
) -> None:
    transport = Transport(nobody)
    transport.send("t", b"1")
    producers[0].refuses = True  # before its error was polled
    transport.send("t", b"2")
    wait_until(lambda: len(producers) == 2 and len(producers[1].values) == 2)
    assert producers[1].values == [b"1", b"2"]
    producers[1].delivers = True
    assert transport.close(1) == 0


def test_producers_that_fail_one_after_the_other_do_not_hold_a_record_beyond_its_deadline(
    nobody: KafkaSettings, producers: list[ScriptedProducer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.common.transport.REPLACE_S", 0.01)
    transport, found = Transport(nobody, delivery_timeout_s=0.3), list[Delivery]()
    transport.send("t", b"1", on_delivery=found.append)

    def ended() -> bool:
        producers[-1].fail()
        return bool(found)

    wait_until(ended)
    assert isinstance(found[0].error, BrokerUnavailable)
    assert len(producers) > 1
    transport.close(0)


def test_the_local_queue_stays_bounded_while_a_producer_is_replaced(
    nobody: KafkaSettings, producers: list[ScriptedProducer]
) -> None:
    transport = Transport(nobody, queue_max_messages=2)
    transport.send("t", b"1")
    ScriptedProducer.may_purge.clear()
    producers[0].fail()
    transport.send("t", b"2")
    with pytest.raises(Overloaded):
        transport.send("t", b"3")
    ScriptedProducer.may_purge.set()
    transport.close(0)
