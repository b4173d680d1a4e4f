"""The pure core, operation by operation, beside a loop that puts a key into a dictionary and takes it out again.

The codec stands beside fastavro instead.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from io import BytesIO
from statistics import median
from typing import Any

import fastavro
from common import Row, interleave, save

from penstock.gateway.view.frames import ChunkFrame
from penstock.gateway.view.hub import Hub
from penstock.processors.core import effects as ask
from penstock.processors.core.commit.commit import Commit
from penstock.processors.core.fleet.estimates import EstimateKey, Estimates
from penstock.processors.core.fleet.ledger import DeviceCapacity, Ledger
from penstock.processors.core.fleet.placement import decide
from penstock.processors.core.fleet.residents import ModelSpec, Needs
from penstock.processors.core.fleet.views import Demand, ModelView, Need, ReplicaView
from penstock.processors.core.flow import Flow
from penstock.processors.core.intake.arrivals import Taken
from penstock.processors.core.intake.intake import Intake
from penstock.processors.core.queue.scheduler import CLASSES, Scheduler
from penstock.processors.core.settings import FlowSettings
from penstock.processors.core.work.work import Body, Subject
from penstock.schemas.choosing import Choice
from penstock.schemas.codec import default_codec, schema_text
from penstock.schemas.compiled import fallback
from penstock.schemas.fold import ResultFold
from penstock.schemas.records import ControlCommand, Origin, Record, ResultEvent, Timings, Usage
from penstock.schemas.requests import parse_request, request_to_json
from penstock.schemas.topics import TopicNames

ENOUGH_S = 0.2
"""How long one figure is measured, at least."""
INFLIGHT = 64
Begun = tuple[Subject, str]
SPAN = 50_000
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
    """Records in flight by the dozen; the newest ends first, so that each dozen can be committed with its oldest."""
    held = Commit(commit_span=1_000)
    tp, position = ("inference.request.medium", 0), 0
    held.assign({tp: (0, "")}, 1)

    def work() -> int:
        nonlocal position
        offsets = range(position, position + INFLIGHT)
        position += INFLIGHT
        held.delivered(tp, offsets.start, offsets.stop, offsets)
        for offset in offsets:
            held.arrive(tp, offset, f"r{offset}")
        for offset in reversed(offsets):
            held.complete(tp, offset)
        due = held.commits()
        assert due == {tp: (position, "")}
        held.committed(tp, *due[tp])
        return INFLIGHT

    return work


def commits() -> Work:
    """Half of the offsets behind each unfinished head are done, at random: the done maps are made anew each time."""
    held, chance = Commit(commit_span=SPAN), random.Random(1)
    tps = [("inference.request.medium", number) for number in range(16)]
    held.assign(dict.fromkeys(tps, (0, "")), 1)
    for tp in tps:
        held.delivered(tp, 0, SPAN, range(SPAN))
        for offset in range(SPAN):
            held.arrive(tp, offset, f"{tp[1]}/{offset}")
        for offset in chance.sample(range(1, SPAN), SPAN // 2):
            held.complete(tp, offset)
    end = SPAN

    def work() -> int:
        nonlocal end
        for tp in tps:
            held.delivered(tp, end, end + 1, [])
        end += 1
        assert len(held.commits()) == len(tps)
        return len(tps)

    return work


class Queued:
    """The least that the scheduler asks of an item."""

    __slots__ = (
        "arrived_at",
        "conversation",
        "cost",
        "deadline",
        "klass",
        "lane",
        "priority",
        "seq",
        "tenant",
        "ticket",
    )

    def __init__(
        self, seq: int, klass: str, tenant: str, lane: str, conversation: str | None, arrived_at: float
    ) -> None:
        self.seq = seq
        self.klass = klass
        self.tenant = tenant
        self.lane = lane
        self.conversation = conversation
        self.arrived_at = arrived_at
        self.deadline: float | None = arrived_at + 3_600 if seq % 2 else None
        self.priority = 5
        self.cost = 100
        self.ticket = 0


def scheduler(
    queued: int, *, lanes: int = 8, tenants: int = 4, conversations: int = 0, room: float = 1.0, classes: int = 3
) -> Work:
    """A request arrives, the first that may start is granted its memory and starts, and one ends.

    Some of what is queued has waited for long. `room`: the share of what is offered that fits into memory.
    """
    held: Scheduler[Queued] = Scheduler(aging_s=30, aged_share=4)
    ledger = Ledger([DeviceCapacity(device="cuda:0", kind="cuda", total_bytes=64 << 30)])
    ledger.observe("cuda:0", 0)
    seq = 0

    def add() -> str:
        nonlocal seq
        seq += 1
        lane = f"engine-{seq % lanes}"
        conversation = f"conversation-{seq % conversations}" if conversations else None
        arrived_at = 60.0 * min(seq, queued) / queued
        held.add(Queued(seq, CLASSES[seq % classes], f"tenant-{seq % tenants}", lane, conversation, arrived_at))
        return lane

    for _ in range(queued):
        add()

    def work() -> int:
        for number in range(100):
            lane = add()
            offered = held.candidates(lane, 60.0)
            item = next(offered)
            if room < 1 and number % round(1 / room):
                item = next(offered, item)  # the first does not fit, and the next one passes it
            grant = ledger.grant("run", {"cuda:0": 1 << 20}, 60.0)
            assert grant is not None
            held.start(item, 60.0)
            ledger.release(grant)
            if item.conversation is not None:
                held.release_conversation(item.conversation)
        assert len(held) == queued
        return 100

    return work


class FullCard:
    """The whole flow on a simulated card: each run has a grant of its own there, and as many wait as are queued."""

    SLOTS, MODELS = 8, 4

    def __init__(self, queued: int) -> None:
        card = DeviceCapacity(device="sim", kind="simulated", total_bytes=80 << 30)
        self.now, self.number = 100.0, 0
        names = [f"m{number}" for number in range(self.MODELS)]
        self.flow = Flow(FlowSettings(), BenchModels(), BenchBook(), devices=[card])
        self.flow.orders.configure({name: ModelSpec(model=name, devices=("simulated",)) for name in names}, self.now)
        self.flow.measurements.observed({"sim": (1 << 30, 0)}, self.now)
        self.flow.assigned({("medium", 0): (0, "")}, 1, fenced=False, now=self.now)
        for name in names:
            needs = Needs(load_bytes=8 << 30, run_bytes=1 << 28, exact=True)
            self.flow.replicas.sized(name, needs, self.now)
            self.flow.orders.want(name)
        self.running: list[Begun] = []
        self._carry_out()
        while len(self.flow.scheduler) < queued:
            self._arrive()
            self._carry_out()

    def _arrive(self) -> None:
        """A request of the next model and tenant, as the intake tells it."""
        number, tp = self.number, ("medium", 0)
        self.number += 1
        request = replace(REQUEST, request_id=f"r{number}", model=f"m{number % self.MODELS}")
        origin = Origin(topic="medium", partition=0, offset=number, append_time_ms=1)
        taken = Taken(
            request=request,
            origin=origin,
            klass=CLASSES[number % 3],
            conversation=None,
            attempt=1,
            deadline_ms=3_600_000,
            error=None,
            belongs_on=None,
            cost=100,
            size_bytes=300,
            pool=None,
            names_deadline=False,
        )
        self.flow.commit.delivered(tp, number, number + 1, [number])
        self.flow.arrived(tp, number, taken, Body(request, b"", (), None), self.now, 1)

    def _carry_out(self) -> None:
        """What the shells do, at once: engines are up, outcomes acknowledged."""
        flow = self.flow
        while True:
            flow.step(self.now)
            effects = flow.take_effects()
            if not effects:
                return
            for effect in effects:
                if isinstance(effect, ask.Load):
                    flow.replicas.up(effect.model, effect.replica, self.SLOTS, None, self.now, inline=True)
                elif isinstance(effect, ask.Start):
                    self.running.append((effect.subject, effect.run_id))
                elif isinstance(effect, ask.Terminal):
                    flow.published(effect.subject, effect.status)

    def work(self) -> int:
        """A run ends, the next starts with its grant, and a request arrives."""
        for _ in range(100):
            self.now += 0.001
            subject, run_id = self.running.pop(0)
            self.flow.attempts.finished(subject, run_id, None, self.now, large=False)
            self._arrive()
            self._carry_out()
        for tp, (offset, metadata) in self.flow.commit.commits().items():
            self.flow.commit.committed(tp, offset, metadata)
        assert len(self.running) == self.SLOTS * self.MODELS
        return 100


def flow_of_a_full_card(queued: int) -> Work:
    """All of a request in the core, with devices and grants of runs."""
    return FullCard(queued).work


class BenchModels:
    """Every name is a model."""

    def resolve(self, task: str, model: str | None, need: object = None) -> Choice:
        return Choice(model or "m0")


class BenchBook:
    """Nobody commands anything."""

    def apply(self, command: object, now_ms: int) -> bool:
        return True

    def cancelled(self, tenant: str, request_id: str) -> None:
        return None

    def priority(self, tenant: str, request_id: str) -> None:
        return None

    def deleted_at(self, tenant: str, conversation_id: str) -> None:
        return None

    def erasure(self, tenant: str, request_id: str, append_time_ms: int) -> None:
        return None

    def erasures(self) -> list[ControlCommand]:
        return []


def ledger_operations() -> Work:
    """A run's grant beside 64 others on a card, with host memory; a resize, and all of it back."""
    ledger = Ledger(
        [
            DeviceCapacity(device="cuda:0", kind="cuda", total_bytes=80 << 30),
            DeviceCapacity(device="cpu", kind="cpu", total_bytes=64 << 30),
        ]
    )
    for device in ("cuda:0", "cpu"):
        ledger.observe(device, 1 << 30)
    for number in range(INFLIGHT):
        assert ledger.grant(f"run-{number}", {"cuda:0": 1 << 28}, 0.0)

    def operation() -> None:
        grant = ledger.grant("run", {"cuda:0": 1 << 30, "cpu": 1 << 20}, 1.0)
        assert grant is not None
        ledger.resize(grant, "cpu", 0, 1.0)
        ledger.release(grant)

    return repeated(operation)


