"""Records that older releases wrote: today's code reads them as records whose newer fields have their defaults."""

from __future__ import annotations

import asyncio
import io
import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import fastavro
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from avro_values import values_of
from flow_driver import MEDIUM, World
from kit.examples import examples
from kit.records import (
    CONTROL,
    NAMES,
    ORIGIN,
    REQUESTS,
    RESULTS,
    STATUSES,
    chunk,
    command,
    gateway_state,
    model_info,
    outcome,
    request,
    status,
    worker,
)
from kit.view_gateway import ViewGateway
from kit.worker_turns import MemoryLog, answer, contents, take, turns_of
from kit.worker_turns import request as turn_of
from penstock.common.conversations import decoded, fold_messages
from penstock.common.desired import read_record
from penstock.common.reader import RawMessage
from penstock.gateway.dead_letters.letters import facts_of, request_of
from penstock.gateway.openai.conversation_items import items_of_turn
from penstock.gateway.service.model_states import admin_models, observing_topic
from penstock.gateway.service.models import public_models
from penstock.gateway.view.fleet import Fleet
from penstock.gateway.view.gateways import Gateways
from penstock.gateway.view.liveness import judge
from penstock.gateway.webhooks.bodies import webhook_body
from penstock.processors.conversations.messages import input_messages
from penstock.processors.core.intake.arrivals import Taken
from penstock.processors.core.intake.intake import Intake
from penstock.processors.core.work.peers import Peers, Wanted
from penstock.processors.core.work.work import Body
from penstock.processors.kafka.published_streams import StreamSoFar
from penstock.producers.events import EventFold
from penstock.schemas.codec import SCHEMA_IDS, Codec, default_codec, released_schema
from penstock.schemas.records import (
    RECORDS,
    ControlCommand,
    DeadLetter,
    DesiredState,
    ModelState,
    Place,
    Record,
    WorkerState,
    conversation_message_key,
)

TODAY = default_codec()
GROWN = [kind for kind in RECORDS if len(SCHEMA_IDS[kind.__name__]) > 1]
NEWEST = max(len(ids) for ids in SCHEMA_IDS.values())


class Version(NamedTuple):
    """A released schema, in which times are plain numbers."""

    schema_id: int
    parsed: Any
    values: st.SearchStrategy[dict[str, Any]]

    def body(self, values: Mapping[str, Any]) -> bytes:
        fastavro.schemaless_writer(out := io.BytesIO(), self.parsed, values)
        return out.getvalue()


@cache
def released(kind: type[Record], number: int) -> Version:
    """A version of a record, or the newest one if there are fewer."""
    ids = SCHEMA_IDS[kind.__name__]
    schema_id = ids[min(number, len(ids)) - 1]
    found = released_schema(schema_id)
    assert found is not None
    schema = json.loads(found[2].replace('"logicalType"', '"unit"'))
    return Version(schema_id, fastavro.parse_schema(schema, {}), values_of(schema, {}))


class OlderRelease(Codec):
    """Writes as a release that had this version of each record. Reads as today."""

    def __init__(self, version: int) -> None:
        super().__init__()
        self.version = version
        self.written: set[type[Record]] = set()

    def encode(self, record: Record) -> bytes:
        kind = type(record)
        self.written.add(kind)
        version = released(kind, self.version)
        return struct.pack(">BI", 0, version.schema_id) + version.body(record.to_dict())


def message(codec: Codec, record: Record, topic: str = "t", offset: int = 0, key: bytes = b"k") -> RawMessage:
    return RawMessage(topic, 0, offset, 1_000, key, codec.encode(record))


# -- what reads them: each of these returns what it made of the records


def worker_runs_a_request(codec: Codec, _: Path) -> Any:
    value = codec.encode(request("r", stream=True, ttl_ms=60_000))
    read = Intake(TODAY, NAMES, {MEDIUM: 1}).read(MEDIUM, 0, 0, 1_000_000, (), value)
    assert isinstance(read, Taken)
    world = World("m")
    world.up()
    world.flow.commit.delivered((MEDIUM, 0), 0, 1, [0])
    body = Body(read.request, value, (), None)
    world.flow.arrived((MEDIUM, 0), 0, read, body, world.now, world.wall_ms)
    world.settle()
    world.finish("r")
    assert world.ended == [("r", "completed")]
    return replace(read, size_bytes=0), world.committed()


