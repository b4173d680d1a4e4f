"""The client library against a real broker and a stand-in worker."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from penstock.common.admin import create_conversation_topic
from penstock.common.reader import PartitionReader, read_to_end
from penstock.common.transport import Transport
from penstock.producers import AsyncClient, Chunk, Client, KafkaSettings, Restarted, Result, Status
from penstock.producers.follower import BACK_RECORDS
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import Cancelled, EngineFailed, InvalidRequest, NotFound, Overloaded, TooLarge
from penstock.schemas.records import (
    ControlCommand,
    ConversationMessage,
    ErrorInfo,
    InferenceRequest,
    Origin,
    conversation_message_key,
)
from penstock.schemas.topics import partition_for
from support import wait_until

TEXT = "The quick brown fox jumps over the lazy dog. " * 5


@pytest.fixture
def client(settings: KafkaSettings) -> Iterator[Client]:
    with Client(settings) as made:
        yield made


def ask(client: Client, prompt: str = TEXT, **fields: Any) -> Any:
    return client.submit(task="text_generation", payload={"prompt": prompt}, **fields)


def test_submit_is_acknowledged_on_the_partition_of_its_key(client: Client, settings: KafkaSettings) -> None:
    payload = {"messages": [{"role": "user", "content": "hello"}]}
    submitted = client.submit(
        task="text_generation", payload=payload, conversation_id="c1", priority=1, metadata={"k": "v"}
    )
    assert submitted.topic == settings.names.request("text_generation", 1)
    assert submitted.partition == partition_for(b"c1", 4)
    record = read_to_end(settings, submitted.topic)[0]
    assert (record.offset, record.timestamp_ms) == (submitted.offset, submitted.append_time_ms)
    request = default_codec().decode(record.value or b"", InferenceRequest)
    assert (request.request_id, request.conversation_id, request.metadata) == (submitted.request_id, "c1", {"k": "v"})


def test_a_follow_sees_everything_in_order_and_ends(client: Client, worker: Any) -> None:
    events = list(client.follow(ask(client), timeout=20))
    assert "".join(event.text for event in events if isinstance(event, Chunk)) == TEXT
    assert isinstance(events[-1], Result)
    statuses = [event.status for event in events if isinstance(event, Status)]
    assert statuses == ["queued", "running"][: len(statuses)]


def test_a_follow_begun_long_after_the_end_misses_nothing(client: Client, worker: Any, settings: KafkaSettings) -> None:
    submitted = ask(client)
    assert client.result(submitted, timeout=20).output_text == TEXT
    assert client.result(submitted.request_id, timeout=20).output_text == TEXT
    texts = [event.text for event in client.follow(submitted.request_id, timeout=20) if isinstance(event, Chunk)]
    assert "".join(texts) == TEXT
    with Client(settings) as stranger:
        since_ms = submitted.append_time_ms
        assert stranger.result(submitted.request_id, timeout=20).output_text == TEXT
        assert stranger.result(submitted.request_id, timeout=20, since_ms=since_ms).output_text == TEXT
        assert stranger.result(submitted, timeout=20).output_text == TEXT


def test_many_follows_share_one_consumer(client: Client, worker: Any) -> None:
    prompts = [f"{number} {TEXT}" for number in range(40)]

    def through(prompt: str) -> str:
        events = client.follow(ask(client, prompt), timeout=60)
        return "".join(event.text for event in events if isinstance(event, Chunk))

    with ThreadPoolExecutor(20) as pool:
        assert list(pool.map(through, prompts)) == prompts
    followers = [thread for thread in threading.enumerate() if thread.name == "penstock-follower"]
    assert len(followers) == 1


def test_a_restart_is_told(client: Client, worker: Any) -> None:
    def script(worker: Any, request: InferenceRequest, origin: Origin) -> None:
        worker.chunk(request, origin, "half an ans", 0)
        worker.chunk(request, origin, "another", 0, attempt=2)
        worker.outcome(request, origin, "another answer", attempt=2)

    worker.script = script
    events = [event for event in client.follow(ask(client), timeout=20) if not isinstance(event, Status)]
    assert [type(event) for event in events] == [Chunk, Restarted, Chunk, Chunk, Result]


def test_a_slow_reader_loses_nothing_and_stops_nobody(client: Client, worker: Any) -> None:
    long = "abc" * 2000  # 2,000 chunks, far more than the buffer of one follow
    slow = client.follow(ask(client, long), timeout=60)
    first = next(slow)
    assert client.result(ask(client), timeout=20).output_text == TEXT
    events = [first, *slow]
    assert "".join(event.text for event in events if isinstance(event, Chunk)) == long


def test_a_follow_of_an_old_request_does_not_hold_up_the_others(
    client: Client, worker: Any, settings: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its bare id it is read from the topic's beginning, but by a consumer of its own."""
    ids = [name for n in range(1000) if partition_for((name := f"r-{n}").encode(), 4) == 2][:3]
    with Client(settings) as other:
        assert other.result(ask(other, request_id=ids[0]), timeout=20).output_text == TEXT
    filling = Transport(settings)
    for _ in range(5_000):
        filling.send(settings.names.result, b"of others", key=b"other", partition=2)
    filling.close()
    held: list[tuple[InferenceRequest, Origin]] = []
    worker.script = lambda worker, request, origin: held.append((request, origin))
    live = client.follow(ask(client, request_id=ids[1]), timeout=60)
    wait_until(lambda: held)
    worker.chunk(*held[0], "begun ", 0)
    assert next(live) == Chunk(text="begun ", text_offset=0, attempt=1)

    went_back: list[int] = []
    seek = PartitionReader.seek

    def watched(reader: PartitionReader, tp: tuple[str, int], offset: int) -> None:
        went_back.append(reader.positions().get(tp, offset) - offset)
        seek(reader, tp, offset)

    monkeypatch.setattr(PartitionReader, "seek", watched)
    assert client.result(ids[0], timeout=30).output_text == TEXT
    waiting = client.follow(ids[2], timeout=30)  # of one that is still to come: caught up, then followed on
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(next, waiting)
        worker.outcome(*held[0], "begun and done")
        assert [event.text for event in live if isinstance(event, Chunk)] == ["and done"]
        ask(client, request_id=ids[2])
        wait_until(lambda: len(held) > 1)
        worker.outcome(*held[1], "late")
        assert first.result(30) == Chunk(text="late", text_offset=0, attempt=1)
    waiting.close()
    assert max(went_back, default=0) <= BACK_RECORDS