def placing(models: int, devices: int, *, loaded: int) -> Work:
    """`decide` where every model has demand: `loaded` of them are, on full cards, and the others want their room."""
    cards = [DeviceCapacity(device=f"cuda:{n}", kind="cuda", total_bytes=80 << 30) for n in range(devices)]
    ledger = Ledger(cards)
    for card in cards:
        ledger.observe(card.device, 0)
    need = devices * (80 << 30) // max(1, loaded) * 9 // 10
    replicas: list[ReplicaView] = []
    for number in range(loaded):
        device = cards[number % devices].device
        assert ledger.grant(f"m{number}", {device: need}, 0.0)
        replicas.append(
            ReplicaView(
                model=f"m{number}",
                replica=0,
                device=device,
                state="ready",
                bytes={device: need},
                ready_at=0.0,
                last_used_at=90.0,
                running=4,
                klass="medium",
            )
        )
    views = [
        ModelView(
            model=f"m{number}",
            needs={"cuda": Need(bytes=need)},
            load_seconds=10.0,
            use_rate=0.1,
            demand=Demand(counts={"medium": 5, "low": 3}, oldest={"medium": 90.0 - number, "low": 50.0}, weight=8.0),
        )
        for number in range(models)
    ]

    def work() -> int:
        decide(100.0, views, replicas, ledger)
        return 1

    return work