def worker_follows_a_cancel(codec: Codec, _: Path) -> Any:
    world = World("m")
    world.up()
    world.submit("r")
    order = TODAY.decode(codec.encode(command("cancel", created_at=world.wall_ms)), ControlCommand)
    world.flow.command(order, world.now, world.wall_ms)
    world.settle()
    assert world.running == {}, "its run was cancelled"


def worker_continues_a_stream(codec: Codec, _: Path) -> Any:
    work = World("m").submit("r")
    assert work is not None
    stream = StreamSoFar(work.subject)
    for event in (
        chunk(None, None, origin=work.subject.origin),
        chunk("sec", 0, token_ids=[1, 2], first_token_index=0),
    ):
        stream.apply(TODAY.decode(codec.encode(event), type(event)))
    assert stream.published is not None
    return stream.published


def worker_reads_a_conversation(codec: Codec, _: Path) -> Any:
    async def past() -> list[str]:
        log, first = MemoryLog(), turn_of("r1", "a question")
        log.made = True
        for said in (*input_messages(first, epoch=1, now_ms=0), answer(first, "an answer")):
            log.records.append((len(log.records), conversation_message_key(said).encode(), codec.encode(said)))
        return contents((await take(turns_of(log), turn_of("r2", "another"))).past.messages)

    assert asyncio.run(past()) == ["a question", "an answer"]


def worker_knows_its_peers(codec: Codec, _: Path) -> Any:
    peers = Peers("me")
    state = worker("w", ModelState(model="m", state="ready"), assigned=[f"{MEDIUM}/3"], updated_at=9)
    peers.reported([TODAY.decode(codec.encode(state), WorkerState)])
    assert peers.partition_for(Wanted("text_generation", "m"), MEDIUM, "r", 0) == 3


def worker_follows_orders(codec: Codec, _: Path) -> Any:
    return read_record(message(codec, DesiredState(kind="model", name="m", action="load", created_at=1)), TODAY)


def gateway_shows_a_request(codec: Codec, folder: Path) -> Any:
    gateway = ViewGateway(folder / "view.sqlite", codec)
    shown: list[Any] = []

    def look() -> None:
        shown.append(gateway.entry().to_json())

    try:
        gateway.read(REQUESTS, request(metadata={"a": "b"}))
        gateway.read(STATUSES, status())
        gateway.read(RESULTS, chunk())
        look()
        gateway.read(CONTROL, command("cancel"))
        gateway.flush()
        gateway.restart()
        look()
        gateway.read(RESULTS, outcome(text="secret"))
        look()
        gateway.read(CONTROL, command("erase"))
        assert gateway.entry().erased
        assert [one["status"] for one in shown] == ["running", "running", "completed"]
        return [{**one, "updated_at": None} for one in shown]
    finally:
        gateway.close()


def gateway_shows_the_fleet(codec: Codec, _: Path) -> Any:
    fleet = Fleet(TODAY)
    fleet.on_model(message(codec, model_info("m")))
    fleet.on_worker(message(codec, worker("w", ModelState(model="m", state="ready"))), 1)
    models, workers = list(fleet.models.values()), list(fleet.workers.values())
    judged = judge(workers, models, 1, 1_000)
    assert judged.degraded is None
    assert judged.file_differences == ()
    processes = Gateways(TODAY)
    processes.on_record(message(codec, gateway_state(), key=b"gateway-h-1"), 1)
    return (
        processes.known(1),
        judged,
        public_models(models),
        admin_models(models, observing_topic(workers, "id"), {}, ()),
    )


def gateway_shows_a_dead_letter(codec: Codec, _: Path) -> Any:
    facts: dict[str, Any] = {"request_id": "r", "tenant": "default", "worker_id": "w", "created_at": 1}
    original = codec.encode(request(model="m"))
    letter = DeadLetter(reason_code="engine_failed", reason="died", original=original, origin=ORIGIN, **facts)
    found = facts_of(message(codec, letter), TODAY)
    assert (found.redrivable, found.task, found.model) == (True, "text_generation", "m")
    return found.place, found.to_json() | {"bytes": None}, request_of(letter, TODAY)


