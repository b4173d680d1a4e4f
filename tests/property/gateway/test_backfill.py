"""A view that follows from the middle of the log and reads the past beside it knows what one in order knows."""

from __future__ import annotations

import math
import random
import sqlite3
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.examples import examples
from kit.records import CONTROL, HIGH, REQUESTS, RESULTS, STATUSES, chunk, command, outcome, request, status
from kit.view_gateway import ViewGateway, flush
from penstock.common.clock import now_ms
from penstock.common.reader import RawMessage
from penstock.gateway.limits.tenants import Tenants
from penstock.gateway.view import change_over, view_file
from penstock.gateway.view import view as view_module
from penstock.gateway.view.backfill import Backfill
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.request_records import origin_of
from penstock.gateway.view.request_state import Key
from penstock.gateway.view.rows import row_of, snapshot
from penstock.gateway.view.snapshot_file import Unusable, make_view, take
from penstock.gateway.view.view import View
from penstock.gateway.view.view_file import imported_path
from penstock.schemas.codec import default_codec
from penstock.schemas.records import Origin, Record, Usage
from penstock.schemas.topics import TP

TPS: tuple[TP, ...] = (CONTROL, HIGH, REQUESTS, RESULTS, STATUSES)
NOW_MS = now_ms() // 1_000 * 1_000 - 600_000
"""The history counts what is not older than 48 hours."""
LIVES = ("waits", "runs", "streams", "ends", "moves", "is cancelled", "is erased", "ends erased", "repeats")


@dataclass
class Log:
    """Partitions, written in one order of time."""

    partitions: dict[TP, list[RawMessage]] = field(default_factory=lambda: {tp: [] for tp in TPS})
    written: list[RawMessage] = field(default_factory=list[RawMessage])

    def put(self, tp: TP, record: Record) -> RawMessage:
        records = self.partitions[tp]
        at_ms = NOW_MS + 10 * len(self.written)
        message = RawMessage(*tp, len(records), at_ms, None, default_codec().encode(record))
        records.append(message)
        self.written.append(message)
        return message

    def ends(self, count: int) -> dict[TP, int]:
        """Those of the partitions after so many records."""
        seen = Counter((one.topic, one.partition) for one in self.written[:count])
        return {tp: seen[tp] for tp in TPS}


def life(log: Log, number: int, kind: str) -> Any:
    """What is written about one request, a step at a time."""
    name, tp = f"r{number}", HIGH if number % 2 else REQUESTS
    priority = 1 if number % 2 else 5
    written = log.put(tp, request(name, priority=priority, stream=kind == "streams", conversation_id=f"c{number % 3}"))
    known = {"origin": origin_of(written), "created_at": written.timestamp_ms}
    yield
    if kind == "moves":
        log.put(CONTROL, command("reprioritize", name, priority=3))
        yield
        log.put(CONTROL, command("reprioritize", name, priority=7))
    if kind == "is cancelled":
        log.put(CONTROL, command("cancel", name))
    if kind in ("waits", "moves", "is cancelled"):
        yield
        log.put(STATUSES, status("queued", name, **known))
        return
    log.put(STATUSES, status("running", name, **known))
    yield
    if kind == "repeats":  # by another service; workers know the id
        log.put(tp, request(name, priority=priority, conversation_id="c9", metadata={"by": "another"}))
        yield
        log.put(RESULTS, outcome(name, "abcd", **known))
        yield
        return
    for text_offset, text in ((0, "ab"), (2, "cd")):
        if kind != "runs":
            log.put(RESULTS, chunk(text, text_offset, name, **known))
            yield
    if kind in ("ends", "is erased", "ends erased"):
        if kind == "ends erased":  # at another gateway, which has read the outcome
            log.put(RESULTS, outcome(name, "abcd", **known))
            yield
            log.put(CONTROL, command("erase", name))
            return
        log.put(RESULTS, outcome(name, "abcd", **known))
        log.put(STATUSES, status("completed", name, **known))
        yield
    if kind == "is erased":
        log.put(CONTROL, command("erase", name))


def written(seed: int, lives: list[str]) -> Log:
    """The lives of these requests, interleaved."""
    log, draw = Log(), random.Random(seed)
    steps = [life(log, number, kind) for number, kind in enumerate(lives)]
    while steps:
        one = draw.choice(steps[:4])
        if next(one, one) is one:
            steps.remove(one)
    return log