def learned_estimates() -> Work:
    """What a batch is booked with, after a hundred shapes; one in ten was measured anew."""
    estimates, key, chance = Estimates(), EstimateKey("m", "cuda", "float16"), random.Random(1)
    shapes = [(float(n), float(n * chance.randint(16, 2048))) for n in (chance.randint(1, 64) for _ in range(100))]
    for shape in shapes:
        estimates.learn(key, shape, int(1e9 + 1e6 * sum(shape)), int(1e9))

    def work() -> int:
        for number, shape in enumerate(shapes):
            if number % 10 == 0:
                estimates.learn(key, shape, int(1e9 + 1e6 * sum(shape)), int(1e9))
            estimates.need(key, shape, int(1e9))
        return len(shapes)

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


def cases() -> dict[str, Callable[[], Work]]:
    """Made one by one, so that what one of them holds does not slow the next."""
    avro, text = CODEC.encode(REQUEST), json.dumps(request_to_json(REQUEST) | {"created_at": None}).encode()
    return {
        "intake: read an Avro request": lambda: intake(avro),
        "intake: read a JSON request": lambda: intake(text),
        f"gate: arrive and complete, {INFLIGHT} in flight": gate,
        f"gate: commit of a partition, {SPAN:,} held, half of them done at random, one of 16": commits,
        **{f"scheduler: add, admit, start, {n:,} queued": partial(scheduler, n) for n in (10, 1_000, 100_000)},
        "scheduler: the same, every second does not fit, 100,000 queued": partial(scheduler, 100_000, room=0.5),
        "scheduler: the same, 10,000 tenants, 100,000 queued": partial(scheduler, 100_000, tenants=10_000),
        "scheduler: the same, 10,000 turns of one conversation": partial(
            scheduler, 10_000, lanes=1, conversations=1, classes=1
        ),
        **{
            f"flow: arrive, grant a run's memory, start, end, {n:,} queued": partial(flow_of_a_full_card, n)
            for n in (10, 1_000, 100_000)
        },
        f"ledger: grant on two devices, resize, release, beside {INFLIGHT}": ledger_operations,
        "placement: decide, 50 models, 8 devices, 16 loaded and full, all with demand": partial(
            placing, 50, 8, loaded=16
        ),
        "placement: the same, 48 loaded": partial(placing, 50, 8, loaded=48),
        "placement: the same, nothing loaded": partial(placing, 50, 8, loaded=0),
        "estimates: need after 100 shapes, one in ten learned": learned_estimates,
        f"fold: a chunk of a stream of {CHUNKS:,}": fold,
        f"hub: a frame to {CLIENTS} clients": hub,
    }