def test_a_failure_raises_its_typed_error(client: Client, worker: Any) -> None:
    error = ErrorInfo(code="engine_failed", message="out of luck", type="server_error", details='{"exitcode": 9}')
    worker.script = lambda worker, request, origin: worker.outcome(request, origin, "", status="failed", error=error)
    with pytest.raises(EngineFailed, match="out of luck") as failed:
        client.result(ask(client), timeout=20)
    assert failed.value.details == {"exitcode": 9}
    worker.script = lambda worker, request, origin: worker.outcome(request, origin, "", status="cancelled")
    with pytest.raises(Cancelled):
        client.result(ask(client), timeout=20)


def test_cancel_writes_a_command_under_the_requests_key(client: Client, settings: KafkaSettings) -> None:
    client.cancel("r-1", reason="changed my mind")
    record = read_to_end(settings, settings.names.control)[0]
    command = default_codec().decode(record.value or b"", ControlCommand)
    assert record.key == b"r-1/cancel"
    assert (command.kind, command.tenant, command.reason) == ("cancel", "default", "changed my mind")


def test_a_new_priority_is_a_command_under_the_requests_key(client: Client, settings: KafkaSettings) -> None:
    client.reprioritize("r-1", 2)
    record = read_to_end(settings, settings.names.control)[0]
    command = default_codec().decode(record.value or b"", ControlCommand)
    assert record.key == b"r-1/reprioritize"
    assert (command.kind, command.tenant, command.priority) == ("reprioritize", "default", 2)
    with pytest.raises(InvalidRequest) as refused:
        client.reprioritize("r-1", -1)
    assert refused.value.param == "priority"


def test_no_outcome_in_time_is_a_timeout(client: Client) -> None:
    submitted = ask(client)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=submitted.request_id):
        client.result(submitted, timeout=0.3)
    assert time.monotonic() - began < 5


def run_out(events: Iterator[Any]) -> None:
    with pytest.raises(TimeoutError):
        list(events)


def test_too_large_and_too_many_are_refused(settings: KafkaSettings) -> None:
    with Client(settings, max_follows=1) as client:
        with pytest.raises(TooLarge):
            ask(client, "x" * 1_200_000)
        submitted = ask(client)
        first = client.follow(submitted, timeout=0.5)
        thread = threading.Thread(target=run_out, args=(first,))
        thread.start()
        wait_until(lambda: any(t.name == "penstock-follower" for t in threading.enumerate()))
        with pytest.raises(Overloaded):
            list(client.follow(submitted, timeout=5))
        thread.join()