def knows(gateway: ViewGateway) -> dict[str, Any]:
    """All that a view says, without the times of its own clock."""
    view = gateway.view
    flush(view)
    entries = [gateway.view.known.peek(("default", f"r{number}")) for number in range(20)]
    facts = [None if one is None else snapshot(one)._replace(updated_ms=0) for one in entries]
    # A status that is read behind the outcome tells nothing.
    facts = [one._replace(status=None) if one is not None and one.ended[0] else one for one in facts]
    rows = [None if one is None else row_of(one) for one in facts]
    minutes = {at: one.to_text() for at, one in view.known.history.minutes().items() if one.to_text() != EMPTY}
    census, work = view.census, view.tenants.known().get("default")
    depths, ages = census.queue_depths(NOW_MS + 100_000)
    waiting = [replace(one, since_ms=(one.since_ms or 0) // 1_000) for one in census.waiting(NOW_MS + 100_000)]
    turns = {name: sorted(census.of_conversation("default", name)) for name in ("c0", "c1", "c2")}
    return {
        "entries": rows,
        "minutes": minutes,
        "live": (view.live_count, census.live("high"), census.live("medium"), census.live("low")),
        "depths": (depths, {klass: math.ceil(age_s) for klass, age_s in ages.items()}),
        "running": dict(census.running),
        "waiting": sorted(map(repr, waiting)),
        "turns": turns,
        "outstanding": 0 if work is None else work.outstanding,
        "outcomes": dict(view.outcomes),
        "offsets": {tp: at for tp, at in gateway.store.offsets().items() if at},
    }


EMPTY = "[0,0,0,{},{},{},{}]"


class Readers:
    """The follower, from the boundary on, and the backfill reader, as `BackfillReader` drives it."""

    def __init__(self, gateway: ViewGateway, log: Log, results_cut: int, cut: int) -> None:
        self.view, self.gateway, self.log = gateway.view, gateway, log
        view = gateway.view
        early, late = log.ends(results_cut), log.ends(cut)
        ends = {tp: late[tp] if tp in (HIGH, REQUESTS) else early[tp] for tp in TPS}
        self.backfill = Backfill({}, ends, 0, NOW_MS - 1)
        view.begin_backfill(self.backfill)
        view.offsets().update({**ends, CONTROL: 0})
        while view.offsets()[CONTROL] < ends[CONTROL]:  # commands come first
            self.follow(CONTROL)

    def import_snapshot(self, file: Path, between: Callable[[], object] = lambda: None) -> None:
        """As `SnapshotImport` does it, with what another gateway has written. `between` runs between two passes."""
        path, store = file.replace(imported_path(self.gateway.path)), self.gateway.store
        imported = make_view(path, "cluster", {}, self.backfill)
        flush(self.view)
        passed, go_on, write_next = threading.Semaphore(0), threading.Semaphore(0), store._write_next

        def paced(connection: sqlite3.Connection) -> Any:
            passed.release()
            assert go_on.acquire(timeout=10)
            return write_next(connection)

        with patch.object(store, "_write_next", paced), patch.object(change_over, "ROWS_AT_ONCE", 2):
            over = store.begin_change_over(imported)
            while not over.copied.wait(0.001):
                if passed.acquire(blocking=False):
                    between()
                    go_on.release()
        assert over.failure is None
        store.switch(imported)
        self.view.change_over(over)
        over.decide(switched=True)
        self.backfill.begin_at(imported.offsets, imported.taken_ms)

    def follow(self, tp: TP | None = None) -> bool:
        offsets, partitions = self.view.offsets(), self.log.partitions
        unread = [records[offsets[one]] for one, records in partitions.items() if offsets[one] < len(records)]
        if not unread:
            return False
        if tp is None:
            first = min(unread, key=lambda message: message.timestamp_ms)
            tp = first.topic, first.partition
        return self._read(tp, self.view.offsets(), self.view.apply, len(self.log.partitions[tp]))

    def read_backfill(self, tp: TP) -> bool:
        """In the order of time up to the ends of the start, then of this partition up to the follower."""
        unread = [
            self.log.partitions[one][at] for one, at in self.backfill.offsets().items() if at < self.backfill.ends[one]
        ]
        if unread:
            first = min(unread, key=lambda message: message.timestamp_ms)
            tp = first.topic, first.partition
        end = max(self.backfill.ends[tp], self.view.offsets()[tp])
        return self._read(tp, self.backfill.offsets(), self.view.apply_backfill, end)

    def read_all_of_the_past(self) -> None:
        while any(self.read_backfill(tp) for tp in TPS):
            pass

    def follow_to_the_end(self) -> None:
        while self.follow():
            pass

    def _read(self, tp: TP, offsets: dict[TP, int], fold: Any, end: int) -> bool:
        at = offsets[tp]
        if at >= end:
            return False
        fold([self.log.partitions[tp][at]])
        return True

    def end_backfill(self, draw: random.Random | None = None) -> None:
        draw = draw or random.Random(1)
        self.read_all_of_the_past()
        self.backfill.keep_what_comes()
        for _ in range(draw.randrange(12)):
            self.follow()
        # The backfill reader may have come further by itself.
        for _ in range(draw.randrange(3)):
            self.read_backfill(draw.choice(TPS))
        with patch.object(view_module, "COUNTED_AT_ONCE", 1):
            for _ in self.view.end_backfill():
                for _ in range(draw.randrange(3)):
                    self.follow()
                while kept := self.backfill.take_kept(2):
                    self.view.apply_backfill(kept)


def snapshot_of(log: Log, count: int, folder: Path) -> Path:
    """What a gateway has written that has read so many records."""
    with ViewGateway(folder / "whole.sqlite") as whole:
        whole.view.apply(log.written[:count])
        whole.flush()
        take(whole.path, folder / "snapshot", "cluster")
    return folder / "snapshot"


@settings(max_examples=examples(200), deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    lives=st.lists(st.sampled_from(LIVES), min_size=1, max_size=14),
    cut=st.floats(0, 1),
    lag=st.integers(0, 6),
    past_share=st.floats(0.05, 0.95),
    aside=st.booleans(),
    taken=st.none() | st.floats(0, 1),
)
def test_both_readings_together_know_what_one_in_order_knows(
    seed: int, lives: list[str], cut: float, lag: int, past_share: float, aside: bool, taken: float | None
) -> None:
    """`taken`: how much of the past the snapshot of another gateway knows; None: there is none."""
    log, draw = written(seed, lives), random.Random(seed)
    at = int(cut * len(log.written))
    options: dict[str, Any] = {"held_live": 0} if aside else {}
    with tempfile.TemporaryDirectory() as folder:
        with ViewGateway(Path(folder) / "ordered.sqlite") as ordered:
            ordered.view.apply(log.written)
            expected = knows(ordered)
        with ViewGateway(Path(folder) / "young.sqlite", **options) as young:
            early = max(0, at - lag)
            readers = Readers(young, log, early, at)
            if taken is not None:
                for _ in range(draw.randrange(2 * len(log.written))):
                    readers.follow()
                    if aside and draw.random() < 0.2:
                        young.evict_to_disk()

                def follow_and_write() -> None:
                    for _ in range(draw.randrange(4)):
                        readers.follow()
                    if draw.random() < 0.5:
                        young.view.flush()
                    if aside:
                        young.view.evict_to_disk(1_000)

                readers.import_snapshot(snapshot_of(log, int(taken * early), Path(folder)), follow_and_write)
            for _ in range(draw.randrange(4 * len(log.written))):
                tp = draw.choice(TPS)
                readers.read_backfill(tp) if draw.random() < past_share else readers.follow()
                if aside and draw.random() < 0.2:
                    young.evict_to_disk()
            readers.end_backfill(draw)
            readers.follow_to_the_end()
            found = knows(young)
            if aside or taken is not None:
                found["turns"] = expected["turns"]  # those aside are in the file
            if taken is not None:
                found["outcomes"] = expected["outcomes"]  # of outcomes that others have folded none is told
            assert found == expected


def past_of(*kinds: str) -> Log:
    log = Log()
    for number, kind in enumerate(kinds):
        for _ in life(log, number, kind):
            pass
    return log


@contextmanager
def started(folder: Path, log: Log, cut: int | None = None, **options: Any) -> Generator[tuple[ViewGateway, Readers]]:
    """A gateway that is started when the log has so many records, by default all that it has now; and its readers."""
    at = len(log.written) if cut is None else cut
    with ViewGateway(folder / "young.sqlite", **options) as gateway:
        yield gateway, Readers(gateway, log, at, at)


def test_nothing_of_the_past_counts_until_all_of_it_is_read(tmp_path: Path) -> None:
    log = past_of("waits", "ends", "runs", "waits")
    with started(tmp_path, log, len(log.written) - 2) as (young, readers):
        readers.read_all_of_the_past()
        view = young.view
        assert view.live_count == 2
        assert view.census.queue_depths(NOW_MS)[0] == {"high": 0, "medium": 0, "low": 0}
        waits, ended = young.entry(("default", "r0")), young.entry(("default", "r1"))
        assert (view.is_settled(waits), view.is_settled(ended)) == (False, True)
        readers.follow_to_the_end()
        new = young.entry(("default", "r3"))
        assert view.is_settled(new)
        assert view.census.queue_depths(NOW_MS)[0] == {"high": 1, "medium": 0, "low": 0}
        readers.end_backfill()
        assert view.is_settled(waits)
        assert view.census.queue_depths(NOW_MS)[0] == {"high": 1, "medium": 1, "low": 0}
        assert view.census.live("medium") == 2


@dataclass
class Days:
    """A log of two days that a gateway with limits reads. Times are in seconds before the start."""

    view: View
    backfill: Backfill
    start_ms: int

    def read(self, name: str, ago_s: int, conversation_id: str | None = None) -> None:
        """A request of the past that has used 100 tokens, and its outcome."""
        at_ms, offset = self.start_ms - ago_s * 1_000, self.backfill.offsets()[REQUESTS]
        made = request(name, created_at=at_ms, conversation_id=conversation_id)
        asked = RawMessage(*REQUESTS, offset, at_ms, None, default_codec().encode(made))
        usage = Usage(prompt_tokens=60, completion_tokens=40, total_tokens=100)
        ended = outcome(name, "ab", usage=usage, origin=origin_of(asked), created_at=at_ms)
        result = RawMessage(*RESULTS, offset, at_ms, None, default_codec().encode(ended))
        self.view.apply_backfill([asked, result])


@contextmanager
def days(folder: Path) -> Generator[Days]:
    tenants = Tenants(lambda _: 600)
    with ViewGateway(folder / "view.sqlite", tenants=tenants) as young:
        start_ms = now_ms()
        backfill = Backfill({}, {REQUESTS: 1_000, RESULTS: 1_000}, 0, start_ms)
        young.view.begin_backfill(backfill)
        yield Days(young.view, backfill, start_ms)


def test_of_the_past_the_last_minute_alone_is_charged(tmp_path: Path) -> None:
    with days(tmp_path) as log:
        log.read("first", 172_000)
        bucket = log.view.tenants.tokens("default", log.start_ms / 1_000)
        assert bucket.wait_s(log.start_ms / 1_000) == 0, "a call meanwhile"
        for number in range(40):
            log.read(f"r{number}", 170_000 - 4_000 * number)
        assert bucket.remaining(log.start_ms / 1_000) == 600
        log.read("late", 30)
        assert bucket.remaining(log.start_ms / 1_000) == 500


def test_conversations_of_the_past_stand_in_no_way_of_new_ones(tmp_path: Path) -> None:
    with days(tmp_path) as log:
        tenants, now_s = log.view.tenants, log.start_ms / 1_000
        tenants.on_request("default", "runs", log.start_ms)
        for name, ago_s in (("old", 100_000), ("runs", 90_000), ("late", 500), ("runs", 400)):
            log.read(f"{name}-{ago_s}", ago_s, name)
        assert tenants.of("default").named == {"runs": now_s, "late": now_s - 500}


def test_outcomes_of_copied_topics_are_of_the_past_though_they_name_other_places(tmp_path: Path) -> None:
    log = Log()
    log.put(REQUESTS, request("r0"))
    elsewhere = Origin(topic=REQUESTS[0], partition=0, offset=1_000_000, append_time_ms=NOW_MS)
    log.put(RESULTS, outcome("r0", "ab", origin=elsewhere))
    with started(tmp_path, log, 2) as (young, readers):
        readers.end_backfill()
        assert young.entry(("default", "r0")).status_name == "completed"


def test_an_outcome_on_a_partition_that_was_added_since_is_known(tmp_path: Path) -> None:
    """Only the follower reads that partition."""
    log = Log()
    written = log.put(REQUESTS, request("r0"))
    with started(tmp_path, log, 1) as (young, readers):
        value = default_codec().encode(outcome("r0", "ab", origin=origin_of(written)))
        readers.read_all_of_the_past()
        young.view.apply([RawMessage(RESULTS[0], RESULTS[1] + 99, 0, NOW_MS + 1_000, None, value)])
        readers.end_backfill()
        assert young.entry(("default", "r0")).status_name == "completed"


def test_who_follows_a_conversation_hears_of_its_turns_of_the_past_that_run_once_all_is_read(tmp_path: Path) -> None:
    log = Log()
    for number, kind in ((0, "waits"), (3, "ends"), (6, "runs")):
        for _ in life(log, number, kind):
            pass
    with started(tmp_path, log, held_live=0) as (young, readers):
        client = young.hub.connect(lambda: None)
        young.hub.subscribe(client, ("conversation", "default", "c0"))
        readers.read_all_of_the_past()
        assert not client.frames
        young.evict_to_disk()
        readers.end_backfill()
        assert sorted(frame.request_id for frame in client.frames) == ["r0", "r6"]


def test_who_follows_a_repeat_is_told_the_outcome_of_the_request_of_the_past(tmp_path: Path) -> None:
    log = Log()
    first = log.put(REQUESTS, request("r0"))
    log.put(RESULTS, outcome("r0", "ab", origin=origin_of(first)))
    log.put(REQUESTS, request("r0"))
    with started(tmp_path, log, 2) as (young, readers):
        readers.follow()
        client = young.hub.connect(lambda: None)
        young.hub.subscribe(client, ("request", "default", "r0"))
        readers.end_backfill()
        assert [frame.type for frame in client.frames] == ["result"]
        work = young.view.tenants.known()["default"]
        assert (work.outstanding, young.view.live_count) == (0, 0)


def test_what_another_gateway_accepted_and_has_not_read_is_read_from_the_log(tmp_path: Path) -> None:
    log = past_of("ends")
    count = len(log.written)
    with ViewGateway(tmp_path / "whole.sqlite") as whole:
        whole.view.apply(log.written)
        accepted = request("r1", priority=1, created_at=NOW_MS)
        whole.view.accepted(accepted, origin_of(log.put(HIGH, accepted)))
        whole.view.accepted(request("unsent", created_at=NOW_MS))
        whole.flush()
        take(whole.path, tmp_path / "snapshot", "cluster")
    with started(tmp_path, log, count) as (young, readers):
        readers.import_snapshot(tmp_path / "snapshot")
        readers.follow_to_the_end()
        readers.end_backfill()
        assert [young.view.find(("default", name)) is not None for name in ("r0", "r1", "unsent")] == [
            True,
            True,
            False,
        ]
        assert (young.view.live_count, young.view.census.live("high")) == (1, 1)
        assert sum(one.accepted for one in young.view.known.history.minutes().values()) == 2


def test_of_two_records_with_one_id_the_one_with_results_counts(tmp_path: Path) -> None:
    """The one of the past waits, and a worker has run the other one."""
    log = past_of("waits")
    count = len(log.written)
    origin = origin_of(log.put(HIGH, request("r0", priority=1)))
    log.put(RESULTS, outcome("r0", "ab", origin=origin))
    with started(tmp_path, log, count) as (young, readers):
        readers.follow_to_the_end()
        readers.import_snapshot(snapshot_of(log, count, tmp_path))
        readers.end_backfill()
        assert young.entry(("default", "r0")).status_name == "completed"
        assert young.view.live_count == 0
        assert young.view.tenants.known()["default"].outstanding == 0
        assert sum(one.accepted for one in young.view.known.history.minutes().values()) == 1


def test_who_follows_a_repeat_is_told_the_outcome_of_the_snapshot(tmp_path: Path) -> None:
    log = past_of("ends")
    count = len(log.written)
    log.put(REQUESTS, request("r0"))
    with started(tmp_path, log, count) as (young, readers):
        readers.follow()
        streams, loaded = young.view.streams, []
        streams.load = loaded.append
        client = young.hub.connect(lambda: None)
        young.hub.subscribe(client, ("request", "default", "r0"))
        readers.import_snapshot(snapshot_of(log, count, tmp_path))
        (entry,) = loaded
        entry.hold_outcome(outcome("r0", "abcd", origin=entry.origin), None, 0)
        streams.loaded(entry, entry)
        assert [frame.type for frame in client.frames] == ["result"]


@pytest.mark.parametrize(
    ("begin", "known", "cluster", "why"),
    [
        (0, 3, "cluster", "newer"),
        (2, 1, "cluster", "begins behind"),
        (0, 1, "another", "another installation"),
    ],
)
def test_a_snapshot_that_does_not_fit_is_refused(
    tmp_path: Path, begin: int, known: int, cluster: str, why: str
) -> None:
    log = past_of("waits", "waits", "waits", "waits", "waits", "waits")
    file = snapshot_of(log, 4 * known, tmp_path)
    ends = log.ends(8)
    with pytest.raises(Unusable, match=why):
        make_view(file, cluster, {REQUESTS: begin}, Backfill({}, ends, 0, NOW_MS))


def test_a_view_that_is_not_whole_makes_no_snapshot(tmp_path: Path) -> None:
    with ViewGateway(tmp_path / "young.sqlite") as young:
        young.store.is_whole(False)
        with pytest.raises(Unusable, match="not whole"):
            take(young.path, tmp_path / "snapshot", "cluster")


def test_a_whole_view_that_was_made_from_a_snapshot_is_found_by_the_next_process(tmp_path: Path) -> None:
    log = past_of("ends", "waits", "runs")
    count = len(log.written)
    for whole in (False, True):
        path = tmp_path / f"{whole}.sqlite"
        with ViewGateway(path) as young:
            young.store.is_whole(False)
            readers = Readers(young, log, count, count)
            readers.import_snapshot(snapshot_of(log, count, tmp_path))
            readers.end_backfill()
            young.flush()
            young.store.is_whole(whole)
            young.restart()
            assert [young.view.find(("default", f"r{number}")) is not None for number in range(3)] == [whole] * 3
            assert young.view.live_count == 2 * whole
        assert sorted(one.name for one in tmp_path.glob(f"{whole}*")) == [path.name]


def test_a_view_goes_on_with_a_snapshot_when_its_old_file_cannot_be_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = past_of("ends")
    with started(tmp_path, log) as (young, readers):

        def full(_: object) -> None:
            raise sqlite3.OperationalError("database or disk is full")

        monkeypatch.setattr(view_file, "empty", full)
        readers.import_snapshot(snapshot_of(log, len(log.written), tmp_path))
        log.put(REQUESTS, request("r1"))
        readers.follow_to_the_end()
        young.flush()
        assert young.store.get(("default", "r1")) is not None


def test_what_is_erased_in_both_is_not_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is done while nothing else has its turn on the loop, and all erasures of two days are known."""
    log = past_of("is erased", "is erased")
    with started(tmp_path, log) as (young, readers):
        looked, look = list[Key](), young.store.of_snapshot

        def counted(key: Key) -> Entry | None:
            looked.append(key)
            return look(key)

        monkeypatch.setattr(young.store, "of_snapshot", counted)
        readers.import_snapshot(snapshot_of(log, len(log.written), tmp_path))
        assert not looked
        erased = young.entry(("default", "r0"))
        assert (erased.erased, erased.erased_unread) == (True, False), "the request of the snapshot"


def test_facts_that_change_while_rows_are_copied_are_copied_as_they_are(tmp_path: Path) -> None:
    log = past_of("ends")
    with started(tmp_path, log) as (young, readers):
        facts = young.view.known.unwritten
        for name in "abcdefgh":
            facts.add_facts(name, b"old")
        changes = iter([("b", None), ("g", None), ("h", b"new"), ("a", b"new")])

        def change() -> None:
            if (one := next(changes, None)) is not None:
                facts.add_facts(*one)
                young.view.flush()

        readers.import_snapshot(snapshot_of(log, len(log.written), tmp_path), change)
        young.flush()
        assert next(changes, None) is None
        kept = young.store.facts_of([*"abcdefgh"])
        assert kept == {"a": b"new", **dict.fromkeys("cdef", b"old"), "h": b"new"}