def codec_cases() -> dict[str, tuple[Work, Work]]:
    """The generated code, and fastavro with dictionaries beside it."""
    found: dict[str, tuple[Work, Work]] = {}
    samples: dict[str, Record] = {"request": REQUEST, "chunk": CHUNK, "terminal event": END}
    for name, record in samples.items():
        kind, encoded = type(record), CODEC.encode(record)
        text = schema_text(kind.__name__)
        by_fastavro = fastavro_encoder(text)
        from_fastavro = fallback.make_decoder(text, text, kind)
        found[f"codec: encode a {name} ({len(encoded)} bytes), beside fastavro"] = (
            repeated(partial(CODEC.encode, record)),
            repeated(partial(by_fastavro, record)),
        )
        found[f"codec: decode a {name}, beside fastavro"] = (
            repeated(partial(CODEC.decode_any, encoded)),
            repeated(partial(from_fastavro, encoded)),
        )
    return found


def fastavro_encoder(text: str) -> Callable[[Record], bytes]:
    def plain(part: dict[str, Any]) -> dict[str, Any]:  # times are numbers, as they are in the records
        return {name: value for name, value in part.items() if name != "logicalType"}

    schema = fastavro.parse_schema(json.loads(text, object_hook=plain), {})

    def encode(record: Record) -> bytes:
        out = BytesIO()
        fastavro.schemaless_writer(out, schema, record.to_dict())
        return out.getvalue()

    return encode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each case; their median counts")
    rounds = parser.parse_args().rounds
    rows: list[Row] = []
    for name, (work, other) in codec_cases().items():
        ours, floors, steals = interleave(rounds, partial(rate, work), partial(rate, other))
        mine, theirs = 1e6 / median(ours["rate"]), 1e6 / median(floors["rate"])
        print(f"{name}: {mine:.2f} µs, fastavro {theirs:.2f} µs", flush=True)
        rows.append(Row(name, "operations/s", ours["rate"], floors["rate"], steals, "reported"))
    for name, make in cases().items():
        work = make()
        ours, floors, steals = interleave(rounds, lambda work=work: rate(work), lambda: rate(dictionary))
        print(f"{name}: {1e6 / median(ours['rate']):.2f} µs", flush=True)
        rows.append(Row(name, "operations/s", ours["rate"], floors["rate"], steals, "reported"))
    save("core_bench", rows)


if __name__ == "__main__":
    main()
