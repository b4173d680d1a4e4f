"""Turns on a real Kafka that is paused or restarted: they go on within two seconds of its being back (#17)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from penstock.common.settings import KafkaSettings
from penstock.common.transport import AsyncTransport, Transport
from penstock.processors.conversations.kafka_log import KafkaLog
from penstock.processors.conversations.messages import answer_message
from penstock.processors.conversations.turns import ConversationTurns
from penstock.processors.kafka.broker_watch import BrokerWatch, metadata_probe
from penstock.schemas.codec import default_codec
from penstock.schemas.records import InferenceRequest

TURNS = 12


class Side:
    """A worker's turns with clients of their own."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._transport = Transport(settings, delivery_timeout_s=3600)
        self._watch = BrokerWatch(metadata_probe(settings))
        self.turns = ConversationTurns(
            KafkaLog(settings, AsyncTransport(self._transport), max_topics=1000),
            default_codec(),
            settings.names.conversation,
            threads=4,
            cached_bytes=1 << 20,
            watch=self._watch,
        )

    def close(self) -> None:
        self.turns.close()
        self._watch.close()
        self._transport.close(1)


@pytest.fixture
def settings(kafka: Any, kafka_prefix: str, create_topics: Callable[..., None]) -> KafkaSettings:
    create_topics()
    return KafkaSettings(bootstrap_servers=kafka.bootstrap_servers, topic_prefix=kafka_prefix)


@pytest.fixture
async def side(settings: KafkaSettings) -> AsyncIterator[Side]:
    made = Side(settings)
    yield made
    made.close()


def request(conversation: str, number: int) -> InferenceRequest:
    return InferenceRequest(
        request_id=f"{conversation}-{number}",
        task="text_generation",
        conversation_id=conversation,
        created_at=0,
        text_generation={"messages": [{"role": "user", "content": f"question {number}"}]},
    )


def mine() -> bool:
    return True


async def one_turn(turns: ConversationTurns, conversation: str, number: int) -> list[str]:
    """A whole turn; the contents that its history had."""
    asked = request(conversation, number)
    while True:
        start = await turns.read(asked, mine)
        topic_id = await turns.begin(asked, 1, 0, mine, start.mark)
        if topic_id is not None:
            break
    answer = answer_message(
        asked, f"answer {number}", epoch=1, attempt=1, model="m", finish_reason="stop", usage=None, now_ms=0
    )
    assert (await turns.finish(answer, mine, topic_id)).content == f"answer {number}"
    return [message["content"] for message in start.past.messages]


async def all_turns(side: Side, number: int, prefix: str = "c") -> list[list[str]]:
    return await asyncio.gather(*(one_turn(side.turns, f"{prefix}{n}", number) for n in range(TURNS)))


async def go_on(going: asyncio.Task[list[list[str]]], settings: KafkaSettings) -> None:
    """Kafka is back: those who waited are done at most two seconds after newcomers, who found it there."""
    newcomers = Side(settings)
    try:
        await asyncio.wait_for(all_turns(newcomers, 0, "new"), 60)
        histories = await asyncio.wait_for(going, 2)
    finally:
        newcomers.close()
    assert histories == [["question 0", "answer 0"]] * TURNS


async def test_a_paused_broker(side: Side, settings: KafkaSettings, kafka: Any) -> None:
    if getattr(kafka, "process", None) is None:
        pytest.skip("this test pauses the broker, and PENSTOCK_TEST_KAFKA names one that is not ours")
    await all_turns(side, 0)
    os.kill(kafka.process.pid, signal.SIGSTOP)
    try:
        going = asyncio.create_task(all_turns(side, 1))
        await asyncio.sleep(7)
        assert not going.done()
    finally:
        os.kill(kafka.process.pid, signal.SIGCONT)
    await go_on(going, settings)


@pytest.mark.slow
@pytest.mark.parametrize("orderly", [pytest.param(True, marks=pytest.mark.thorough), False], ids=["stopped", "killed"])
async def test_a_restarted_broker(side: Side, settings: KafkaSettings, kafka: Any, orderly: bool) -> None:
    await all_turns(side, 0)
    await asyncio.to_thread(kafka.stop if orderly else kafka.kill)
    going = asyncio.create_task(all_turns(side, 1))
    await asyncio.sleep(4)
    assert not going.done()
    await asyncio.to_thread(kafka.start)
    await go_on(going, settings)
