"""The view, record by record: what it knows, whom it tells, what it skips, and what outlives the process."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.common.reader import RawMessage
from penstock.gateway.view import fleet
from penstock.gateway.view import store as store_module
from penstock.gateway.view import unwritten as unwritten_module
from penstock.gateway.view import view as view_module
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.frames import ChunkFrame, ResultFrame, StatusFrame
from penstock.gateway.view.hub import Client, Hub
from penstock.gateway.view.outputs import OutcomeReader
from penstock.gateway.view.request_state import Key
from penstock.gateway.view.store import MAX_WAITING, TP, Store
from penstock.gateway.view.view import View
from penstock.schemas.codec import Codec, schema_text
from penstock.schemas.cursor import decode_cursor
from penstock.schemas.errors import InvalidCursor, RegistryUnavailable, UnknownSchema
from penstock.schemas.ids import derived_request_id, idempotent_request_id
from penstock.schemas.limits import DEFAULT_LIMITS
from penstock.schemas.records import (
    ControlCommand,
    InferenceRequest,
    ModelInfo,
    Origin,
    Place,
    Preview,
    Record,
    ResultEvent,
    StatusEvent,
    WorkerState,
)
from penstock.schemas.registry import RegistryResolver
from penstock.schemas.requests import content_hash, request_to_json
from penstock.schemas.topics import CLASSES, HEADER_ORIGIN, TopicNames
from support import wait_until

NAMES = TopicNames("p-")
REQUESTS: TP = (NAMES.request("text_generation", 5), 0)
HIGH: TP = (NAMES.request("text_generation", 1), 0)
RESULTS: TP = (NAMES.result, 0)
STATUSES: TP = (NAMES.status, 0)
CONTROL: TP = (NAMES.control, 0)
KEY: Key = ("default", "r")
SUBJECT = ("request", *KEY)
CONVERSATION = ("conversation", "default", "c")

ORIGIN = Origin(topic=REQUESTS[0], partition=REQUESTS[1], offset=0, append_time_ms=1_000)
OTHER_ORIGIN = replace(ORIGIN, topic=HIGH[0])
REQUEST = InferenceRequest(
    request_id="r",
    task="text_generation",
    text_generation={"prompt": "secret"},
    conversation_id="c",
    stream=True,
    created_at=900,
    metadata={"note": "secret"},
)
CHUNK = ResultEvent(
    request_id="r",
    tenant="default",
    kind="chunk",
    origin=ORIGIN,
    attempt=1,
    epoch=1,
    task="text_generation",
    created_at=2_000,
    worker_id="w",
    text="sec",
    text_offset=0,
)
# As Avro gives it.
OUTPUT = {
    "text": "secret",
    "tool_calls": None,
    "logprobs": None,
    "prompt_logprobs": None,
    "covers_through": None,
    "choices": None,
}
TERMINAL = replace(CHUNK, kind="terminal", text=None, status="completed", text_generation=OUTPUT)
RUNNING = StatusEvent(
    request_id="r",
    tenant="default",
    status="running",
    done=False,
    rank=40,
    attempt=1,
    epoch=1,
    origin=ORIGIN,
    worker_id="w",
    created_at=1_500,
)
ERASE = ControlCommand(kind="erase", request_id="r", tenant="default", created_at=3_000)


class Registry:
    """Finds one schema, when it can be asked at all."""

    SCHEMA_ID = 77

    def __init__(self) -> None:
        self.down = False
        self.asked: set[str] = set()
        """Names of the threads that asked."""

    def get_schema(self, schema_id: int) -> str:
        self.asked.add(threading.current_thread().name)
        if self.down:
            raise RegistryUnavailable("nobody answers")
        if schema_id != self.SCHEMA_ID:
            raise UnknownSchema("not here")
        return schema_text("ResultEvent")


class Gateway:
    """A view with its file and its hub, fed as by the follower; `restart` is kill -9 and a new process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.registry = Registry()
        resolver = RegistryResolver(self.registry, retry_s=0.01)  # pyright: ignore[reportArgumentType]
        self.codec, self.prompt = Codec(resolver.ask), Codec(resolver.ask_aside)
        self.recent_bytes = 1 << 20
        self.counts_since_ms = 0
        self.held_live = 1_000
        self.on_outcome: Callable[[ResultEvent], None] = lambda _: None
        self.statuses: list[str] = []
        self.next: dict[TP, int] = {}
        self.log: dict[tuple[TP, int], bytes | None] = {}
        self.start()

    def start(self) -> None:
        self.store = Store(self.path, "cluster")
        self.hub = Hub()
        self.outcomes: list[str] = []
        self.view = View(
            self.store,
            self.hub,
            NAMES,
            1,
            on_outcome=self.note_outcome,
            on_status=lambda event: self.statuses.append(event.status),
            codec=self.prompt,
            recent_bytes=self.recent_bytes,
            counts_since_ms=self.counts_since_ms,
            held_live=self.held_live,
        )

    def note_outcome(self, event: ResultEvent, klass: str) -> None:
        self.outcomes.append(event.request_id)
        self.on_outcome(event)

    def applies(self, batch: list[RawMessage]) -> bool:
        """Whether no record of a batch waits for the registry. Those before the first that waits leave the batch."""
        try:
            self.view.apply(batch)
        except RegistryUnavailable:
            offsets = self.view.offsets()
            batch[:] = [m for m in batch if m.offset >= offsets.get((m.topic, m.partition), 0)]
            return False
        return True

    def message(self, tp: TP, value: Record | bytes | None, **values: Any) -> RawMessage:
        offset = self.next.get(tp, 0)
        self.next[tp] = offset + 1
        raw = self.codec.encode(value) if isinstance(value, Record) else value
        self.log[tp, offset] = raw
        return replace(RawMessage(*tp, offset, 1_000, None, raw), **values)

    def read(self, tp: TP, *values: Record | bytes | None, **more: Any) -> None:
        batch = [self.message(tp, value, **more) for value in values]
        wait_until(lambda: self.applies(batch), 10, "the schema was fetched")

    def listen(self, *subjects: tuple[str, ...]) -> Client:
        client = self.hub.connect(lambda: None)
        for subject in subjects:
            self.hub.subscribe(client, subject)
        return client

    def flush(self) -> None:
        written = threading.Event()
        assert self.view.flush(written)
        assert written.wait(10)

    def restart(self) -> None:
        self.store.close()
        self.start()

    def found(self, key: Key = KEY) -> Entry:
        """The entry, with its outcome read again if it has to be."""
        entry = self.view.find(key)
        assert entry is not None
        if entry.lacks_outcome:
            record = self.log[(NAMES.result, entry.place), entry.terminal_offset] or b""
            entry.hold_outcome(*OutcomeReader(self.codec)(record), len(record))
        return entry

    def execute(self, script: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.path, isolation_level=None, timeout=10)) as connection:
            return connection.execute(script).fetchall()

    def prune(self, before_ms: int) -> None:
        """As the follower does it."""
        forgotten = self.view.forget(self.store.silent_live(before_ms), before_ms)
        self.store.delete([entry.key for entry in forgotten], before_ms)
        self.view.known.are_gone(forgotten)

    def stop_writing(self) -> None:
        self.execute("CREATE TRIGGER full BEFORE INSERT ON offsets BEGIN SELECT RAISE(ABORT, 'disk full'); END")

    def go_on_writing(self) -> None:
        self.execute("DROP TRIGGER full")


