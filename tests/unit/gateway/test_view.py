"""The view, record by record: what it knows, which frames it publishes, what it skips, what outlives the process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from kit.records import (
    CONTROL,
    HIGH,
    KEY,
    NAMES,
    ORIGIN,
    REQUESTS,
    RESULTS,
    STATUSES,
    chunk,
    command,
    model_info,
    outcome,
    request,
    status,
    worker,
)
from kit.view_gateway import ViewGateway, execute
from penstock.common.clock import now_ms
from penstock.common.reader import RawMessage
from penstock.gateway.view import fleet
from penstock.gateway.view import store as store_module
from penstock.gateway.view import unwritten as unwritten_module
from penstock.gateway.view import view as view_module
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.frames import ResultFrame
from penstock.gateway.view.hub import Client
from penstock.gateway.view.outputs import OutcomeReader
from penstock.gateway.view.selecting import UNFOLLOWED_STREAM
from penstock.gateway.view.store import MAX_WAITING, TP
from penstock.gateway.view.view import ROW_AGE_MS
from penstock.schemas.codec import Codec, schema_text
from penstock.schemas.cursor import decode_cursor
from penstock.schemas.errors import InvalidCursor, RegistryUnavailable, UnknownSchema
from penstock.schemas.ids import derived_request_id, idempotent_request_id
from penstock.schemas.limits import LIMITS
from penstock.schemas.origins import origin_header
from penstock.schemas.records import InferenceRequest, Origin, Place, Preview, Record, ResultEvent
from penstock.schemas.registry import RegistryResolver
from penstock.schemas.requests import content_hash, request_to_json
from penstock.schemas.topics import HEADER_ORIGIN
from support import wait_until

SUBJECT = ("request", *KEY)
CONVERSATION = ("conversation", "default", "c")
REQUEST = request(conversation_id="c", stream=True, metadata={"note": "secret"})
CHUNK, RUNNING, ERASE = chunk(), status(), command("erase")
# As Avro gives it.
OUTPUT = {"text": "secret"} | dict.fromkeys(("tool_calls", "logprobs", "prompt_logprobs", "covers_through", "choices"))
TERMINAL = outcome(text_generation=OUTPUT)


class Registry:
    """Has one schema. Keeps the names of the threads that called it."""

    SCHEMA_ID = 77

    def __init__(self) -> None:
        self.down = False
        self.threads: set[str] = set()

    def get_schema(self, schema_id: int) -> str:
        self.threads.add(threading.current_thread().name)
        if self.down:
            raise RegistryUnavailable("no answer")
        if schema_id != self.SCHEMA_ID:
            raise UnknownSchema("not here")
        return schema_text("ResultEvent")


class Gateway(ViewGateway):
    """With a schema registry, and a log from which outcomes can be read again."""

    def __init__(self, path: Path) -> None:
        self.registry: Any = Registry()
        self.on_outcome: Callable[[ResultEvent], None] = lambda _: None
        self.statuses: list[str] = []
        self.clock = SimpleNamespace(ms=10_000)
        self.log: dict[tuple[TP, int], bytes | None] = {}
        codec = Codec(RegistryResolver(self.registry, retry_s=0.01).ask_aside)
        super().__init__(
            path, codec, on_outcome=self.note_outcome, on_status=lambda event: self.statuses.append(event.status)
        )

    def start(self, **options: Any) -> None:
        self.outcomes: list[str] = []
        super().start(**options)

    def note_outcome(self, event: ResultEvent, klass: str) -> None:
        self.outcomes.append(event.request_id)
        self.on_outcome(event)

    def message(self, tp: TP, value: Record | bytes | None, **fields: Any) -> RawMessage:
        message = super().message(tp, value, **fields)
        self.log[tp, message.offset] = message.value
        return message

    def applies(self, batch: list[RawMessage]) -> bool:
        """False if a record waits for the registry. Those before it are removed from the batch."""
        try:
            self.view.apply(batch)
        except RegistryUnavailable:
            offsets = self.view.offsets()
            batch[:] = [m for m in batch if m.offset >= offsets.get((m.topic, m.partition), 0)]
            return False
        return True

    def read(self, tp: TP, *values: Record | bytes | None, **fields: Any) -> None:
        batch = [self.message(tp, value, **fields) for value in values]
        wait_until(lambda: self.applies(batch), 10, "the schema was fetched")

    def listen(self, *subjects: tuple[str, ...]) -> Client:
        client = self.hub.connect(lambda: None)
        for subject in subjects:
            self.hub.subscribe(client, subject)
        return client

    def found(self, request_id: str = "r", tenant: str = "default") -> Entry:
        """The entry, with its outcome read again if it has to be."""
        entry = self.entry((tenant, request_id))
        if entry.lacks_outcome:
            record = self.log[(NAMES.result, entry.place), entry.terminal_offset] or b""
            entry.hold_outcome(*OutcomeReader(self.codec)(record), len(record))
        return entry

    def prune(self, before_ms: int) -> None:
        """As the follower does it."""
        forgotten = self.view.forget(self.store.silent_live(before_ms), before_ms)
        self.store.delete([entry.key for entry in forgotten], before_ms)
        self.view.known.are_gone(forgotten)

    def fill_disk(self) -> None:
        execute(self.path, "CREATE TRIGGER full BEFORE INSERT ON offsets BEGIN SELECT RAISE(ABORT, 'disk full'); END")

    def free_disk(self) -> None:
        execute(self.path, "DROP TRIGGER full")


@pytest.fixture
def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    monkeypatch.setattr(store_module, "RETRY_S", 0.01)
    with Gateway(tmp_path / "view.sqlite") as found:
        yield found


def types(client: Client) -> list[str]:
    return [frame.type for frame in client.frames]


# -- from acceptance to the outcome


def test_from_acceptance_to_the_outcome(gateway: Gateway) -> None:
    view, client, waits = gateway.view, gateway.listen(SUBJECT), gateway.listen(("outcome", *KEY))
    assert view.find(KEY) is None
    assert view.accepted(REQUEST) is gateway.found()
    assert gateway.found().accepted_ms == 900
    gateway.read(REQUESTS, REQUEST)
    assert (gateway.found().accepted_ms, gateway.found().origin) == (1_000, ORIGIN)
    gateway.read(STATUSES, RUNNING, RUNNING)
    gateway.read(RESULTS, CHUNK, CHUNK)
    assert (gateway.found().status_name, gateway.found().fold.text, view.live_count) == ("running", "sec", 1)
    gateway.read(RESULTS, TERMINAL, TERMINAL, CHUNK)
    gateway.read(STATUSES, status("completed"), RUNNING)
    assert (gateway.found().terminal, view.live_count) == (TERMINAL, 0)
    assert types(client) == ["status", "chunk", "chunk", "result"]
    assert types(waits) == ["result"]
    assert (gateway.outcomes, gateway.statuses, view.outcomes) == (["r"], ["running"], {"completed": 1})
    assert view.arrivals.per_s(now_ms()) == view.endings.per_s(now_ms()) == 1 / 60
    assert view.offsets() == {REQUESTS: 1, STATUSES: 4, RESULTS: 5}


@pytest.mark.parametrize("catching_up", [False, True])
@pytest.mark.parametrize("skew_s", [-60, 0, 3_600])
def test_rates_are_counted_by_the_clock_that_they_are_asked_by(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, skew_s: int, catching_up: bool
) -> None:
    """The clock of a worker differs by `skew_s`. What is read at a start counts from its time in the log."""
    view, now = gateway.view, 7_200_000
    monkeypatch.setattr(view_module, "now_ms", lambda: now)
    view.known.catching_up = catching_up
    workers_ms = now + skew_s * 1_000
    for number in range(30):
        name = f"r{number}"
        gateway.read(REQUESTS, replace(REQUEST, request_id=name, priority=9), timestamp_ms=now)
        gateway.read(STATUSES, status("queued", name, created_at=workers_ms), timestamp_ms=workers_ms)
        if number % 2:
            gateway.read(STATUSES, status("running", name, created_at=workers_ms), timestamp_ms=workers_ms)
            gateway.read(RESULTS, outcome(name, created_at=workers_ms), timestamp_ms=workers_ms)
    ((_, line),) = view.census.lines.waiting("default")
    told_late = catching_up and skew_s < 0
    assert line.left.per_s(now) == view.endings.per_s(now) == (0 if told_late else 15 / 60)
    assert (view.tenants.of("default").ended.per_s(now), view.arrivals.per_s(now)) == (line.left.per_s(now), 30 / 60)


def test_counters_do_not_count_records_that_are_read_again(gateway: Gateway) -> None:
    """A view that lost its file reads two days of topics again."""
    gateway.restart(counts_since_ms=2_000)
    gateway.read(STATUSES, RUNNING)
    gateway.read(RESULTS, TERMINAL, timestamp_ms=1_999)
    assert (gateway.outcomes, gateway.statuses, gateway.view.outcomes) == ([], [], {})
    assert gateway.found().done
    gateway.read(STATUSES, status(request_id="s"), timestamp_ms=2_000)
    gateway.read(RESULTS, outcome("s"), timestamp_ms=2_000)
    assert (gateway.outcomes, gateway.statuses, gateway.view.outcomes) == (["s"], ["running"], {"completed": 1})


def test_followers_of_a_conversation_get_frames_of_a_request_that_is_read_late(gateway: Gateway) -> None:
    follower, both = gateway.listen(CONVERSATION), gateway.listen(CONVERSATION, SUBJECT)
    theirs = gateway.listen(("request", "other", "r"), ("conversation", "other", "c"))
    gateway.read(RESULTS, CHUNK)
    assert types(follower) == []
    gateway.read(REQUESTS, REQUEST)
    gateway.read(RESULTS, TERMINAL)
    assert types(follower) == ["status", "chunk", "chunk", "result"]
    assert types(both) == ["chunk", "chunk", "result"], "no frame is sent twice"
    assert types(theirs) == []


def test_a_request_of_this_gateway_is_not_decoded_again(gateway: Gateway) -> None:
    """Its delivery report gave the offset. Requests of other gateways are decoded, also at the offset of one of ours
    that was read before its report."""
    own = replace(ORIGIN, offset=1)
    gateway.view.accepted(REQUEST, own)
    assert (gateway.found().origin, gateway.found().accepted_ms) == (own, 1_000)
    client = gateway.listen(CONVERSATION)
    gateway.read(REQUESTS, replace(REQUEST, request_id="theirs"), b"not even looked at")
    assert gateway.view.offsets() == {REQUESTS: 2}
    assert gateway.found("theirs").content
    assert gateway.view.arrivals.per_s(now_ms()) == 2 / 60
    assert types(client) == ["status"], "of the other's request alone"
    gateway.read(REQUESTS, REQUEST)
    assert gateway.found().origin == own, "the repeat is read, and is not the first"
    gateway.read(REQUESTS, replace(REQUEST, request_id="late"))
    gateway.view.accepted(replace(REQUEST, request_id="late"), replace(ORIGIN, offset=3))
    gateway.next[REQUESTS] = 3
    gateway.read(REQUESTS, replace(REQUEST, request_id="s"))
    assert gateway.found("s").content
    assert gateway.view.arrivals.per_s(now_ms()) == 5 / 60, "with the repeat"


def test_what_others_asked_for_is_decoded_only_for_its_hash(gateway: Gateway) -> None:
    told: list[InferenceRequest] = []
    gateway.restart(on_request=told.append)
    repeatable = replace(REQUEST, request_id=idempotent_request_id("default", "key"))
    gateway.read(REQUESTS, REQUEST, repeatable)
    assert [one.payload.get("prompt") for one in told] == [None, "secret"]
    assert gateway.found(repeatable.request_id).content == content_hash(repeatable)


def test_the_pieces_of_a_stream_cost_one_row(gateway: Gateway) -> None:
    """They are read again from the first one. So a kill behind others loses none of the text."""
    gateway.listen(("request", *KEY))
    gateway.read(REQUESTS, REQUEST)
    gateway.read(RESULTS, chunk("se", 0))
    gateway.flush()
    gateway.read(RESULTS, chunk("cr", 2), chunk("et", 4))
    assert len(gateway.view.known.unwritten) == 0
    assert gateway.found().fold.text == "secret"
    gateway.reopen()
    assert (gateway.found().passed_over, gateway.found().pieces_from) == (True, 0)
    gateway.read(RESULTS, TERMINAL)
    assert len(gateway.view.known.unwritten) == 1


def test_of_two_gateways_with_one_key_the_first_in_the_log_counts(gateway: Gateway) -> None:
    """Our delivery report arrives before the other's record is read, which is first in the log."""
    request_id, census = idempotent_request_id("default", "key"), gateway.view.census
    ours = replace(REQUEST, request_id=request_id, priority=1, conversation_id="ours")
    gateway.view.accepted(ours, replace(ORIGIN, offset=1))
    gateway.read(REQUESTS, replace(ours, priority=9, conversation_id="theirs"), ours)
    found = [list(census.of_conversation("default", name)) for name in ("ours", "theirs")]
    assert (found, census.queue_depths(1_000)[0]["low"]) == ([[], [request_id]], 1)


