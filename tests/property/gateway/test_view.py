"""The view against the pure folds: whatever is written, in whatever order partitions are read, wherever it crashes."""

from __future__ import annotations

import copy
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kit.examples import examples
from kit.records import NAMES, chunk, request, status
from penstock.common.reader import RawMessage
from penstock.gateway.service.subscriptions import Subscription, Subscriptions
from penstock.gateway.view import view as view_module
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.frames import ChunkFrame, Frame, RestartedFrame, ResultFrame, SnapshotFrame
from penstock.gateway.view.hub import Hub
from penstock.gateway.view.piece_reader import fold_of
from penstock.gateway.view.request_state import Key
from penstock.gateway.view.selecting import UNFOLLOWED_STREAM, Fate, StreamPieces
from penstock.gateway.view.store import TP, Store
from penstock.gateway.view.streams import Wanted
from penstock.gateway.view.view import View
from penstock.schemas.codec import default_codec
from penstock.schemas.cursor import decode_cursor
from penstock.schemas.errors import BrokerUnavailable
from penstock.schemas.fold import IGNORED, ResultFold, StatusFold, Terminal, same_origin
from penstock.schemas.records import InferenceRequest, Origin, ResultEvent, StatusEvent
from penstock.schemas.topics import partition_for

PARTITIONS = 2
KEYS: tuple[Key, ...] = (("a", "r"), ("b", "r"), ("a", "s"))
"""Two tenants with the same id, and one tenant with two."""
REQUEST_TPS: tuple[TP, ...] = ((NAMES.request("embedding", 5), 0), (NAMES.request("text_generation", 5), 1))
"""Where a request stands, and where it stands again: each is an origin of its own."""
TPS: tuple[TP, ...] = (*REQUEST_TPS, *((topic, n) for topic in (NAMES.result, NAMES.status) for n in range(PARTITIONS)))
PLACES = ((1, 1), (1, 2), (2, 1), (3, 1))
"""(epoch, attempt) of workers; an older one that writes after a newer is a zombie."""
HORIZON_MS, ROW_AGE_MS = 1_000, 100
RUN: dict[str, st.SearchStrategy[Any]] = {
    "key": st.sampled_from(KEYS), "origin": st.integers(0, 1), "place": st.sampled_from(PLACES)
}  # fmt: skip
PIECE = st.sampled_from(("chunk", "chunk", "chunk", "lost", "preview"))
PIECES = st.lists(st.tuples(PIECE, st.integers(1, 2)), max_size=4)
STATUSES = st.sampled_from(("queued", "running", "retrying", "completed"))

codec = default_codec()


@dataclass
class Written:
    """A record in a log."""

    message: RawMessage
    record: InferenceRequest | ResultEvent | StatusEvent


@dataclass
class Expected:
    """What a reader of one request knows, by the pure folds; `heard_ms` is when it last had news."""

    results: ResultFold
    statuses: StatusFold
    request: InferenceRequest | None = None
    origin: Origin | None = None
    terminal_offset: int = -1
    heard_ms: int | None = None
    read: list[Origin] = field(default_factory=list[Origin])
    """Where records of the request were read."""

    def choose(self) -> None:
        """The record that counts: the one that the results name, else the one that was appended first."""
        followed = self.results.origin
        if named := [one for one in self.read if followed is not None and same_origin(one, followed)]:
            self.origin = named[0]
        elif self.read:
            self.origin = min(self.read, key=lambda one: (one.append_time_ms, one.topic, one.partition, one.offset))


@dataclass
class Worker:
    """One attempt of one worker: its text so far, and whether it wrote an outcome."""

    text: str = ""
    ended: bool = False


@dataclass
class Reader:
    """A client of one request: what it was told, over all gateways and subscriptions."""

    subscription: Subscription
    text: str = ""
    cursor: str | None = None
    results: int = 0


@dataclass
class Reading:
    """How far the topics are read, and what that says."""

    expected: dict[Key, Expected]
    positions: dict[TP, int] = field(default_factory=dict[TP, int])