@pytest.fixture
def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    monkeypatch.setattr(store_module, "RETRY_S", 0.01)
    found = Gateway(tmp_path / "view.sqlite")
    yield found
    found.store.close()


def types(client: Client) -> list[type]:
    return [type(frame) for frame in client.frames]


# -- from acceptance to the outcome


def test_from_acceptance_to_the_outcome(gateway: Gateway) -> None:
    view, client = gateway.view, gateway.listen(SUBJECT)
    outcome = gateway.listen(("outcome", *KEY))
    assert view.find(KEY) is None
    assert view.accepted(REQUEST) is gateway.found()
    assert gateway.found().accepted_ms == 900
    gateway.read(REQUESTS, REQUEST)
    assert (gateway.found().accepted_ms, gateway.found().origin) == (1_000, ORIGIN)
    gateway.read(STATUSES, RUNNING, RUNNING)
    gateway.read(RESULTS, CHUNK, CHUNK)
    assert (gateway.found().status_name, gateway.found().fold.text, view.live_count) == ("running", "sec", 1)
    gateway.read(RESULTS, TERMINAL, TERMINAL, CHUNK)
    gateway.read(STATUSES, replace(RUNNING, status="completed", done=True, rank=100), RUNNING)
    assert gateway.found().terminal == TERMINAL
    assert view.live_count == 0
    assert types(client) == [StatusFrame, ChunkFrame, ChunkFrame, ResultFrame]
    assert types(outcome) == [ResultFrame]
    assert (gateway.outcomes, gateway.statuses, view.outcomes) == (["r"], ["running"], {"completed": 1})
    assert view.arrivals.per_s(1_000) == view.endings.per_s(1_000) == 1 / 60
    assert view.offsets() == {REQUESTS: 1, STATUSES: 4, RESULTS: 5}


def test_counters_do_not_count_what_is_read_again(gateway: Gateway) -> None:
    """A view that was lost reads two days of topics; the process has not seen them happen."""
    gateway.counts_since_ms = 2_000
    gateway.restart()
    gateway.read(STATUSES, RUNNING)
    gateway.read(RESULTS, TERMINAL, timestamp_ms=1_999)
    assert (gateway.outcomes, gateway.statuses, gateway.view.outcomes) == ([], [], {})
    assert gateway.found().done
    gateway.read(STATUSES, replace(RUNNING, request_id="s"), timestamp_ms=2_000)
    gateway.read(RESULTS, replace(TERMINAL, request_id="s"), timestamp_ms=2_000)
    assert (gateway.outcomes, gateway.statuses, gateway.view.outcomes) == (["s"], ["running"], {"completed": 1})


def test_results_before_their_request(gateway: Gateway) -> None:
    gateway.read(RESULTS, CHUNK, TERMINAL)
    assert gateway.found().origin == ORIGIN
    gateway.read(REQUESTS, REQUEST)
    entry = gateway.found()
    assert (entry.status_name, entry.conversation_id, entry.metadata) == ("completed", "c", {"note": "secret"})
    assert gateway.view.live_count == 0


def test_who_follows_a_conversation_hears_of_a_request_that_is_read_late(gateway: Gateway) -> None:
    follower, both = gateway.listen(CONVERSATION), gateway.listen(CONVERSATION, SUBJECT)
    gateway.read(RESULTS, CHUNK)
    assert types(follower) == []
    gateway.read(REQUESTS, REQUEST)
    gateway.read(RESULTS, TERMINAL)
    assert types(follower) == [StatusFrame, ChunkFrame, ChunkFrame, ResultFrame]
    assert types(both) == [ChunkFrame, ChunkFrame, ResultFrame], "what it had already was told again"


def test_tenants_with_the_same_id(gateway: Gateway) -> None:
    theirs = gateway.listen(("request", "other", "r"), ("conversation", "other", "c"))
    gateway.read(REQUESTS, replace(REQUEST, tenant="other", metadata={}), REQUEST)
    gateway.read(STATUSES, RUNNING)
    gateway.read(RESULTS, TERMINAL)
    assert gateway.found().done
    other = gateway.found(("other", "r"))
    assert (other.status_name, other.metadata) == ("accepted", {})
    assert types(theirs) == []
    gateway.flush()
    for tenant in ("default", "other"):
        page = gateway.view.page(tenant, limit=9, after=None, newest_first=True) or []
        assert [entry.key for entry in page] == [(tenant, "r")]


def test_how_many_wait(gateway: Gateway) -> None:
    nothing = dict.fromkeys(CLASSES, 0)
    assert gateway.view.census.queue_depths(0) == (nothing, nothing)
    for priority, request_id in ((1, "h"), (5, "m1"), (5, "m2"), (9, "l"), (5, "r"), (5, "done")):
        gateway.read(REQUESTS, replace(REQUEST, request_id=request_id, priority=priority))
    gateway.read(STATUSES, RUNNING, replace(RUNNING, request_id="m1", status="queued", rank=10))
    gateway.read(RESULTS, replace(TERMINAL, request_id="done"))
    depths, ages = gateway.view.census.queue_depths(4_500)
    assert depths == {"high": 1, "medium": 2, "low": 1}
    assert ages == {"high": 3.5, "medium": 3.5, "low": 3.5}


