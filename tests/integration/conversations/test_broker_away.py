"""Turns on a real Kafka that is paused or restarted: they go on within two seconds of its being back (#17)."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from penstock.processors.conversations.kafka_log import KafkaLog
from penstock.processors.conversations.messages import answer_message
from penstock.processors.conversations.turns import Turns
from penstock.processors.kafka.broker_watch import BrokerWatch, metadata_probe
from penstock.producers.settings import KafkaSettings
from penstock.producers.transport import AsyncTransport, Transport
from penstock.schemas.codec import default_codec
from penstock.schemas.records import InferenceRequest

TURNS = 12


@pytest.fixture
async def turns(kafka: Any, kafka_prefix: str, create_topics: Callable[..., None]) -> AsyncIterator[Turns]:
    create_topics()
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers, topic_prefix=kafka_prefix)
    transport = Transport(settings, delivery_timeout_s=3600)
    watch = BrokerWatch(metadata_probe(settings))
    made = Turns(
        KafkaLog(settings, AsyncTransport(transport), max_topics=1000),
        default_codec(),
        settings.names.conversation,
        threads=4,
        cached_bytes=1 << 20,
        watch=watch,
    )
    yield made
    made.close()
    watch.close()
    transport.close(1)


def request(conversation: int, number: int) -> InferenceRequest:
    return InferenceRequest(
        request_id=f"r{conversation}-{number}",
        task="text_generation",
        conversation_id=f"c{conversation}",
        created_at=0,
        text_generation={"messages": [{"role": "user", "content": f"question {number}"}]},
    )


def mine() -> bool:
    return True


async def one_turn(turns: Turns, conversation: int, number: int) -> list[str]:
    """A whole turn; the contents that its history had."""
    asked = request(conversation, number)
    while True:
        start = await turns.read(asked, mine)
        if await turns.begin(asked, 1, 0, mine, start.mark):
            break
    answer = answer_message(
        asked, f"answer {number}", epoch=1, attempt=1, model="m", finish_reason="stop", usage=None, now_ms=0
    )
    assert (await turns.finish(answer, mine)).content == f"answer {number}"
    return [message["content"] for message in start.history]


async def all_turns(turns: Turns, number: int) -> list[list[str]]:
    return await asyncio.gather(*(one_turn(turns, conversation, number) for conversation in range(TURNS)))


async def test_a_paused_broker(turns: Turns, kafka: Any) -> None:
    if getattr(kafka, "process", None) is None:
        pytest.skip("this test pauses the broker, and PENSTOCK_TEST_KAFKA names one that is not ours")
    await all_turns(turns, 0)
    os.kill(kafka.process.pid, signal.SIGSTOP)
    try:
        going = asyncio.create_task(all_turns(turns, 1))
        await asyncio.sleep(7)
        assert not going.done()
    finally:
        os.kill(kafka.process.pid, signal.SIGCONT)
    back = time.monotonic()
    histories = await asyncio.wait_for(going, 60)
    assert histories == [["question 0", "answer 0"]] * TURNS
    assert time.monotonic() - back < 2


@pytest.mark.slow
@pytest.mark.parametrize("orderly", [True, False], ids=["stopped", "killed"])
async def test_a_restarted_broker(turns: Turns, kafka: Any, orderly: bool) -> None:
    await all_turns(turns, 0)
    await asyncio.to_thread(kafka.stop if orderly else kafka.kill)
    going = asyncio.create_task(all_turns(turns, 1))
    await asyncio.sleep(4)
    assert not going.done()
    await asyncio.to_thread(kafka.start)
    back = time.monotonic()
    histories = await asyncio.wait_for(going, 60)
    assert histories == [["question 0", "answer 0"]] * TURNS
    assert time.monotonic() - back < 2