def gateway_lists_a_conversation(codec: Codec, _: Path) -> Any:
    first = turn_of("r1", "a question")
    said = [*input_messages(first, epoch=1, now_ms=0), answer(first, "an answer")]
    raw = [message(codec, one, "c", n, conversation_message_key(one).encode()) for n, one in enumerate(said)]
    head = TODAY.head(type(said[0]), "request_id", "direction", "index")
    listed = [item for turn in fold_messages(decoded(TODAY, raw)) for item in items_of_turn(turn)]
    return listed, [head(one.value or b"")[:3] for one in raw]


def webhook_is_sent(codec: Codec, _: Path) -> Any:
    event = TODAY.decode(codec.encode(outcome(text="secret")), type(outcome()))
    asked = message(codec, request(), REQUESTS[0])
    body = json.loads(webhook_body(Place(topic="result", partition=0, offset=1), event, asked, TODAY))
    assert (body["type"], body["data"]["result"]["text"]) == ("request.completed", "secret")
    return body


def client_follows(codec: Codec, _: Path) -> Any:
    fold = EventFold("r", "default", NAMES, TODAY)
    records = [(STATUSES[0], status()), (RESULTS[0], chunk()), (RESULTS[0], outcome(text="secret"))]
    events = [event for n, (topic, one) in enumerate(records) for event in fold.apply(message(codec, one, topic, n))]
    assert [type(event).__name__ for event in events] == ["Status", "Chunk", "Chunk", "Result"]
    return events


READERS: dict[Callable[[Codec, Path], Any], set[str]] = {
    worker_runs_a_request: {"InferenceRequest"},
    worker_follows_a_cancel: {"ControlCommand"},
    worker_continues_a_stream: {"ResultEvent"},
    worker_reads_a_conversation: {"ConversationMessage"},
    worker_knows_its_peers: {"WorkerState"},
    worker_follows_orders: {"DesiredState"},
    gateway_shows_a_request: {"InferenceRequest", "StatusEvent", "ResultEvent", "ControlCommand"},
    gateway_shows_the_fleet: {"GatewayState", "ModelInfo", "WorkerState"},
    gateway_shows_a_dead_letter: {"DeadLetter", "InferenceRequest"},
    gateway_lists_a_conversation: {"ConversationMessage"},
    webhook_is_sent: {"InferenceRequest", "ResultEvent"},
    client_follows: {"StatusEvent", "ResultEvent"},
}


@pytest.mark.parametrize(("reader", "reads"), READERS.items(), ids=[reader.__name__ for reader in READERS])
def test_older_records_mean_the_same(reader: Callable[[Codec, Path], Any], reads: set[str], tmp_path: Path) -> None:
    expected = reader(TODAY, tmp_path)
    for version in range(1, NEWEST):
        older = OlderRelease(version)
        (folder := tmp_path / str(version)).mkdir()
        assert reader(older, folder) == expected, f"version {version}"
        assert {kind.__name__ for kind in older.written} == reads


def test_every_record_that_has_grown_is_read() -> None:
    assert {kind.__name__ for kind in GROWN} == set().union(*READERS.values())


@pytest.mark.parametrize("kind", GROWN, ids=lambda kind: kind.__name__)
@settings(
    max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(data=st.data())
def test_older_releases_read_what_they_know_of_todays_records(kind: type[Record], data: st.DataObject) -> None:
    """With the writer's schema from a registry, as Avro resolves the two."""
    older = released(kind, data.draw(st.integers(1, len(SCHEMA_IDS[kind.__name__]) - 1)))
    today = released(kind, NEWEST)
    known = data.draw(older.values)
    record = kind.from_dict({**data.draw(today.values), **known})
    seen: Any = fastavro.schemaless_reader(io.BytesIO(TODAY.encode(record)[5:]), today.parsed, older.parsed)
    assert older.body(seen) == older.body(known)