def test_statuses_of_ended_requests_are_not_decoded(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway.read(RESULTS, TERMINAL)
    decoded: list[bytes] = []
    decode = Codec.decode
    monkeypatch.setattr(Codec, "decode", lambda codec, data, kind: decoded.append(data) or decode(codec, data, kind))
    gateway.read(STATUSES, RUNNING, status("completed", "s"))
    assert decoded == []
    assert gateway.view.find(("default", "s")) is None
    gateway.read(STATUSES, status(request_id="s"))
    assert len(decoded) == 1


def test_frames_are_made_only_if_somebody_listens(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(Entry, "frames_of", lambda entry, step, told: made.append(entry.request_id) or [])
    gateway.read(RESULTS, CHUNK, TERMINAL)
    assert made == []
    gateway.listen(("request", "default", "s"))
    gateway.read(RESULTS, chunk(request_id="s"))
    assert made == ["s"]


# -- memory


def vectors(request_id: str, rows: list[list[float]]) -> ResultEvent:
    return outcome(request_id, task="embedding", embedding={"embeddings": rows, "dimensions": 1024})


def test_ended_requests_are_kept_by_their_bytes(gateway: Gateway) -> None:
    gateway.restart(recent_bytes=1_000_000)
    rows = [[0.5] * 1024] * 16
    for number in range(64):
        gateway.read(RESULTS, vectors(f"e{number}", rows), replace(TERMINAL, request_id=f"t{number}"))
        assert gateway.view.known.recent_bytes <= 1_000_000
    assert gateway.view.known.recent_bytes > 900_000
    gateway.flush()
    for name in ("e0", "e63"):
        entry = gateway.found(name)
        assert entry.terminal.embedding is None, "nothing large is held decoded"
        assert (entry.to_json(whole=True)["result"] or {})["embeddings"] == rows


def kept_bytes_after_restart(gateway: Gateway, request_id: str) -> int:
    gateway.reopen()
    return gateway.found(request_id).kept_bytes


def test_small_vectors_count_as_what_they_take(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number takes 4 bytes in its record and 32 decoded; the same when it is read from the file again."""
    monkeypatch.setattr(unwritten_module, "MAX_BYTES", 300_000)
    for number in range(10):
        gateway.read(RESULTS, vectors(f"e{number}", [[at / 8 for at in range(1024)]]))
    assert gateway.view.known.recent_bytes > 10 * 32 * 1024
    assert gateway.view.known.unwritten.is_full
    counted = gateway.found("e0").kept_bytes
    assert kept_bytes_after_restart(gateway, "e0") == counted


def test_metadata_counts_whichever_record_is_read_first(gateway: Gateway) -> None:
    """The request's metadata may be read when its entry is among the ended ones already."""
    metadata = {f"name {number}": "x" * 900 for number in range(10)}
    gateway.restart(recent_bytes=100_000)
    for number in range(40):
        name, origin = f"e{number}", replace(ORIGIN, offset=number)
        gateway.read(RESULTS, replace(TERMINAL, request_id=name, origin=origin))
        gateway.read(REQUESTS, replace(REQUEST, request_id=name, metadata=metadata), offset=number)
    counted = gateway.found("e39").kept_bytes
    assert counted > 9_000
    assert 80_000 < gateway.view.known.recent_bytes <= 100_000
    assert kept_bytes_after_restart(gateway, "e39") == counted


@pytest.mark.parametrize(("bound", "reached"), [("HAND_OVER_BYTES", "is_due"), ("MAX_BYTES", "is_full")])
def test_unwritten_outcomes_are_bounded_by_their_bytes(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, bound: str, reached: str
) -> None:
    monkeypatch.setattr(unwritten_module, bound, 10_000)
    gateway.read(RESULTS, outcome("small"))
    assert not getattr(gateway.view.known.unwritten, reached)
    gateway.read(RESULTS, *(outcome(f"{n}", metadata={"x": "y" * 4_000}) for n in range(3)))
    assert getattr(gateway.view.known.unwritten, reached)
    gateway.flush()
    assert not getattr(gateway.view.known.unwritten, reached)


def test_old_outcomes_are_not_kept_in_memory_while_the_view_catches_up(gateway: Gateway) -> None:
    known = gateway.view.known
    known.catching_up = True

    def in_memory_after_flush(request_id: str) -> bool:
        gateway.flush()
        gateway.flush()  # hears that the first is written
        return known.in_memory(("default", request_id)) is not None

    gateway.read(REQUESTS, REQUEST)
    gateway.read(RESULTS, TERMINAL)
    assert known.recent_bytes == 0
    assert gateway.found().status_name == "completed", "while it waits for the file"
    assert not in_memory_after_flush("r")
    assert gateway.found().status_name == "completed", "from the file"
    gateway.read(RESULTS, outcome("before"))
    assert in_memory_after_flush("before"), "its request is still to be read, which needs it"
    known.catching_up = False
    gateway.read(RESULTS, outcome("new"))
    assert in_memory_after_flush("new")


def test_events_on_another_partition_than_expected(gateway: Gateway) -> None:
    """The result topic got more partitions while the request ran. Cursors from before stay valid."""
    gateway.read(REQUESTS, REQUEST)
    old = decode_cursor(gateway.found().cursor())
    gateway.read((NAMES.result, 3), CHUNK)
    entry = gateway.found()
    new = decode_cursor(entry.cursor())
    assert (old.partition, new.partition) == (0, 3)
    for cursor in (old, new):
        entry.check_cursor(cursor)
    with pytest.raises(InvalidCursor):
        entry.check_cursor(replace(new, partition=7))


# -- other records


def test_a_json_request_without_an_id_that_is_appended_again_is_not_another(gateway: Gateway) -> None:
    body = b'{"task": "text_generation", "payload": {"prompt": "a"}, "priority": 1}'
    gateway.read(REQUESTS, body, timestamp_ms=5_000)
    entry = gateway.found(derived_request_id(*REQUESTS, 0, 5_000))
    assert (entry.priority, entry.accepted_ms) == (1, 5_000)
    header = origin_header(Origin(topic=REQUESTS[0], partition=0, offset=0, append_time_ms=5_000))
    gateway.read(REQUESTS, body, timestamp_ms=6_000, headers=(header,))
    assert gateway.found(entry.request_id).moved_to == Place(topic=REQUESTS[0], partition=0, offset=1)


def test_a_request_that_is_published_again_is_not_another(gateway: Gateway) -> None:
    moved = Place(topic=HIGH[0], partition=0, offset=1)
    again: dict[str, Any] = {"headers": ((HEADER_ORIGIN, b"elsewhere"),)}
    gateway.read(HIGH, REQUEST, **again)
    assert gateway.view.find(KEY) is None
    assert gateway.view.offsets() == {HIGH: 1}
    gateway.read(REQUESTS, REQUEST)
    gateway.read(HIGH, replace(REQUEST, ttl_ms=1), **again)
    assert gateway.found().moved_to == moved
    gateway.reopen()
    assert (gateway.found().moved_to, gateway.found().origin) == (moved, ORIGIN)
    assert gateway.found().deadline_ms == 1_000 + LIMITS.default_ttl_ms


@pytest.mark.parametrize("runs_first", [False, True])
def test_what_is_moved_to_a_pool_counts_there(gateway: Gateway, runs_first: bool) -> None:
    in_pool, again = (NAMES.request("text_generation", 5, "gpu"), 0), ((HEADER_ORIGIN, b"elsewhere"),)
    runs = status("running", model="m", origin=ORIGIN)
    if runs_first:  # topics are read side by side
        gateway.read(STATUSES, runs)
        gateway.read(in_pool, REQUEST, headers=again)
        gateway.read(REQUESTS, REQUEST)
    else:
        gateway.read(REQUESTS, REQUEST)
        gateway.read(STATUSES, runs)
        gateway.read(in_pool, REQUEST, headers=again)
    assert gateway.view.census.running == {("m", "gpu"): 1}
    gateway.reopen()
    assert gateway.view.census.running == {("m", "gpu"): 1}


@pytest.mark.parametrize(("names", "counts_in"), [(None, "gpu"), ("other", "other")])
def test_a_request_put_on_the_topic_of_a_pool_counts_there(gateway: Gateway, names: str | None, counts_in: str) -> None:
    in_pool = (NAMES.request("text_generation", 5, "gpu"), 0)
    gateway.read(in_pool, replace(REQUEST, pool=names))
    gateway.read(STATUSES, status("running", model="m", origin=replace(ORIGIN, topic=in_pool[0])))
    assert gateway.view.census.running == {("m", counts_in): 1}
    gateway.reopen()
    assert gateway.found().pool == counts_in


def test_lists_hear_that_the_first_piece_of_text_is_of_another_record_of_the_id(gateway: Gateway) -> None:
    gateway.read(REQUESTS, request(user_id="ann"))
    gateway.read(HIGH, request(user_id="bob"))
    assert gateway.found().user_id == "bob"
    before = gateway.view.changes.cursor(1)
    gateway.read(RESULTS, chunk())
    assert gateway.found().user_id == "ann"
    after = gateway.view.changes.cursor(2)
    gateway.read(RESULTS, chunk("ret", 3))
    told = [gateway.view.changes.since(one, "default", 9, 3) for one in (before, after)]
    assert [one and one.keys for one in told] == [[KEY], []], "text that is streamed changes no list"


def test_the_time_of_a_cancel_outlives_the_process(gateway: Gateway) -> None:
    gateway.read(REQUESTS, REQUEST)
    gateway.read(CONTROL, command("cancel", tenant="foreign"))
    assert gateway.found().cancelled_ms == 0
    gateway.read(CONTROL, command("cancel"), timestamp_ms=3_000)
    gateway.read(CONTROL, command("cancel"), timestamp_ms=9_000)
    gateway.read(CONTROL, command("end_lost"), timestamp_ms=4_000)
    assert (gateway.found().cancelled_ms, gateway.found().end_asked_ms) == (3_000, 4_000)
    gateway.reopen()
    assert gateway.found().cancelled_ms == 3_000


@pytest.mark.parametrize("command_first", [False, True])
def test_a_new_priority_counts_from_its_command_on_and_outlives_the_process(
    gateway: Gateway, command_first: bool
) -> None:
    def check() -> None:
        assert gateway.found().priority == 1
        assert gateway.view.census.queue_depths(0)[0] == {"high": 1, "medium": 0, "low": 0}

    raised = command("reprioritize", priority=1)
    records = [(CONTROL, raised), (REQUESTS, REQUEST)]
    for tp, record in records if command_first else reversed(records):
        gateway.read(tp, record)
    gateway.read(CONTROL, replace(raised, tenant="foreign", priority=9), replace(raised, priority=None))
    check()
    gateway.read(REQUESTS, REQUEST)
    assert gateway.found().priority == 1
    gateway.reopen()
    check()
    gateway.read(RESULTS, TERMINAL)
    gateway.read(CONTROL, replace(raised, priority=9))
    assert gateway.found().priority == 1


@pytest.mark.parametrize(
    ("request_id", "tenant"), [("a b", "default"), ("x" * 500, "default"), ("", "default"), ("r", "Upper"), ("r", "")]
)
def test_a_request_that_no_worker_takes_is_not_live(gateway: Gateway, request_id: str, tenant: str) -> None:
    """Its dead letter has another name, so no outcome would ever end it here."""
    bad = replace(REQUEST, request_id=request_id, tenant=tenant)
    gateway.read(REQUESTS, bad, json.dumps(request_to_json(bad)).encode())
    assert gateway.view.live_count == 0
    assert gateway.view.offsets() == {REQUESTS: 2}


@pytest.mark.parametrize("tp", [REQUESTS, RESULTS, STATUSES, CONTROL, (NAMES.model, 0), (NAMES.worker, 0)])
@pytest.mark.parametrize("value", [b"", b"\x00\x01", b"{", b"{}", b"\x00\xff\xff\xff\xffrest", "misplaced", None])
def test_a_bad_record_stops_nothing(gateway: Gateway, tp: TP, value: Any) -> None:
    """Bytes that cannot be decoded, tombstones, and a good record on the wrong topic; nor does an internal error."""
    gateway.on_outcome = Mock(side_effect=ZeroDivisionError)
    if value == "misplaced":
        value = TERMINAL if tp != RESULTS else RUNNING
    gateway.read(tp, value)
    gateway.read(RESULTS, TERMINAL, outcome("s"))
    assert gateway.found().done
    assert gateway.found("s").done
    assert gateway.view.offsets() == {tp: gateway.next[tp], RESULTS: gateway.next[RESULTS]}


def foreign(gateway: Gateway, schema_id: int, request_id: str = "r") -> bytes:
    return b"\x00" + schema_id.to_bytes(4, "big") + gateway.codec.encode(replace(TERMINAL, request_id=request_id))[5:]


@pytest.mark.parametrize("schema_id", [Registry.SCHEMA_ID, 99], ids=["known", "unknown"])
def test_the_view_waits_at_a_record_while_the_registry_is_away(gateway: Gateway, schema_id: int) -> None:
    """Bytes that are no record do not wait for it, and it is never called on the loop."""
    values = (b"poison", None, CHUNK, foreign(gateway, schema_id, "s"), TERMINAL)
    batch = [gateway.message(RESULTS, value) for value in values]
    gateway.registry.down = True
    with pytest.raises(RegistryUnavailable):
        gateway.view.apply(batch)
    assert gateway.view.offsets() == {RESULTS: 3}
    assert not gateway.found().done
    del batch[:3]
    assert not gateway.applies(batch)
    gateway.registry.down = False
    wait_until(lambda: gateway.applies(batch), 10, "the registry has answered")
    assert gateway.found().done
    assert (gateway.view.find(("default", "s")) is not None) == (schema_id == Registry.SCHEMA_ID)
    assert gateway.view.offsets() == {RESULTS: 5}
    assert gateway.registry.threads == {"registry"}


def test_models_and_workers_come_and_go(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    models, workers, known = (NAMES.model, 0), (NAMES.worker, 0), gateway.view.fleet
    gateway.read(models, model_info(), model_info(pool="p"), model_info("n"), model_info(state="loading"))
    states = {("m", ""): "loading", ("m", "p"): "ready", ("n", ""): "ready"}
    assert {key: found.state for key, found in known.models.items()} == states
    for key, gone in ((b"m", ("m", "")), (b"m@p", ("m", "p"))):
        gateway.read(models, None, key=key)
        del states[gone]
        assert set(known.models) == set(states)
    for name, heard_ms in (("w", 40_000), ("x", 1), ("y", 90_000)):
        monkeypatch.setattr("penstock.gateway.view.view.now_ms", lambda heard_ms=heard_ms: heard_ms)
        gateway.read(workers, worker(name))
    for key in (b"x", b"unknown"):
        gateway.read(workers, None, key=key)
    monkeypatch.setattr(fleet.time, "time", lambda: 100.0)
    for most_s, left in ((60, {"w", "y"}), (59, {"y"})):
        known.forget_stale_workers(most_s)
        assert set(known.workers) == left


# -- the file


def test_offsets_are_written_without_any_row_and_only_if_there_is_news(gateway: Gateway) -> None:
    gateway.read(RESULTS, b"poison")
    assert len(gateway.view.known.unwritten) == 0
    gateway.flush()
    assert gateway.store.offsets() == {RESULTS: 1}
    gateway.fill_disk()
    assert gateway.view.flush()
    gateway.flush()  # a caller with an event is notified, though there is nothing to write
    assert gateway.store.failure is None


def test_an_outcome_on_its_way_to_the_file_is_found(gateway: Gateway) -> None:
    """It has ended and left memory, and is not in the file yet: changed, handed over, written."""
    gateway.restart(recent_bytes=0)
    gateway.read(REQUESTS, REQUEST)
    gateway.flush()
    gateway.read(RESULTS, TERMINAL, *(outcome(f"s{at}") for at in range(3)))
    assert gateway.found().done
    gateway.fill_disk()
    assert gateway.view.flush()
    wait_until(lambda: gateway.store.failure, describe="the writer cannot write")
    assert gateway.found().done
    gateway.free_disk()
    wait_until(lambda: gateway.store.failure is None, describe="the writer writes again")
    assert gateway.found().done
    gateway.flush()
    assert gateway.view.flush()
    assert gateway.found().done
    assert gateway.found("s0").done


def test_a_writer_that_is_behind_loses_nothing(gateway: Gateway) -> None:
    gateway.fill_disk()
    gateway.read(RESULTS, CHUNK)
    assert gateway.view.flush()
    wait_until(lambda: gateway.store.failure, describe="the writer cannot write")
    for at in range(MAX_WAITING):
        gateway.read(RESULTS, chunk(request_id=f"s{at}"))
        assert gateway.view.flush()
    gateway.read(RESULTS, chunk(request_id="late"))
    assert not gateway.view.flush()
    assert len(gateway.view.known.unwritten) == 1
    gateway.free_disk()
    wait_until(gateway.view.flush, describe="the writer has caught up")
    assert len(gateway.view.known.unwritten) == 0
    gateway.reopen()
    assert gateway.view.live_count == MAX_WAITING + 2
    assert gateway.store.offsets() == {RESULTS: MAX_WAITING + 2}


# -- waiting requests that leave memory


@pytest.fixture
def silent(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> Gateway:
    """One request waits since 10,000 ms and is written; records that are read now come at 30,000 ms."""
    clock = gateway.clock
    monkeypatch.setattr(view_module, "now_ms", lambda: clock.ms)
    gateway.restart(held_live=0)
    gateway.read(REQUESTS, REQUEST)
    gateway.view.evict_to_disk(9)
    assert gateway.view.known.held_live_count == 1, "what is not written stays in memory"
    gateway.flush()
    clock.ms = 30_000
    return gateway


def test_a_request_that_somebody_follows_stays_in_memory(silent: Gateway) -> None:
    silent.listen(("outcome", *KEY))
    silent.view.evict_to_disk(9)
    assert silent.view.known.held_live_count == 1


def test_pieces_that_tell_nothing_by_themselves_are_a_sign_of_life(silent: Gateway) -> None:
    """What came before them was passed over. Those of an older attempt are none."""
    silent.read(RESULTS, chunk("b", 50, attempt=2), headers=UNFOLLOWED_STREAM)
    silent.clock.ms = 30_000 + ROW_AGE_MS
    silent.read(RESULTS, chunk("zombie", 60), headers=UNFOLLOWED_STREAM)
    assert silent.entry().updated_ms == 30_000
    silent.read(RESULTS, chunk("c", 90, attempt=2), headers=UNFOLLOWED_STREAM)
    assert silent.entry().updated_ms == 30_000 + ROW_AGE_MS


def counts(gateway: Gateway) -> tuple[int, ...]:
    """All counters of live requests: they must agree."""
    view = gateway.view
    depths, _ = view.census.queue_depths(0)
    return view.live_count, view.census.live("medium"), view.tenants.of("default").outstanding, depths["medium"]


NEWS: dict[str, tuple[int, list[tuple[TP, Record]]]] = {
    "none": (0, []),
    "outcome": (0, [(RESULTS, TERMINAL)]),
    "erasure": (0, [(RESULTS, TERMINAL), (CONTROL, ERASE)]),
    "status": (1, [(STATUSES, status("queued"))]),
}
"""How many are live afterwards, and the records."""


@pytest.mark.parametrize("is_on_disk", [False, True])
@pytest.mark.parametrize("news", NEWS)
@pytest.mark.parametrize("when", ["first", "before", "after"])
def test_news_while_silent_requests_are_forgotten(silent: Gateway, is_on_disk: bool, news: str, when: str) -> None:
    """Before the file is asked for them, between that and the answer, and between the answer and the deletion."""
    live, records = NEWS[news]
    if is_on_disk:
        silent.view.evict_to_disk(9)
    assert silent.view.known.held_live_count == (not is_on_disk)

    def read(now: str) -> None:
        for tp, record in records if now == when else ():
            silent.read(tp, record)

    read("first")
    found = silent.store.silent_live(20_000)
    read("before")
    forgotten = silent.view.forget(found, 20_000)
    read("after")
    silent.store.delete([entry.key for entry in forgotten], 20_000)
    silent.view.known.are_gone(forgotten)
    assert counts(silent) == (live,) * 4
    silent.reopen()
    assert counts(silent) == (live,) * 4
    assert news not in ("outcome", "erasure") or silent.found().done or silent.found().erased


def test_rows_that_could_not_be_deleted_are_deleted_the_next_time(silent: Gateway) -> None:
    """What is in no file, as a chunk that does not decode, stays in memory: it would be counted for ever."""
    silent.view.evict_to_disk(9)
    assert len(silent.view.forget(silent.store.silent_live(20_000), 20_000)) == 1
    assert counts(silent) == (0,) * 4
    assert silent.view.find(KEY) is None
    silent.prune(20_000)
    assert counts(silent) == (0,) * 4
    assert silent.store.silent_live(1 << 62) == []
    silent.read(REQUESTS, REQUEST)
    assert counts(silent) == (1,) * 4
    silent.view.known.begin(("default", "began"), 1)
    silent.view.evict_to_disk(9)
    assert silent.view.known.in_memory(("default", "began")) is not None


@pytest.mark.parametrize(
    ("kind", "field", "updated_ms"), [("cancel", "cancelled_ms", 30_000), ("end_lost", "end_asked_ms", 10_000)]
)
@pytest.mark.parametrize("is_on_disk", [False, True])
def test_a_command_is_kept_with_a_request_that_left_memory(
    silent: Gateway, kind: str, field: str, updated_ms: int, is_on_disk: bool
) -> None:
    """Whether it left before the command or after it. `end_lost` is no sign of life."""
    if is_on_disk:
        silent.view.evict_to_disk(9)
    silent.read(CONTROL, command(kind))
    silent.evict_to_disk()
    assert silent.view.known.held_live_count == 0
    assert getattr(silent.found(), field) == 1_000
    assert silent.found().updated_ms == updated_ms


# -- erasing


def secrets(gateway: Gateway) -> list[str]:
    """The rows that still hold what the caller said or the model answered."""
    gateway.flush()
    return [str(row) for row in execute(gateway.path, "SELECT facts FROM requests") if "sec" in str(row)]


@pytest.mark.parametrize(("when", "restarts"), [(0, False), (1, False), (1, True), (2, True), (3, True)])
def test_a_request_is_erased_whenever_the_command_is_read(gateway: Gateway, when: int, restarts: bool) -> None:
    """Before its request or after any of its records. Its readers still get the outcome; records that come again,
    and a new process, change nothing."""
    records: list[tuple[TP, Record]] = [(REQUESTS, REQUEST), (RESULTS, CHUNK), (RESULTS, TERMINAL)]
    told: list[str] = []
    for number, (tp, record) in enumerate([*records[:when], (CONTROL, ERASE), *records[when:]]):
        client = gateway.listen(SUBJECT)
        gateway.read(tp, record)
        told += [frame.request_id for frame in client.frames if isinstance(frame, ResultFrame)]
        assert bool(secrets(gateway)) == (when > 0 and number < 3), "a live request is erased with its outcome"
        if restarts:
            gateway.restart()
    assert told == ["r"]
    for tp, record in (*records, (STATUSES, RUNNING), (CONTROL, ERASE)):
        gateway.read(tp, record)
    for _ in range(2):
        entry = gateway.found()
        assert (entry.erased, entry.metadata, entry.terminal, entry.fold.text) == (True, {}, None, "")
        assert (entry.origin, entry.task) == (ORIGIN, "text_generation")
        assert entry.accepted_ms == 1_000
        assert gateway.view.live_count == 0
        assert gateway.view.page("default", limit=9, after=None, newest_first=True) == []
        assert secrets(gateway) == []
        gateway.restart()


def test_commands_before_their_requests_are_bounded_and_make_none_live(gateway: Gateway, monkeypatch: Any) -> None:
    monkeypatch.setattr(view_module, "MOST_EARLY", 2)
    gateway.read(CONTROL, *(command("reprioritize", name, priority=1) for name in ("r", "d", "e")))
    gateway.read(REQUESTS, REQUEST, replace(REQUEST, request_id="e"))
    assert (gateway.found().priority, gateway.found("e").priority) == (REQUEST.priority, 1)
    gateway.read(RESULTS, TERMINAL, outcome("e"))
    gateway.read(CONTROL, *(command("erase", name) for name in ("r", "e", "a", "b", "c")))
    for _ in range(2):
        assert (gateway.view.live_count, gateway.view.tenants.of("default").outstanding) == (0, 0)
        assert all(gateway.found(name).erased for name in "abc")
        gateway.reopen()
    gateway.read(REQUESTS, *(replace(REQUEST, request_id=name) for name in "abc"))
    gateway.read(RESULTS, *(replace(TERMINAL, request_id=name) for name in "abc"))
    assert gateway.view.live_count == 0
    assert secrets(gateway) == []


def test_only_erase_erases_and_only_for_its_tenant(gateway: Gateway) -> None:
    gateway.read(RESULTS, TERMINAL)
    gateway.read(CONTROL, command("cancel"), command("erase", tenant="other"), None)
    assert (gateway.found().terminal, gateway.found().erased) == (TERMINAL, False)


# -- progress and previews

IMAGE = {"artifact_id": "a", "media_type": "image/png", "width": 64, "height": 32, "sha256": "0" * 64, "bytes": 9}
AVRO_IMAGE = {**IMAGE, "url": "file:///var/lib/penstock/a/data", "seed": None, "expires_at": 1_700_000_000_000}
PREVIEW = chunk(None, None, kind="preview", preview=Preview(step=2, steps=8, image=AVRO_IMAGE))


def test_steps_are_progress_and_no_new_status(gateway: Gateway) -> None:
    gateway.read(REQUESTS, REQUEST)
    client = gateway.listen(SUBJECT)
    steps = ((1, 1), (1, 2), (1, 2), (2, 1))
    gateway.read(STATUSES, *(status(attempt=attempt, step=step, steps=8, detail="again") for attempt, step in steps))
    told = [(frame.type, frame.body().get("step")) for frame in client.frames]
    assert told == [("status", None), ("progress", 1), ("progress", 2), ("progress", 1)]
    public = gateway.found().to_json()
    assert (public["status"], public["attempt"], public["detail"]) == ("running", 2, "again")
    assert public["progress"] == {"step": 1, "steps": 8}
    assert [frame.type for frame in gateway.found().opening(None)] == ["status", "progress"]


def test_a_preview_is_shown_until_the_outcome_without_its_place_in_the_store(gateway: Gateway) -> None:
    gateway.read(REQUESTS, REQUEST)
    client = gateway.listen(SUBJECT)
    gateway.read(RESULTS, PREVIEW)
    (frame,) = client.frames
    image = {**IMAGE, "url": "/v1/artifacts/a/content", "expires_at": "2023-11-14T22:13:20.000Z"}
    shown = {"type": "preview", "request_id": "r", "step": 2, "steps": 8, "image": image}
    assert frame.to_json() == {**shown, "cursor": frame.cursor}
    entry = gateway.found()
    assert [frame.type for frame in entry.opening(None)] == ["status", "preview"]
    gateway.read(RESULTS, chunk(attempt=2))
    assert [frame.type for frame in entry.opening(None)] == ["status", "chunk"], "a preview of an older attempt"
    gateway.read(RESULTS, *(replace(event, attempt=2) for event in (PREVIEW, TERMINAL, PREVIEW)))
    assert types(client) == ["preview", "chunk", "preview", "chunk", "result"]
    assert gateway.found().preview is None
