"""The pure core, operation by operation, beside a loop that puts a key into a dictionary and takes it out again.

The codec stands beside fastavro instead.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from common import Row, interleave, save

from penstock.gateway.frames import ChunkFrame
from penstock.gateway.hub import Hub
from penstock.processors.core.gate import CommitGate
from penstock.processors.core.scheduler import CLASSES, Decision, Item, Scheduler
from penstock.processors.kafka.intake import Intake, Taken
from penstock.schemas.codec import default_codec, schema_text
from penstock.schemas.compiled import reference
from penstock.schemas.fold import ResultFold
from penstock.schemas.records import Origin, Record, ResultEvent, Timings, Usage
from penstock.schemas.requests import parse_request, request_to_json
from penstock.schemas.topics import TopicNames

ENOUGH_S = 0.2
"""How long one figure is measured, at least."""
INFLIGHT = 64
CHUNKS = 1_000
CLIENTS = 100
FRAMES = 200

Work = Callable[[], int]
"""Does some operations; how many."""

CODEC = default_codec()
REQUEST = parse_request(
    {"task": "text_generation", "payload": {"prompt": "x" * 200, "max_tokens": 16}}, request_id="r" * 36, now_ms=1
)
CHUNK = ResultEvent(
    request_id=REQUEST.request_id,
    tenant=REQUEST.tenant,
    kind="chunk",
    origin=Origin(topic="inference.request.medium", partition=0, offset=7, append_time_ms=1),
    attempt=1,
    epoch=1,
    task=REQUEST.task,
    created_at=1,
    worker_id="w",
    text="word ",
    token_ids=[1],
    first_token_index=0,
    text_offset=0,
)
END = replace(
    CHUNK,
    kind="terminal",
    text=None,
    token_ids=None,
    first_token_index=None,
    text_offset=None,
    status="completed",
    text_generation={"text": "word " * 16},
    finish_reason="stop",
    usage=Usage(prompt_tokens=20, completion_tokens=16, total_tokens=36),
    timings=Timings(queued_ms=3, run_ms=20, first_token_ms=5),
    model="tiny-lm",
)


def rate(work: Work) -> dict[str, float]:
    """Operations per second."""
    work()
    count, began = 0, time.perf_counter()
    while (took := time.perf_counter() - began) < ENOUGH_S:
        count += work()
    return {"rate": count / took}


def dictionary() -> int:
    found: dict[int, int] = {}
    for number in range(10_000):
        found[number] = number
        del found[number]
    return 10_000


def gate() -> Work:
    """Records in flight by the dozen; the newest ends first, so that each dozen is acknowledged with its oldest."""
    held = CommitGate(inflight_cap={"medium": (1_000, 500)}, commit_span=1_000, classes={})
    tp, position = ("inference.request.medium", 0), 0
    held.assign([tp], 1)

    def work() -> int:
        nonlocal position
        offsets = range(position, position + INFLIGHT)
        position += INFLIGHT
        for offset in offsets:
            held.arrive(tp, offset, f"r{offset}", offset)
        acks = [ack for offset in reversed(offsets) for ack in held.complete(tp, offset)]
        assert acks == list(offsets)
        return INFLIGHT

    return work


def scheduler(queued: int) -> Work:
    """Seven engines are full, and all that is queued waits for them, some of it for long; the eighth has room."""
    held = Scheduler(aging_s=30, aged_share=4, capacity=queued + 1)

    def add(number: int, lane: str, enqueued_at: float) -> None:
        held.add(
            Item(
                key=("t", 0, number),
                request_id=str(number),
                tenant="default",
                klass=CLASSES[number % 3],
                priority=5,
                lane=lane,
                line=None,
                enqueued_at=enqueued_at,
                deadline=None,
                work=None,
            )
        )

    def can_start(item: Item) -> Decision:
        return Decision.GRANTED if item.lane == "open" else Decision.BLOCK_LANE

    for number in range(queued):
        add(number, f"full-{number % 7}", 60 * number / queued)

    def work() -> int:
        for number in range(queued, queued + 100):
            add(number, "open", 60)
            item = held.next(60, can_start)
            assert item is not None
            assert item.key[2] == number
        return 100

    return work


def fold() -> Work:
    size = len(CHUNK.text or "")
    events = [replace(CHUNK, text_offset=size * at, first_token_index=at) for at in range(CHUNKS)]
    end = replace(CHUNK, kind="terminal", text=None, status="completed", text_generation={"text": "word " * CHUNKS})

    def work() -> int:
        found = ResultFold(REQUEST.request_id, REQUEST.tenant)
        for offset, event in enumerate(events):
            found.apply(event, offset)
        found.apply(end, CHUNKS)
        assert len(found.text) == size * CHUNKS
        return CHUNKS

    return work


def repeated(operation: Callable[[], object]) -> Work:
    def work() -> int:
        for _ in range(500):
            operation()
        return 500

    return work


def hub() -> Work:
    """Each frame is made, encoded once and queued for every client."""
    held = Hub(client_frames=FRAMES)
    clients = [held.connect(lambda: None) for _ in range(CLIENTS)]
    for client in clients:
        held.subscribe(client, "subject")

    def work() -> int:
        for at in range(FRAMES):
            frame = ChunkFrame(request_id=REQUEST.request_id, cursor="c" * 40, text="word ", offset=at)
            frame.encoded()
            held.publish("subject", frame)
        for client in clients:
            assert len(client.frames) == FRAMES
            client.frames.clear()
        return FRAMES

    return work


def intake(value: bytes) -> Work:
    names = TopicNames()
    topics = names.request_topics()
    read = Intake(CODEC, names, dict.fromkeys(topics, 4)).read
    assert isinstance(read(topics[1], 0, 1, 1, (), value), Taken)
    return repeated(partial(read, topics[1], 0, 1, 1_763_735_000_123, (), value))


def cases() -> dict[str, Work]:
    return {
        "intake: read an Avro request": intake(CODEC.encode(REQUEST)),
        "intake: read a JSON request": intake(json.dumps(request_to_json(REQUEST) | {"created_at": None}).encode()),
        f"gate: arrive and complete, {INFLIGHT} in flight": gate(),
        **{f"scheduler: add and next, {n:,} queued, 7 of 8 lanes full": scheduler(n) for n in (100, 1_000, 10_000)},
        f"fold: a chunk of a stream of {CHUNKS:,}": fold(),
        f"hub: a frame to {CLIENTS} clients": hub(),
    }


def codec_cases() -> dict[str, tuple[Work, Work]]:
    """The generated code, and fastavro with dictionaries beside it."""
    found: dict[str, tuple[Work, Work]] = {}
    samples: dict[str, Record] = {"request": REQUEST, "chunk": CHUNK, "terminal event": END}
    for name, record in samples.items():
        kind, encoded = type(record), CODEC.encode(record)
        text = schema_text(kind.__name__)
        by_fastavro = reference.make_encoder(text, kind, encoded[: reference.HEADER_SIZE])
        from_fastavro = reference.make_decoder(text, text, kind)
        found[f"codec: encode a {name} ({len(encoded)} bytes), beside fastavro"] = (
            repeated(partial(CODEC.encode, record)),
            repeated(partial(by_fastavro, record)),
        )
        found[f"codec: decode a {name}, beside fastavro"] = (
            repeated(partial(CODEC.decode_any, encoded)),
            repeated(partial(from_fastavro, encoded)),
        )
    return found


def main(rounds: int = 7) -> None:
    rows: list[Row] = []
    for name, (work, other) in codec_cases().items():
        ours, floors, steals = interleave(rounds, partial(rate, work), partial(rate, other))
        rows.append(Row(name, "operations/s", ours["rate"], floors["rate"], steals, "reported"))
    for name, work in cases().items():
        ours, floors, steals = interleave(rounds, lambda work=work: rate(work), lambda: rate(dictionary))
        rows.append(Row(name, "operations/s", ours["rate"], floors["rate"], steals, "reported"))
    save("core_bench", rows)


if __name__ == "__main__":
    main()