def test_what_this_gateway_produced_is_not_decoded_again(gateway: Gateway) -> None:
    """The delivery report said where it stands. What another one put there is."""
    own = replace(ORIGIN, offset=1)
    gateway.view.accepted(REQUEST, own)
    assert (gateway.found().origin, gateway.found().accepted_ms) == (own, 1_000)
    client = gateway.listen(CONVERSATION)
    gateway.read(REQUESTS, replace(REQUEST, request_id="theirs"), b"not even looked at")
    assert gateway.view.offsets() == {REQUESTS: 2}
    assert gateway.found(("default", "theirs")).content
    assert gateway.view.arrivals.per_s(1_000) == 2 / 60
    assert types(client) == [StatusFrame], "of the other's request alone"
    gateway.read(REQUESTS, REQUEST)
    assert gateway.found().origin == own, "its repeat is read, and is not the first"


def test_a_record_that_was_read_before_its_delivery_report(gateway: Gateway) -> None:
    gateway.read(REQUESTS, REQUEST)
    gateway.view.accepted(REQUEST, ORIGIN)
    gateway.next[REQUESTS] = 0
    gateway.read(REQUESTS, replace(REQUEST, request_id="s"))
    assert gateway.found(("default", "s")).content, "the offset is not taken for one of ours"
    assert gateway.view.arrivals.per_s(1_000) == 2 / 60


def test_of_two_gateways_with_one_key_the_first_in_the_log_counts(gateway: Gateway, tmp_path: Path) -> None:
    """This one's own delivery report came before the other's record was read, which stands before it."""
    key = ("default", idempotent_request_id("default", "key"))
    ours = replace(REQUEST, request_id=key[1], model="ours", priority=1, conversation_id="ours")
    theirs = replace(ours, model=None, priority=9, conversation_id="theirs", metadata={"who": "they"})
    gateway.view.accepted(ours, replace(ORIGIN, offset=1))
    client = gateway.listen(("conversation", "default", "theirs"))
    log = [gateway.message(REQUESTS, record) for record in (theirs, ours)]
    gateway.view.apply(log)
    other = Gateway(tmp_path / "rebuilt.sqlite")
    other.view.apply(log)
    for view in (gateway.view, other.view):
        entry = view.find(key)
        assert entry is not None
        assert (entry.origin, entry.content, entry.accepted_ms) == (ORIGIN, content_hash(theirs), 1_000)
        assert (entry.model, entry.priority, entry.metadata) == (None, 9, {"who": "they"})
        assert view.known.turns("default", "theirs") == [key[1]]
        assert view.known.turns("default", "ours") == []
    assert types(client) == [StatusFrame]
    assert gateway.view.census.queue_depths(1_000) == other.view.census.queue_depths(1_000)
    other.store.close()