class ViewMachine(RuleBasedStateMachine):
    """Writers fill the logs, the view reads them; `reading` is what it should know, `flushed` what its file should."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.now_ms = 1_000_000
        self.patch.setattr(view_module, "now_ms", lambda: self.now_ms)
        self.patch.setattr(view_module, "ROW_AGE_MS", ROW_AGE_MS)
        self.folder = Path(tempfile.mkdtemp(prefix="penstock-view-"))
        self.logs: dict[TP, list[Written]] = {tp: [] for tp in TPS}
        self.origins: dict[Key, list[Origin]] = {key: [] for key in KEYS}
        self.workers: dict[tuple[Key, int, tuple[int, int]], Worker] = {}
        self.number = 0
        self.reading = Reading({key: Expected(ResultFold(key[1], key[0]), StatusFold(key[1], key[0])) for key in KEYS})
        self.flushed = copy.deepcopy(self.reading)
        self.forgotten: set[Key] = set()
        self.start()

    def start(self) -> None:
        self.outcomes: list[ResultEvent] = []
        self.expected_outcomes: list[ResultEvent] = []
        self.store = Store(self.folder / "view.sqlite", "cluster")
        hub = Hub(client_frames=10_000)
        self.readers: dict[Key, Reader] = {}
        self.former: dict[Key, Reader] = getattr(self, "readers_before", {})
        self.wanted: list[tuple[Wanted, int]] = []
        """With the offset from which on the view was told of everything."""
        told = {"on_outcome": lambda event, klass: self.outcomes.append(event)}
        self.view = View(self.store, hub, NAMES, PARTITIONS, **told, codec=codec, recent_bytes=5_000, held_live=1)
        self.view.streams.read = self.want
        self.asked: list[Entry] = []
        """Those whose outcomes are to be read again."""
        self.view.streams.load = self.asked.append
        self.pieces = StreamPieces(codec, self.view.streams.followed)
        self.subscriptions = Subscriptions(self.view, cast("Any", None), hub, NAMES, cast("Any", None))

    # -- writing to the topics

    def append(self, tp: TP, record: InferenceRequest | ResultEvent | StatusEvent, times: int = 1) -> Origin:
        """At offsets with gaps, as compaction and transactions leave them. More than once: a producer's retry."""
        log = self.logs[tp]
        for _ in range(times):
            offset, time_ms = 3 * len(log) + 2, 500_000 + len(log)
            value = codec.encode(record)
            message = RawMessage(*tp, offset, time_ms, record.request_id.encode(), value)
            log.append(Written(message, codec.decode(value, type(record))))
        return Origin(topic=tp[0], partition=tp[1], offset=offset, append_time_ms=time_ms)

    def request_of(self, key: Key) -> InferenceRequest:
        facts = {"conversation_id": f"c-{key[0]}", "metadata": {"of": key[0]}, "stream": True}
        return request(key[1], tenant=key[0], text_generation={"prompt": f"of {key}"}, **facts)

    @rule(key=st.sampled_from(KEYS))
    def accept(self, key: Key) -> None:
        """This gateway put the request on its topic, and may yet die before its view is written."""
        if not self.origins[key]:
            self.origin(key, 0)
            self.view.accepted(self.request_of(key))
            self.hear_request(self.reading.expected[key], self.request_of(key), None)

    def origin(self, key: Key, number: int) -> Origin:
        """A place where the request stands; put there when it is not yet."""
        origins = self.origins[key]
        while len(origins) <= number:
            origins.append(self.append(REQUEST_TPS[len(origins)], self.request_of(key)))
        return origins[number]

    @rule(**RUN, pieces=PIECES, end=st.sampled_from((None, None, "completed", "failed")))  # pyright: ignore[reportCallIssue]
    def work(
        self, key: Key, origin: int, place: tuple[int, int], pieces: list[tuple[str, int]], end: str | None
    ) -> None:
        """A worker goes on with its run: chunks that follow each other, some of which never get through, and an end."""
        worker = self.workers.setdefault((key, origin, place), Worker())
        base = chunk(None, None, key[1], kind="preview", **self.written_by(key, origin, place))
        tp = (NAMES.result, partition_for(key[1].encode(), PARTITIONS))
        for kind, times in [] if worker.ended else pieces:
            self.number += 1
            text = f"<{key[0]}/{key[1]} {self.number}>"
            if kind == "chunk":
                self.append(tp, replace(base, kind="chunk", text=text, text_offset=len(worker.text)), times)
            elif kind == "preview":
                self.append(tp, base, times)
            worker.text += text if kind != "preview" else ""
        if end is not None and not worker.ended:
            worker.ended = True
            output: dict[str, Any] = {"text_generation": {"text": worker.text}}
            self.append(tp, replace(base, kind="terminal", status=end, **(output if end == "completed" else {})))

    @rule(**RUN, name=STATUSES, position=st.sampled_from((None, 1)), times=st.integers(1, 2))  # pyright: ignore[reportCallIssue]
    def tell_status(
        self, key: Key, origin: int, place: tuple[int, int], name: str, position: int | None, times: int
    ) -> None:
        event = status(name, key[1], position=position, **self.written_by(key, origin, place))
        self.append((NAMES.status, partition_for(key[1].encode(), PARTITIONS)), event, times)

    def written_by(self, key: Key, origin: int, place: tuple[int, int]) -> dict[str, Any]:
        return {"tenant": key[0], "origin": self.origin(key, origin), "epoch": place[0], "attempt": place[1]}

    # -- reading them

    @rule(order=st.permutations(TPS), counts=st.lists(st.integers(0, 6), min_size=len(TPS), max_size=len(TPS)))
    def read(self, order: Sequence[TP], counts: Sequence[int]) -> None:
        """So many of the next records of these partitions, in one batch."""
        batch: list[RawMessage] = []
        for tp in [tp for tp, count in zip(order, counts, strict=True) for _ in range(count)]:
            position = self.reading.positions.get(tp, 0)
            written = next((one for one in self.logs[tp] if one.message.offset >= position), None)
            if written is not None:
                self.reading.positions[tp] = written.message.offset + 1
                batch.append(self.selected(written.message))
                self.hear(written, is_told=batch[-1].value is not None)
        self.view.apply(batch)

    def selected(self, message: RawMessage) -> RawMessage:
        """The record as the view is told of it."""
        if message.topic != NAMES.result:
            return message
        match self.pieces.fate(message.key, message.value):
            case Fate.PASSED_OVER:
                return replace(message, key=None, value=None)
            case Fate.FIRST_OF_UNFOLLOWED_STREAM:
                return replace(message, headers=UNFOLLOWED_STREAM)
            case Fate.DELIVERED:
                return message

    @rule(key=st.sampled_from(KEYS), resumed=st.booleans())
    def subscribe(self, key: Key, resumed: bool) -> None:
        """A client comes, perhaps from a gateway before, with the cursor that it got there."""
        found, former = self.view.find(key), self.former.get(key)
        if former is not None and former.results:
            former = None  # it heard everything, and begins anew
        if found is None or key in self.readers or key in self.forgotten:
            return
        cursor = decode_cursor(former.cursor) if resumed and former is not None and former.cursor is not None else None
        if cursor is not None and cursor.offset >= self.reading.positions.get((NAMES.result, cursor.partition), 0):
            return  # it would wait until the view has come as far
        reader = Reader(self.subscriptions.subscribe(*key, cursor))
        if former is not None and cursor is not None:
            reader.text, reader.results = former.text, former.results
        self.readers[key] = reader

    @rule(**RUN, late=st.booleans())  # pyright: ignore[reportCallIssue]
    def come_in_the_middle(self, key: Key, origin: int, place: tuple[int, int], late: bool) -> None:
        """A client comes to a stream that goes on while what it missed is read again."""
        self.work(key, origin, place, [("chunk", 1)] * 3, None)
        self.read_all()
        self.subscribe(key, resumed=False)
        self.work(key, origin, place, [("chunk", 1)] * 2, None)
        self.read_all()
        self.fill(late)

    @rule(
        key=st.sampled_from(KEYS),
        origin=st.integers(0, 1),
        places=st.lists(st.sampled_from(PLACES), min_size=2, max_size=2, unique=True),
    )
    def take_over(self, key: Key, origin: int, places: list[tuple[int, int]]) -> None:
        """One worker goes on where another one wrote: only the first piece of each says so."""
        for place in places:
            self.work(key, origin, place, [("chunk", 1)] * 2, None)
            self.read_all()

    def want(self, wanted: Wanted) -> None:
        self.wanted.append((wanted, self.reading.positions.get((NAMES.result, wanted.partition), 0)))

    @rule(late=st.booleans())
    def fill(self, late: bool) -> None:
        """The log is read again up to where the view is told of everything; `late`: up to where it is by now."""
        wanted, self.wanted[:] = list(self.wanted), []
        for one, told_from in wanted:
            if self.view.streams.is_wanted(one):
                tp = (NAMES.result, one.partition)
                end = self.reading.positions.get(tp, 0) if late else told_from
                end = end if one.end is None else one.end
                fold = fold_of(one)
                for written in self.logs[tp]:
                    record, offset = written.record, written.message.offset
                    if one.begin <= offset < end and isinstance(record, ResultEvent) and record.kind == "chunk":
                        fold.apply(record, offset)
                self.view.streams.filled(one, fold)

    @rule(fails=st.booleans())
    def load(self, fails: bool) -> None:
        """The broker gives the outcomes that were asked for, or is away: then who asked comes again."""
        asked, self.asked[:] = list(self.asked), []
        for entry in asked:
            if fails:
                self.view.streams.loaded(entry, BrokerUnavailable("away"))
                reader = self.former[entry.key] = self.readers.pop(entry.key)
                assert not reader.subscription.take_nowait(), "it is told why instead"
                continue
            record = self.outcome_of(entry)
            entry.hold_outcome(record, None, len(codec.encode(record)))
            self.view.known.keep(entry)
            self.view.streams.loaded(entry, entry)

    def outcome_of(self, entry: Entry) -> ResultEvent:
        """What stands where the view says that its outcome is."""
        log = self.logs[NAMES.result, entry.place]
        record = next(one.record for one in log if one.message.offset == entry.terminal_offset)
        assert isinstance(record, ResultEvent)
        return record

    def read_all(self) -> None:
        position = self.reading.positions
        left = [sum(one.message.offset >= position.get(tp, 0) for one in self.logs[tp]) for tp in TPS]
        self.read(TPS, left)

    def hear(self, written: Written, *, is_told: bool) -> None:
        """What is passed over is no sign of life: a stream of two days would be forgotten."""
        record, message = written.record, written.message
        expected = self.reading.expected[(record.tenant, record.request_id)]
        if isinstance(record, InferenceRequest):
            place = {"topic": message.topic, "partition": message.partition, "offset": message.offset}
            self.hear_request(expected, record, Origin(**place, append_time_ms=message.timestamp_ms))
        elif isinstance(record, ResultEvent):
            results = expected.results
            before = (results.epoch, results.attempt)
            if results.origin is None:
                expected.statuses.origin = record.origin
            step = results.apply(record, message.offset)
            expected.choose()
            if is_told and (step != IGNORED or before != (results.epoch, results.attempt)):
                expected.heard_ms = self.now_ms
            if isinstance(step, Terminal):
                expected.terminal_offset = message.offset
                expected.origin = expected.origin or record.origin
                self.expected_outcomes.append(record)
        elif not record.done and expected.results.terminal is None:
            zombie = (record.epoch, record.attempt) < (expected.results.epoch, expected.results.attempt)
            if not zombie and expected.statuses.apply(record):
                expected.heard_ms = self.now_ms

    def hear_request(self, expected: Expected, request: InferenceRequest, origin: Origin | None) -> None:
        expected.heard_ms = self.now_ms
        expected.request = request
        expected.read += [] if origin is None else [origin]
        expected.choose()

    # -- keeping and losing

    @rule()
    def flush(self) -> None:
        written = threading.Event()
        assert self.view.flush(written)
        assert written.wait(10)
        self.flushed = copy.deepcopy(self.reading)
        assert self.store.offsets() == self.flushed.positions

    @rule(flushed=st.sampled_from((True, True, False)))
    def restart(self, flushed: bool) -> None:
        """What was not flushed is gone; reading goes on from the stored offsets."""
        if flushed:
            self.flush()
        self.store.close()
        self.readers_before = {**self.former, **self.readers}
        self.start()
        self.reading = copy.deepcopy(self.flushed)
        assert self.store.offsets() == self.reading.positions
        self.view.offsets().update(self.reading.positions)

    @rule(flushed=st.sampled_from((True, True, False)))
    def evict_to_disk(self, flushed: bool) -> None:
        """All but one of those that wait and are written may leave memory."""
        if flushed:
            self.flush()
        self.view.evict_to_disk(10)
        held = [entry for entry in self.view.known.held_live() if entry.waits and entry.key not in self.readers]
        assert len(held) <= 1 or not flushed

    @rule(ms=st.integers(1, HORIZON_MS // 2), restarted=st.booleans())
    def prune(self, ms: int, restarted: bool) -> None:
        """After a while: who had no news within the horizon may be forgotten, nobody else."""
        self.now_ms += ms
        before = self.now_ms - HORIZON_MS
        self.store.prune(before)
        if not restarted:
            forgotten = self.view.forget(self.store.silent_live(before), before)
            self.store.delete([entry.key for entry in forgotten], before)
            self.view.known.are_gone(forgotten)
        for reading in (self.reading, self.flushed):
            for key, expected in reading.expected.items():
                if expected.heard_ms is not None and expected.heard_ms < before + ROW_AGE_MS:
                    self.forgotten.add(key)

    # -- what must hold

    @invariant()
    def tenants_have_under_way_what_is_live(self) -> None:
        """The counters of limits never drift from what they count, over restarts, repeats and pruning too."""
        known = self.view.known
        live = [entry for key in KEYS if (entry := known.peek(key)) is not None and not entry.closed]
        tenants = [entry.tenant for entry in live]
        counted = {tenant: work.outstanding for tenant, work in self.view.tenants.known().items() if work.outstanding}
        assert counted == {tenant: tenants.count(tenant) for tenant in set(tenants)}
        assert known.live_count == len(live)
        waiting = [(entry.task, entry.model, entry.pool) for entry in live if entry.waits and entry.counted]
        asides = [(one.task, one.model, one.pool) for one in live if one.waits and known.in_memory(one.key) is None]
        kinds = {one.kind: one.requests for one in self.view.census.waiting(0)}
        assert kinds == Counter(waiting + asides)

    @invariant()
    def tells_what_the_folds_tell(self) -> None:
        for key, expected in self.reading.expected.items():
            if key not in self.forgotten:
                self.check(key, expected)
        told, expected_outcomes = (
            [event for event in events if (event.tenant, event.request_id) not in self.forgotten]
            for events in (self.outcomes, self.expected_outcomes)
        )
        assert told == expected_outcomes, "an outcome was told twice, or not at all"
        assert self.view.offsets() == self.reading.positions

    def check(self, key: Key, expected: Expected) -> None:
        found = self.view.find(key)
        fold = expected.results
        if expected.heard_ms is None:
            assert found is None or not (found.content or found.fold.text or found.done or found.status), "made up"
            return
        assert found is not None, "an entry was lost"
        assert found.key == key
        assert self.view.known.is_live(key) == (fold.terminal is None)
        terminal = self.outcome_of(found) if found.lacks_outcome else found.terminal
        assert (terminal, found.terminal_offset) == (fold.terminal, expected.terminal_offset)
        if fold.terminal is None:
            assert found.passed_over or found.fold.text == fold.text
            wanted = {one.key for one, _ in self.wanted}
            assert key not in self.readers or not found.passed_over or key in wanted
            assert (found.fold.epoch, found.fold.attempt) == (fold.epoch, fold.attempt)
        assert (found.content != "") == (expected.request is not None)
        if expected.request is not None:
            assert (found.conversation_id, found.metadata) == (f"c-{key[0]}", {"of": key[0]})
        if expected.origin is not None:
            assert found.origin == expected.origin
        latest = expected.statuses.latest
        shown = None if found.status is None else (found.status.status, found.status.position, found.status.attempt)
        assert shown == (None if latest is None else (latest.status, latest.position, latest.attempt))
        public = found.to_json()
        name = "accepted" if latest is None else latest.status
        assert public["status"] == (name if fold.terminal is None else fold.terminal.status)

    @invariant()
    def subscribers_hear_of_their_own_request_only(self) -> None:
        for key, reader in self.readers.items():
            while frames := reader.subscription.take_nowait():
                for frame in frames:
                    self.hear_frame(key, reader, frame)

    def hear_frame(self, key: Key, reader: Reader, frame: Frame) -> None:
        """No seam, no repeat, and at the end the text of the outcome."""
        tenant, request_id = key
        assert frame.request_id == request_id
        reader.cursor = frame.cursor or reader.cursor
        if key in self.forgotten:
            return  # its twin may begin anew: nobody knows what was told before
        match frame:
            case ChunkFrame():
                assert frame.offset == len(reader.text), "a gap or a repeat"
                reader.text += frame.text
                assert reader.text.startswith(f"<{tenant}/{request_id} ")
                assert frame.cursor is not None
                assert decode_cursor(frame.cursor).partition == partition_for(request_id.encode(), PARTITIONS)
            case SnapshotFrame():
                reader.text = frame.text
            case RestartedFrame():
                reader.text = ""
            case ResultFrame():
                reader.results += 1
                assert reader.results <= 1
                found = self.view.find(key)
                if frame.status == "completed" and found is not None and found.stream:
                    assert reader.text == (frame.result or {})["text"]
            case _:
                pass

    def teardown(self) -> None:
        """At the end of the logs every result is that of its log read alone, and the same after another restart."""
        try:
            self.read_all()
            self.fill(late=False)
            self.load(fails=False)
            self.tells_what_the_folds_tell()
            self.subscribers_hear_of_their_own_request_only()
            for key in KEYS:
                alone = ResultFold(key[1], key[0])
                for written in self.logs[(NAMES.result, partition_for(key[1].encode(), PARTITIONS))]:
                    assert isinstance(written.record, ResultEvent)
                    alone.apply(written.record)
                assert self.reading.expected[key].results.terminal == alone.terminal
            self.restart(flushed=True)
            self.tells_what_the_folds_tell()
        finally:
            self.store.close()
            self.patch.undo()
            shutil.rmtree(self.folder)


ViewMachine.TestCase.settings = settings(
    max_examples=examples(100), stateful_step_count=50, deadline=None, report_multiple_bugs=False
)
TestView = ViewMachine.TestCase