def test_a_missing_topic_is_named(kafka: Any) -> None:
    with Client(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers, topic_prefix="nowhere-")) as client:
        began = time.monotonic()
        with pytest.raises(NotFound, match=r"nowhere-inference\.request\.medium does not exist"):
            ask(client)
        with pytest.raises(NotFound, match=r"nowhere-inference\.result does not exist"):
            client.result("r", timeout=5)
        with pytest.raises(NotFound, match=r"nowhere-inference\.request\.medium\.big"):
            ask(client, pool="big")
        assert time.monotonic() - began < 5


def message(request_id: str, direction: str, content: str, epoch: int = 1) -> ConversationMessage:
    return ConversationMessage(
        request_id=request_id,
        tenant="default",
        conversation_id="c1",
        direction=direction,
        epoch=epoch,
        role="user" if direction == "in" else "assistant",
        content=content,
        created_at=0,
    )


def test_history_is_folded_and_replay_is_not(client: Client, settings: KafkaSettings) -> None:
    with pytest.raises(NotFound, match="conversation c1 does not exist"):
        client.history("c1")
    topic = settings.names.conversation("default", "c1")
    create_conversation_topic(settings, topic)
    assert client.history("c1") == []
    transport = Transport(settings)
    for made in (
        message("a", "in", "hello"),
        message("a", "in", "hello", epoch=2),
        message("a", "out", "hi"),
        message("a", "out", "zombie", epoch=2),
    ):
        transport.send(topic, default_codec().encode(made), key=conversation_message_key(made).encode())
    transport.send(topic, b"garbage", key=b"foreign")
    transport.close()
    assert [(turn.offset, turn.message.content) for turn in client.history("c1")] == [(0, "hello"), (2, "hi")]
    assert [record.offset for record in client.replay("c1")] == [0, 1, 2, 3]
    assert [record.offset for record in client.replay("c1", 2)] == [2, 3]


def test_artifacts_lie_under_the_clients_tenant(settings: KafkaSettings, tmp_path: Path) -> None:
    with Client(settings, tenant="acme", artifacts=tmp_path) as client:
        artifact = client.artifacts.put(b"bytes", media_type="image/png")
        assert client.artifacts.get(artifact.artifact_id) == b"bytes"
        assert (tmp_path / "acme" / artifact.artifact_id / "data").read_bytes() == b"bytes"


async def test_the_async_client_does_the_same(worker: Any, settings: KafkaSettings, tmp_path: Path) -> None:
    async with AsyncClient(settings, artifacts=tmp_path) as client:

        async def through(prompt: str) -> str:
            submitted = await client.submit(task="text_generation", payload={"prompt": prompt})
            events = [event async for event in client.follow(submitted, timeout=60)]
            assert isinstance(events[-1], Result)
            return "".join(event.text for event in events if isinstance(event, Chunk))

        prompts = [f"{number} {TEXT}" for number in range(30)]
        assert await asyncio.gather(*map(through, prompts)) == prompts
        submitted = await client.submit(task="text_generation", payload={"prompt": "again"})
        assert (await client.result(submitted, timeout=20)).output_text == "again"
        with pytest.raises(NotFound):
            await client.history("none")
        with pytest.raises(NotFound):
            await client.replay("none")
        artifact = await client.artifacts.put(b"x")
        assert await client.artifacts.get(artifact.artifact_id) == b"x"
        assert await client.artifacts.describe(artifact.artifact_id) == artifact
        await client.reprioritize(submitted.request_id, 2)
        await client.cancel(submitted.request_id)
        worker.script = lambda *_: None
        silent = await client.submit(task="text_generation", payload={"prompt": "silence"})
        with pytest.raises(TimeoutError):
            await client.result(silent, timeout=0.3)
        waiting = asyncio.ensure_future(client.result(silent))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


def test_a_follow_survives_a_restart_of_the_broker(kafka: Any, client: Client, worker: Any) -> None:
    held: list[tuple[InferenceRequest, Origin]] = []
    worker.script = lambda worker, request, origin: held.append((request, origin))
    submitted = ask(client)
    wait_until(lambda: held)
    request, origin = held[0]
    worker.chunk(request, origin, "before", 0)
    events = client.follow(submitted, timeout=120)
    assert next(events) == Chunk(text="before", text_offset=0, attempt=1)
    kafka.restart()
    worker.outcome(request, origin, "before and after")
    rest = list(events)
    assert [event.text for event in rest if isinstance(event, Chunk)] == [" and after"]
    assert isinstance(rest[-1], Result)
    assert ask(client).offset >= 0