def test_statuses_of_ended_requests_are_not_decoded(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway.read(RESULTS, TERMINAL)
    decoded: list[bytes] = []
    decode = Codec.decode
    monkeypatch.setattr(Codec, "decode", lambda codec, data, kind: decoded.append(data) or decode(codec, data, kind))
    gateway.read(STATUSES, RUNNING, replace(RUNNING, request_id="s", status="completed", done=True, rank=100))
    assert decoded == []
    assert gateway.view.find(("default", "s")) is None
    gateway.read(STATUSES, replace(RUNNING, request_id="s"))
    assert len(decoded) == 1


def test_frames_are_made_only_for_who_listens(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(Entry, "frames_of", lambda entry, step, told: made.append(entry.request_id) or [])
    gateway.read(RESULTS, CHUNK, TERMINAL)
    assert made == []
    gateway.listen(("request", "default", "s"))
    gateway.read(RESULTS, replace(CHUNK, request_id="s"))
    assert made == ["s"]


def test_ended_requests_are_kept_by_their_bytes(gateway: Gateway) -> None:
    """A stated bound on memory, whatever they hold; all are found, on disk at least."""
    gateway.recent_bytes = 1_000_000
    gateway.restart()
    vector = {"embeddings": [[0.5] * 1024] * 16, "dimensions": 1024}
    for number in range(64):
        event = replace(TERMINAL, request_id=f"e{number}", task="embedding", text_generation=None, embedding=vector)
        gateway.read(RESULTS, event, replace(TERMINAL, request_id=f"t{number}"))
        assert gateway.view.known.recent_bytes <= 1_000_000
    assert gateway.view.known.recent_bytes > 900_000
    gateway.flush()
    for name in ("e0", "e63"):
        entry = gateway.found(("default", name))
        assert entry.terminal is not None
        assert entry.terminal.embedding is None, "nothing large is held decoded"
        assert (entry.to_json(whole=True)["result"] or {})["embeddings"] == vector["embeddings"]


def test_small_vectors_count_as_what_they_take(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number takes four bytes in its record, and thirty-two decoded; the same when it is read from the disk again."""
    monkeypatch.setattr(unwritten_module, "MAX_BYTES", 300_000)
    vector = {"embeddings": [[number / 8 for number in range(1024)]], "dimensions": 1024}
    for number in range(10):
        event = replace(TERMINAL, request_id=f"e{number}", task="embedding", text_generation=None, embedding=vector)
        gateway.read(RESULTS, event)
    assert gateway.view.known.recent_bytes > 10 * 32 * 1024
    assert gateway.view.known.unwritten.is_full
    counted = gateway.found(("default", "e0")).kept_bytes
    gateway.flush()
    gateway.restart()
    assert gateway.found(("default", "e0")).kept_bytes == counted


def test_metadata_counts_whichever_is_read_first_and_is_taken_off_again(gateway: Gateway) -> None:
    """The request's, which may come when its entry is among the ended ones already."""
    metadata = {f"name {number}": "x" * 900 for number in range(10)}
    gateway.recent_bytes = 100_000
    gateway.restart()
    for number in range(40):
        origin = replace(ORIGIN, offset=number)
        gateway.read(RESULTS, replace(TERMINAL, request_id=f"e{number}", origin=origin))
        message = gateway.message(REQUESTS, replace(REQUEST, request_id=f"e{number}", metadata=metadata))
        gateway.view.apply([replace(message, offset=number, timestamp_ms=origin.append_time_ms)])
    assert gateway.found(("default", "e39")).kept_bytes > 9_000
    counted = gateway.found(("default", "e39")).kept_bytes
    assert 80_000 < gateway.view.known.recent_bytes <= 100_000
    gateway.flush()
    gateway.restart()
    assert gateway.found(("default", "e39")).kept_bytes == counted, "the same when it is read from the disk again"


def test_a_batch_of_large_outcomes_is_due_before_it_has_many_entries(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unwritten_module, "HAND_OVER_BYTES", 10_000)
    gateway.read(RESULTS, replace(TERMINAL, request_id="small"))
    assert not gateway.view.known.unwritten.is_due
    gateway.read(RESULTS, *(replace(TERMINAL, request_id=f"{n}", metadata={"x": "y" * 4_000}) for n in range(3)))
    assert gateway.view.known.unwritten.is_due


def test_what_is_old_is_not_kept_for_readers_but_is_found(gateway: Gateway) -> None:
    known = gateway.view.known
    known.catching_up = True
    gateway.read(REQUESTS, REQUEST)
    gateway.read(RESULTS, TERMINAL)
    assert known.recent_bytes == 0
    key = (REQUEST.tenant, REQUEST.request_id)
    assert gateway.found(key).status_name == "completed", "while it waits for the file"
    gateway.flush()
    gateway.flush()  # hears that the first is written
    assert known.in_memory(key) is None
    assert gateway.found(key).status_name == "completed", "from the file"
    # Of one whose request is still to be read that will be asked soon.
    gateway.read(RESULTS, replace(TERMINAL, request_id="before"))
    gateway.flush()
    gateway.flush()
    assert known.in_memory((REQUEST.tenant, "before")) is not None
    known.catching_up = False
    gateway.read(RESULTS, replace(TERMINAL, request_id="new"))
    gateway.flush()
    gateway.flush()
    assert known.in_memory((REQUEST.tenant, "new")) is not None


def test_memory_of_unwritten_outcomes_is_bounded(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unwritten_module, "MAX_BYTES", 10_000)
    assert not gateway.view.known.unwritten.is_full
    gateway.read(RESULTS, *(replace(TERMINAL, request_id=f"{n}", metadata={"x": "y" * 4_000}) for n in range(3)))
    assert gateway.view.known.unwritten.is_full
    gateway.flush()
    assert not gateway.view.known.unwritten.is_full


def test_events_on_another_partition_than_expected(gateway: Gateway) -> None:
    """The result topic got more partitions while the request ran: cursors of before are good still."""
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


def test_a_json_request_without_an_id(gateway: Gateway) -> None:
    gateway.read(
        REQUESTS, b'{"task": "text_generation", "payload": {"prompt": "a"}, "priority": 1}', timestamp_ms=5_000
    )
    entry = gateway.found(("default", derived_request_id(*REQUESTS, 0, 5_000)))
    assert (entry.priority, entry.accepted_ms) == (1, 5_000)


def test_a_request_that_is_published_again_is_not_another(gateway: Gateway) -> None:
    gateway.read(REQUESTS, REQUEST, headers=((HEADER_ORIGIN, b"elsewhere"),))
    assert gateway.view.find(KEY) is None
    assert gateway.view.offsets() == {REQUESTS: 1}


def test_where_a_record_was_published_again_outlives_the_process(gateway: Gateway) -> None:
    gateway.read(REQUESTS, REQUEST)
    gateway.read(HIGH, replace(REQUEST, ttl_ms=1), headers=((HEADER_ORIGIN, b"elsewhere"),))
    assert gateway.found().moved_to == Place(topic=HIGH[0], partition=0, offset=0)
    gateway.flush()
    gateway.restart()
    entry = gateway.found()
    assert (entry.moved_to, entry.origin) == (Place(topic=HIGH[0], partition=0, offset=0), ORIGIN)
    assert entry.deadline_ms == 1_000 + DEFAULT_LIMITS.default_ttl_ms


def test_that_its_end_was_asked_for_outlives_the_process(gateway: Gateway) -> None:
    command = ControlCommand(kind="cancel", request_id="r", tenant="default", created_at=1)
    gateway.read(REQUESTS, REQUEST)
    gateway.read(CONTROL, replace(command, tenant="foreign"))
    assert gateway.found().cancelled_ms == 0
    gateway.read(CONTROL, command, timestamp_ms=3_000)
    gateway.read(CONTROL, command, timestamp_ms=9_000)
    gateway.read(CONTROL, replace(command, kind="end_lost"), timestamp_ms=4_000)
    assert (gateway.found().cancelled_ms, gateway.found().end_asked_ms) == (3_000, 4_000)
    gateway.flush()
    gateway.restart()
    assert gateway.found().cancelled_ms == 3_000


@pytest.mark.parametrize("commanded_first", [False, True])
def test_a_new_priority_counts_from_its_command_on_and_outlives_the_process(
    gateway: Gateway, commanded_first: bool
) -> None:
    """The topics are read side by side: a command may be read before its request."""
    command = ControlCommand(kind="reprioritize", request_id="r", tenant="default", priority=1, created_at=1)
    records = [(CONTROL, command), (REQUESTS, REQUEST)]
    for tp, record in records if commanded_first else reversed(records):
        gateway.read(tp, record)
    gateway.read(CONTROL, replace(command, tenant="foreign", priority=9), replace(command, priority=None))
    assert gateway.found().priority == 1
    assert gateway.view.census.queue_depths(0)[0] == {"high": 1, "medium": 0, "low": 0}
    gateway.read(REQUESTS, REQUEST)
    assert gateway.found().priority == 1
    gateway.flush()
    gateway.restart()
    assert gateway.found().priority == 1
    assert gateway.view.census.queue_depths(0)[0] == {"high": 1, "medium": 0, "low": 0}
    gateway.read(RESULTS, TERMINAL)
    gateway.read(CONTROL, replace(command, priority=9))
    assert gateway.found().priority == 1


def test_commands_that_come_before_their_requests_are_remembered_within_bounds(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_module, "MOST_EARLY", 2)
    command = ControlCommand(kind="reprioritize", request_id="r", tenant="default", priority=1, created_at=1)
    gateway.read(CONTROL, command, replace(command, request_id="a"), replace(command, request_id="b"))
    gateway.read(REQUESTS, REQUEST, replace(REQUEST, request_id="b"))
    assert gateway.found().priority == REQUEST.priority
    entry = gateway.view.find(("default", "b"))
    assert entry is not None
    assert entry.priority == 1
    assert gateway.view.live_count == 2


@pytest.mark.parametrize(
    ("request_id", "tenant"), [("a b", "default"), ("x" * 500, "default"), ("", "default"), ("r", "Upper"), ("r", "")]
)
def test_a_request_that_no_worker_takes_is_not_live(gateway: Gateway, request_id: str, tenant: str) -> None:
    """Its dead letter has another name, and no outcome would ever end it here."""
    bad = replace(REQUEST, request_id=request_id, tenant=tenant)
    gateway.read(REQUESTS, bad, json.dumps(request_to_json(bad)).encode())
    assert gateway.view.live_count == 0
    assert gateway.view.offsets() == {REQUESTS: 2}


@pytest.mark.parametrize("tp", [REQUESTS, RESULTS, STATUSES, CONTROL, (NAMES.model, 0), (NAMES.worker, 0)])
@pytest.mark.parametrize("value", [b"", b"\x00\x01", b"{", b"{}", b"\x00\xff\xff\xff\xffrest", ModelInfo, None])
def test_one_bad_record_ends_nothing(gateway: Gateway, tp: TP, value: Any) -> None:
    """Bytes that nobody can read, tombstones, and a good record where it does not belong."""
    if value is ModelInfo:
        value = TERMINAL if tp != RESULTS else RUNNING
    gateway.read(tp, value)
    gateway.read(RESULTS, TERMINAL)
    assert gateway.found().done
    assert gateway.view.offsets() == {tp: gateway.next[tp], RESULTS: gateway.next[RESULTS]}


def test_a_failure_of_ours_ends_nothing(gateway: Gateway) -> None:
    def fail(_: ResultEvent) -> None:
        raise ZeroDivisionError

    gateway.on_outcome = fail
    gateway.read(RESULTS, TERMINAL, replace(TERMINAL, request_id="s"))
    assert gateway.found(("default", "s")).done
    assert gateway.view.offsets() == {RESULTS: 2}


def test_a_registry_that_is_away_holds_the_view_where_it_is(gateway: Gateway) -> None:
    """Not one record is skipped: reading goes on from there when somebody can tell the schema."""
    ours = gateway.codec.encode(replace(TERMINAL, request_id="s"))
    foreign = b"\x00" + Registry.SCHEMA_ID.to_bytes(4, "big") + ours[5:]
    batch = [gateway.message(RESULTS, value) for value in (CHUNK, foreign, TERMINAL)]
    gateway.registry.down = True
    with pytest.raises(RegistryUnavailable):
        gateway.view.apply(batch)
    assert gateway.view.offsets() == {RESULTS: 1}
    assert not gateway.found().done
    del batch[0]
    assert not gateway.applies(batch)
    gateway.registry.down = False
    wait_until(lambda: gateway.applies(batch), 10, "the schema was fetched")
    assert gateway.found().done
    assert gateway.found(("default", "s")).done
    assert gateway.view.offsets() == {RESULTS: 3}


def test_a_registry_is_never_asked_on_the_loop(gateway: Gateway) -> None:
    """Not for an id that it has, and not for one that it does not have."""
    ours = gateway.codec.encode(TERMINAL)
    for schema_id in (Registry.SCHEMA_ID, 99):
        foreign = gateway.message(RESULTS, b"\x00" + schema_id.to_bytes(4, "big") + ours[5:])
        with pytest.raises(RegistryUnavailable):
            gateway.view.apply([foreign])
        wait_until(lambda: gateway.applies([foreign]), 10, "the registry has answered")  # noqa: B023
        assert gateway.registry.asked == {"registry"}
    assert gateway.found().done


def test_what_is_no_record_at_all_does_not_wait_for_the_registry(gateway: Gateway) -> None:
    gateway.registry.down = True
    assert gateway.applies([gateway.message(RESULTS, b"poison"), gateway.message(RESULTS, None)])


def test_models_and_workers_come_and_go(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    models, workers = (NAMES.model, 0), (NAMES.worker, 0)
    model = ModelInfo(model="m", tasks=[], engine="noop", state="ready", updated_at=1, worker_id="w")
    gateway.read(models, model, replace(model, pool="p"), replace(model, model="n"), replace(model, state="loading"))
    assert {key: found.state for key, found in gateway.view.fleet.models.items()} == {
        ("m", ""): "loading",
        ("m", "p"): "ready",
        ("n", ""): "ready",
    }
    gateway.read(models, None, key=b"m")
    assert set(gateway.view.fleet.models) == {("m", "p"), ("n", "")}
    gateway.read(models, None, key=b"m@p")
    assert set(gateway.view.fleet.models) == {("n", "")}
    worker = WorkerState(worker_id="w", state="ready", started_at=1, updated_at=40_000)
    gateway.read(workers, worker, replace(worker, worker_id="x"), replace(worker, worker_id="y", updated_at=90_000))
    gateway.read(workers, None, key=b"x")
    gateway.read(workers, None, key=b"unknown")
    assert set(gateway.view.fleet.workers) == {"w", "y"}
    monkeypatch.setattr(fleet.time, "time", lambda: 100.0)
    gateway.view.fleet.forget_stale_workers(60)
    assert set(gateway.view.fleet.workers) == {"w", "y"}
    gateway.view.fleet.forget_stale_workers(59)
    assert set(gateway.view.fleet.workers) == {"y"}


# -- the file


def test_what_was_flushed_outlives_the_process(gateway: Gateway) -> None:
    gateway.read(REQUESTS, REQUEST, replace(REQUEST, request_id="s"))
    gateway.read(STATUSES, RUNNING)
    gateway.read(RESULTS, CHUNK, replace(TERMINAL, request_id="s"))
    before = [gateway.found(key).to_json() for key in (KEY, ("default", "s"))]
    gateway.flush()
    gateway.read(RESULTS, replace(CHUNK, text="ret", text_offset=3), TERMINAL)
    gateway.restart()
    assert [gateway.found(key).to_json() for key in (KEY, ("default", "s"))] == before
    assert gateway.found().passed_over
    assert gateway.view.live_count == 1
    assert gateway.store.offsets() == {REQUESTS: 2, STATUSES: 1, RESULTS: 2}
    gateway.next[RESULTS] = 2
    client = gateway.listen(SUBJECT)
    gateway.read(RESULTS, replace(CHUNK, text="ret", text_offset=3), TERMINAL)
    assert types(client) == [ChunkFrame, ResultFrame]
    assert (gateway.found().done, gateway.outcomes) == (True, ["r"])


def test_offsets_are_written_without_any_row(gateway: Gateway) -> None:
    gateway.read(RESULTS, b"poison")
    assert len(gateway.view.known.unwritten) == 0
    gateway.flush()
    assert gateway.store.offsets() == {RESULTS: 1}


def test_nothing_new_is_not_written(gateway: Gateway) -> None:
    gateway.read(REQUESTS, REQUEST)
    gateway.flush()
    gateway.stop_writing()
    assert gateway.view.flush()
    assert len(gateway.view.known.unwritten) == 0
    gateway.flush()  # whoever asks with an event is told, though there is nothing to write
    assert gateway.store.failure is None


def test_what_is_on_its_way_to_the_disk_is_found(gateway: Gateway) -> None:
    """Ended, pushed out of memory by others, and not in the file yet: changed, handed over, written."""
    gateway.recent_bytes = 0
    gateway.restart()
    gateway.read(REQUESTS, REQUEST)
    gateway.flush()
    gateway.read(RESULTS, TERMINAL, *(replace(TERMINAL, request_id=f"s{at}") for at in range(3)))
    assert gateway.found().done
    gateway.stop_writing()
    assert gateway.view.flush()
    wait_until(lambda: gateway.store.failure, describe="the writer is held up")
    assert gateway.found().done
    gateway.go_on_writing()
    wait_until(lambda: gateway.store.failure is None, describe="the writer goes on")
    assert gateway.found().done
    gateway.flush()
    assert gateway.view.flush()
    assert gateway.found().done
    assert gateway.found(("default", "s0")).done


def test_a_writer_that_is_behind_loses_nothing(gateway: Gateway) -> None:
    gateway.stop_writing()
    gateway.read(RESULTS, CHUNK)
    assert gateway.view.flush()
    wait_until(lambda: gateway.store.failure, describe="the writer is held up")
    for at in range(MAX_WAITING):
        gateway.read(RESULTS, replace(CHUNK, request_id=f"s{at}"))
        assert gateway.view.flush()
    gateway.read(RESULTS, replace(CHUNK, request_id="late"))
    assert not gateway.view.flush()
    assert len(gateway.view.known.unwritten) == 1
    gateway.go_on_writing()
    wait_until(gateway.view.flush, describe="the writer has caught up")
    assert len(gateway.view.known.unwritten) == 0
    gateway.flush()
    gateway.restart()
    assert gateway.view.live_count == MAX_WAITING + 2
    assert gateway.store.offsets() == {RESULTS: MAX_WAITING + 2}


def test_prune_forgets_what_is_silent(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    now_ms = 10_000
    monkeypatch.setattr(view_module, "now_ms", lambda: now_ms)
    gateway.read(REQUESTS, REQUEST, replace(REQUEST, request_id="silent"))
    now_ms = 20_000
    gateway.read(RESULTS, CHUNK)
    gateway.flush()
    assert gateway.view.flush()
    for _ in range(2):
        gateway.prune(20_000)
        assert gateway.view.find(("default", "silent")) is None
        assert gateway.view.live_count == 1
        assert gateway.found().fold.epoch == 1
        gateway.restart()


@pytest.mark.parametrize("is_aside", [False, True])
def test_what_is_pruned_is_counted_no_more_in_memory_or_not(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, is_aside: bool
) -> None:
    now_ms = 10_000
    monkeypatch.setattr(view_module, "now_ms", lambda: now_ms)
    gateway.held_live = 0
    gateway.restart()
    gateway.read(REQUESTS, REQUEST)
    gateway.flush()
    if is_aside:
        gateway.view.put_aside(9)
    assert gateway.view.known.held_live_count == (not is_aside)
    gateway.prune(20_000)
    assert (gateway.view.live_count, gateway.view.census.live("medium")) == (0, 0)
    assert gateway.view.tenants.of("default").outstanding == 0
    gateway.read(REQUESTS, REQUEST)
    assert (gateway.view.live_count, gateway.view.tenants.of("default").outstanding) == (1, 1)


# -- left to the file


def test_what_waits_is_left_to_the_file_and_comes_back_with_its_news(gateway: Gateway) -> None:
    gateway.held_live = 0
    gateway.restart()
    gateway.read(REQUESTS, REQUEST, *(replace(REQUEST, request_id=name) for name in ("followed", "runs", "new")))
    followed = gateway.listen(("outcome", "default", "followed"))
    gateway.read(STATUSES, replace(RUNNING, request_id="runs"))
    gateway.flush()
    gateway.view.put_aside(9)
    known = gateway.view.known
    assert {entry.request_id for entry in known.held_live()} == {"followed", "runs"}
    assert (gateway.view.live_count, gateway.view.census.live("medium")) == (4, 4)
    assert known.peek(KEY) is not None
    assert known.in_memory(KEY) is None
    assert len(known.turns("default", "c")) == 4, "who asks for its turns has all of them"
    gateway.view.put_aside(9)
    gateway.read(STATUSES, RUNNING)
    gateway.read(RESULTS, CHUNK, TERMINAL, replace(TERMINAL, request_id="followed"))
    assert gateway.found().status_name == "completed"
    assert (gateway.view.live_count, gateway.view.census.live("medium")) == (2, 2)
    assert types(followed) == [ResultFrame]


def test_what_is_not_written_yet_is_not_left_to_the_file(gateway: Gateway) -> None:
    gateway.held_live = 0
    gateway.restart()
    gateway.read(REQUESTS, REQUEST)
    gateway.view.put_aside(9)
    assert gateway.view.known.held_live_count == 1
    gateway.flush()
    gateway.view.put_aside(9)
    assert gateway.view.known.held_live_count == 0


def test_a_control_command_reaches_what_was_left_to_the_file(gateway: Gateway) -> None:
    gateway.held_live = 0
    gateway.restart()
    gateway.read(REQUESTS, REQUEST)
    gateway.flush()
    gateway.view.put_aside(9)
    gateway.read(CONTROL, replace(ERASE, kind="cancel"))
    assert gateway.found().cancelled_ms == 1_000


# -- erasing


def secrets(gateway: Gateway) -> list[str]:
    """The rows that still hold what the caller said or was told."""
    gateway.flush()
    rows = gateway.execute("SELECT facts FROM requests")
    return [str(row) for row in rows if "sec" in str(row)]


def test_an_ended_request_is_erased(gateway: Gateway) -> None:
    gateway.read(REQUESTS, REQUEST)
    gateway.read(RESULTS, CHUNK, TERMINAL)
    assert len(secrets(gateway)) == 1
    gateway.read(CONTROL, ERASE)
    assert secrets(gateway) == []
    gateway.read(REQUESTS, REQUEST)
    gateway.read(RESULTS, TERMINAL)
    gateway.read(STATUSES, RUNNING)
    gateway.read(CONTROL, ERASE)
    for _ in range(2):
        entry = gateway.found()
        assert (entry.erased, entry.metadata, entry.terminal, entry.fold.text) == (True, {}, None, "")
        assert (entry.origin, entry.accepted_ms, entry.task) == (ORIGIN, 1_000, "text_generation")
        assert gateway.view.live_count == 0
        assert gateway.view.page("default", limit=9, after=None, newest_first=True) == []
        assert secrets(gateway) == []
        gateway.restart()


def test_who_waits_for_an_erased_request_still_hears_its_outcome(gateway: Gateway) -> None:
    """The command may be read before the outcome, or even before the request."""
    early = replace(ERASE, request_id="early")
    client = gateway.listen(SUBJECT, ("request", "default", "early"))
    gateway.read(REQUESTS, REQUEST)
    gateway.read(CONTROL, ERASE, early)
    gateway.read(REQUESTS, replace(REQUEST, request_id="early"))
    assert gateway.found().erased
    gateway.read(RESULTS, TERMINAL, replace(TERMINAL, request_id="early"))
    assert [frame.request_id for frame in client.frames if isinstance(frame, ResultFrame)] == ["r", "early"]
    assert secrets(gateway) == []
    assert gateway.view.live_count == 0


def test_only_erase_erases_and_only_of_its_tenant(gateway: Gateway) -> None:
    gateway.read(RESULTS, TERMINAL)
    gateway.read(CONTROL, replace(ERASE, kind="cancel"), replace(ERASE, tenant="other"), None)
    assert gateway.found().terminal == TERMINAL
    assert not gateway.found().erased


def test_erasing_goes_on_after_a_restart(gateway: Gateway) -> None:
    gateway.read(REQUESTS, REQUEST)
    gateway.read(RESULTS, CHUNK)
    gateway.read(CONTROL, ERASE)
    gateway.flush()
    gateway.restart()
    gateway.read(RESULTS, TERMINAL)
    assert gateway.found().erased
    assert secrets(gateway) == []


# -- what a restart must not change


def test_a_restart_keeps_to_the_origin_of_the_results(gateway: Gateway) -> None:
    """A request stands on two topics; the one that the view reads first is not the one that was worked on."""
    gateway.read(HIGH, REQUEST)
    gateway.read(REQUESTS, REQUEST)
    gateway.read(RESULTS, CHUNK)
    assert gateway.found().origin == OTHER_ORIGIN
    gateway.flush()
    gateway.restart()
    gateway.read(RESULTS, TERMINAL)
    assert gateway.found().terminal == TERMINAL


def test_a_restart_keeps_the_origin_of_results_without_their_request(gateway: Gateway) -> None:
    gateway.read(RESULTS, CHUNK)
    gateway.flush()
    gateway.restart()
    gateway.read(RESULTS, replace(TERMINAL, origin=OTHER_ORIGIN, epoch=2, status="failed", text_generation=None))
    gateway.read(RESULTS, TERMINAL)
    assert gateway.found().terminal == TERMINAL


@pytest.mark.parametrize("first", [{"kind": "preview", "text": None}, {"text_offset": 3}])
def test_a_restart_does_not_bring_zombies_back(gateway: Gateway, first: dict[str, Any]) -> None:
    """A newer worker's preview, or its second chunk when the first never came."""
    newer = replace(CHUNK, epoch=2, **first)
    ours = replace(TERMINAL, epoch=2, text_generation={**OUTPUT, "text": "ours"})
    gateway.read(REQUESTS, REQUEST)
    gateway.flush()
    gateway.read(RESULTS, newer)
    gateway.flush()
    gateway.restart()
    gateway.read(RESULTS, TERMINAL, ours)
    assert gateway.found().terminal == ours


def test_the_latest_status_is_told_with_its_attempt(gateway: Gateway) -> None:
    gateway.read(REQUESTS, REQUEST)
    gateway.read(STATUSES, RUNNING, replace(RUNNING, attempt=2, detail="again"))
    public = gateway.found().to_json()
    assert (public["status"], public["attempt"], public["detail"]) == ("running", 2, "again")


def test_a_restart_does_not_bring_zombies_statuses_back(gateway: Gateway) -> None:
    gateway.read(STATUSES, RUNNING)
    gateway.flush()
    gateway.read(STATUSES, replace(RUNNING, epoch=2))
    gateway.flush()
    gateway.restart()
    gateway.read(STATUSES, replace(RUNNING, status="retrying", rank=50))
    assert gateway.found().status_name == "running"


# -- progress and previews

IMAGE = {
    "artifact_id": "a",
    "url": "file:///var/lib/penstock/a/data",
    "media_type": "image/png",
    "width": 64,
    "height": 32,
    "seed": None,
    "sha256": "0" * 64,
    "bytes": 9,
    "expires_at": 1_700_000_000_000,
}
PREVIEW = replace(CHUNK, kind="preview", text=None, text_offset=None, preview=Preview(step=2, steps=8, image=IMAGE))


def test_steps_are_progress_and_no_new_status(gateway: Gateway) -> None:
    gateway.read(REQUESTS, REQUEST)
    client = gateway.listen(SUBJECT)
    for step in (1, 2, 2):
        gateway.read(STATUSES, replace(RUNNING, step=step, steps=8))
    gateway.read(STATUSES, replace(RUNNING, attempt=2, step=1, steps=8))
    told = [(frame.type, frame.body().get("step")) for frame in client.frames]
    assert told == [("status", None), ("progress", 1), ("progress", 2), ("progress", 1)]
    assert gateway.found(KEY).to_json()["progress"] == {"step": 1, "steps": 8}
    assert [frame.type for frame in gateway.found(KEY).opening(None)] == ["status", "progress"]


def test_a_preview_is_shown_until_the_outcome_and_never_says_where_it_lies(gateway: Gateway) -> None:
    gateway.read(REQUESTS, REQUEST)
    client = gateway.listen(SUBJECT)
    gateway.read(RESULTS, PREVIEW)
    (frame,) = client.frames
    assert frame.to_json() == {
        "type": "preview",
        "request_id": "r",
        "step": 2,
        "steps": 8,
        "image": {
            "artifact_id": "a",
            "url": "/v1/artifacts/a/content",
            "media_type": "image/png",
            "width": 64,
            "height": 32,
            "sha256": "0" * 64,
            "bytes": 9,
            "expires_at": "2023-11-14T22:13:20.000Z",
        },
        "cursor": frame.cursor,
    }
    entry = gateway.found(KEY)
    assert [frame.type for frame in entry.opening(None)] == ["status", "preview"]
    gateway.read(RESULTS, replace(CHUNK, attempt=2))
    assert [frame.type for frame in entry.opening(None)] == ["status", "chunk"], "it was of an attempt that is void"
    gateway.read(RESULTS, replace(PREVIEW, attempt=2), replace(TERMINAL, attempt=2), replace(PREVIEW, attempt=2))
    assert [frame.type for frame in client.frames] == ["preview", "chunk", "preview", "chunk", "result"]
    assert gateway.found(KEY).preview is None


# -- counted once, whatever comes between


def counts(gateway: Gateway) -> tuple[int, ...]:
    """All counters of live requests: each must say how many there are."""
    view = gateway.view
    depths, _ = view.census.queue_depths(0)
    return view.live_count, view.census.live("medium"), view.tenants.of("default").outstanding, depths["medium"]


@pytest.fixture
def silent(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> Gateway:
    """One request waits since long ago, by the file; what comes now comes at another time."""
    now_ms = 10_000
    monkeypatch.setattr(view_module, "now_ms", lambda: now_ms)
    gateway.held_live = 0
    gateway.restart()
    gateway.read(REQUESTS, REQUEST)
    gateway.flush()
    now_ms = 30_000
    return gateway


@pytest.mark.parametrize("is_aside", [False, True])
def test_an_outcome_that_is_not_written_yet_when_silent_ones_are_forgotten(silent: Gateway, is_aside: bool) -> None:
    if is_aside:
        silent.view.put_aside(9)
    silent.read(RESULTS, TERMINAL)
    silent.prune(20_000)
    assert counts(silent) == (0,) * 4
    assert silent.found().done


def outcome(gateway: Gateway) -> int:
    gateway.read(RESULTS, TERMINAL)
    return 0


def erasure(gateway: Gateway) -> int:
    gateway.read(RESULTS, TERMINAL)
    gateway.read(CONTROL, ERASE)
    return 0


def status(gateway: Gateway) -> int:
    gateway.read(STATUSES, replace(RUNNING, status="queued", rank=10))
    return 1


@pytest.mark.parametrize("is_aside", [False, True])
@pytest.mark.parametrize("news", [outcome, erasure, status])
@pytest.mark.parametrize("when", ["before", "after"])
def test_news_while_silent_ones_are_forgotten(
    silent: Gateway, is_aside: bool, news: Callable[[Gateway], int], when: str
) -> None:
    """Between the question for them and the answer, and between that and the deletion."""
    view, live = silent.view, 0
    if is_aside:
        view.put_aside(9)
    found = silent.store.silent_live(20_000)
    if when == "before":
        live = news(silent)
    forgotten = view.forget(found, 20_000)
    if when == "after":
        live = news(silent)
    silent.store.delete([entry.key for entry in forgotten], 20_000)
    view.known.are_gone(forgotten)
    assert counts(silent) == (live,) * 4
    silent.flush()
    silent.restart()
    assert counts(silent) == (live,) * 4


def test_rows_that_could_not_be_deleted_are_deleted_the_next_time(silent: Gateway) -> None:
    silent.view.put_aside(9)
    assert len(silent.view.forget(silent.store.silent_live(20_000), 20_000)) == 1
    assert counts(silent) == (0,) * 4
    assert silent.view.find(KEY) is None
    silent.prune(20_000)
    assert counts(silent) == (0,) * 4
    assert silent.store.silent_live(1 << 62) == []


def test_that_an_end_was_asked_for_is_kept_with_what_is_left_to_the_file(silent: Gateway) -> None:
    silent.read(CONTROL, replace(ERASE, kind="end_lost"))
    silent.flush()
    silent.view.put_aside(9)
    assert silent.view.known.held_live_count == 0
    assert silent.found().end_asked_ms == 1_000
    assert silent.found().updated_ms == 10_000, "that is no sign of life"


def test_a_request_that_only_began_is_not_left_to_the_file(silent: Gateway) -> None:
    """A piece that does not decode is on no file: it would be counted for good."""
    silent.view.known.begin(("default", "began"), 1)
    silent.view.put_aside(9)
    assert silent.view.known.in_memory(("default", "began")) is not None
