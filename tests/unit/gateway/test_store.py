"""The view's file: rows and the offsets that they reflect are written together, whatever fails and whenever it ends."""

from __future__ import annotations

import itertools
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kit.records import ORIGIN, RESULTS, chunk, outcome, request
from kit.view_gateway import execute
from penstock.common import log_copies
from penstock.gateway.view import store as store_module
from penstock.gateway.view import view_file
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.filters import ALL, RequestFilter
from penstock.gateway.view.key_filter import KeyFilter
from penstock.gateway.view.public import request_json
from penstock.gateway.view.rows import snapshot
from penstock.gateway.view.store import FIRST_TURN, MAX_WAITING, TP, Batch, Store
from penstock.schemas.errors import Overloaded
from penstock.schemas.labels import Labels
from penstock.schemas.times import rfc3339
from support import wait_until

IMAGE = {"artifact_id": "a", "media_type": "image/png", "width": 1, "height": 1}
TERMINAL = outcome(task="image_generation", image_generation={"images": [IMAGE]})


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "RETRY_S", 0.01)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "view.sqlite"


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[sqlite3.Connection]:
    """Those that the store makes, in this order."""
    made, connect = list[sqlite3.Connection](), log_copies.connect
    monkeypatch.setattr(log_copies, "connect", lambda path: made.append(connect(path)) or made[-1])
    return made


@pytest.fixture
def store(path: Path, connections: list[sqlite3.Connection]) -> Iterator[Store]:
    with closing(Store(path, "cluster")) as made:
        yield made


def new_entry(request_id: str = "r", *, accepted_ms: int = 1_000, updated_ms: int = 1_000, **fields: Any) -> Entry:
    """Of the conversation "c" if the id begins with it."""
    known = {"conversation_id": "c"} if request_id.startswith("c") else {}
    asked = request(request_id, **{**known, **fields})
    entry = Entry(asked.tenant, request_id, 3)
    entry.on_request(asked, replace(ORIGIN, append_time_ms=accepted_ms))
    entry.updated_ms = updated_ms
    return entry


def ended(entry: Entry, status: str = "completed") -> Entry:
    named = {"request_id": entry.request_id, "tenant": entry.tenant, "origin": entry.origin}
    entry.on_result(replace(TERMINAL, status=status, **named), 5)
    return entry


def submit(store: Store, offset: int, *entries: Entry) -> threading.Event:
    batch = Batch([snapshot(entry) for entry in entries], {RESULTS: offset}, threading.Event())
    store.submit(batch)
    return batch.written


def write(store: Store, offset: int, *entries: Entry) -> None:
    assert submit(store, offset, *entries).wait(60)


def written_to(path: Path, *entries: Entry, identity: str = "cluster") -> None:
    """By a process that has ended."""
    with closing(Store(path, identity)) as store:
        write(store, 1, *entries)


def content(path: Path, identity: str = "cluster") -> tuple[list[str], dict[TP, int]]:
    """The ids of live requests and the offsets, as a new process finds them."""
    with closing(Store(path, identity)) as store:
        return live(store), store.offsets()


def fail_at_offsets(path: Path) -> None:
    """A disk that is full when the rows are in and the offsets are not."""
    execute(path, "CREATE TRIGGER full BEFORE INSERT ON offsets BEGIN SELECT RAISE(ABORT, 'disk full'); END")


def fail_at_row(path: Path, request_id: str) -> None:
    when = f"WHEN NEW.request_id = '{request_id}' BEGIN SELECT RAISE(ABORT, 'disk full'); END"
    execute(path, f"CREATE TRIGGER full BEFORE INSERT ON requests {when}")


def wait_for_failure(store: Store) -> BaseException:
    return wait_until(lambda: store.failure, describe="the failure is reported")


def live(store: Store, tenant: str = "default") -> list[str]:
    """The ids of those that are not done; they are counted too."""
    found, after = list[str](), ("", 0, "")
    while (part := store.live_of_tenant(tenant, after, 7))[0]:
        found += ids(part[0])
        after = part[1]
    assert sum(count for named, _, _, count in store.live_counts() if named == tenant) == len(found)
    return found


def prune(store: Store, before_ms: int) -> None:
    """All that is silent, as the follower does it."""
    while store.prune(before_ms):
        pass
    while silent := store.silent_live(before_ms):
        store.delete([entry.key for entry in silent], before_ms)


def ids(entries: list[Entry] | None) -> list[str]:
    return [entry.request_id for entry in entries or ()]


def page(
    store: Store,
    limit: int = 9,
    after: str | None = None,
    *,
    newest_first: bool = False,
    where: Any = ALL,
    tenant: str = "default",
) -> list[Entry] | None:
    behind = None if after is None else (tenant, after)
    return store.page(tenant, limit=limit, after=behind, newest_first=newest_first, where=where)


# -- what is written


def test_an_entry_comes_back_as_it_was(store: Store) -> None:
    waits, done = new_entry("live"), ended(new_entry("done", accepted_ms=2_000))
    waits.labels = Labels("u", None, "k")
    waits.on_result(chunk(request_id="live"), 4)
    theirs = ended(new_entry("live", tenant="other"))
    write(store, 6, waits, done, theirs)
    for entry in (waits, done):
        found = store.get(entry.key)
        if entry.terminal is not None:
            assert found.lacks_outcome, "it is on the result topic"
            assert found.artifact_ids == entry.artifact_ids == {"a"}
            without = dict.fromkeys(("timings", "result", "worker_id", "device")) | {"result_omitted": True}
            assert found.to_json() == {**entry.to_json(), **without}
            found.hold_outcome(entry.terminal, entry.large, 0)
        assert found.to_json() == entry.to_json()
        assert found.passed_over == (not found.done), "its text is in the log"
        if not found.done:
            found.hold_text_of(entry.fold)
        assert [frame.to_json() for frame in found.opening(None)] == [f.to_json() for f in entry.opening(None)]
        for name in ("done", "origin", "accepted_ms", "labels"):
            assert getattr(found, name) == getattr(entry, name)
    assert (live(store), live(store, "other")) == (["live"], [])
    assert [found.key for found in page(store, tenant="other") or ()] == [theirs.key]
    assert ids(page(store)) == ["live", "done"]
    for key in (("other", "done"), ("default", "unknown")):
        assert store.get(key) is None
    assert store.offsets() == {RESULTS: 6}


# -- a process ends


def test_what_was_handed_over_is_written_at_the_end(path: Path) -> None:
    with closing(Store(path, "cluster")) as store:
        batches = [submit(store, at, new_entry(f"r{at}")) for at in range(20)]
    assert all(written.is_set() for written in batches)
    found, offsets = content(path)
    assert (len(found), offsets) == (20, {RESULTS: 19})


def test_rows_and_offsets_agree_whenever_the_file_is_opened(path: Path, store: Store) -> None:
    """As a process that was killed leaves them: each batch n writes the row n and the offset n."""
    last = [submit(store, at, new_entry(f"{at:04}")) for at in range(200)][-1]
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        while not last.is_set():
            query = "SELECT (SELECT count(*) FROM requests), (SELECT max(offset) FROM offsets)"
            rows, offset = reader.execute(query).fetchone()
            assert rows == (0 if offset is None else offset + 1)
    found, offsets = content(path)
    assert (len(found), offsets) == (200, {RESULTS: 199})


@pytest.mark.parametrize("fail", [fail_at_offsets, lambda path: fail_at_row(path, "after")], ids=["offsets", "row"])
def test_a_batch_that_cannot_be_written_leaves_nothing_and_the_store_ends(
    path: Path, fail: Callable[[Path], object]
) -> None:
    with closing(Store(path, "cluster")) as store:
        write(store, 1, new_entry("before"))
        fail(path)
        batches = [submit(store, 2, ended(new_entry("before")), new_entry("after"))]
        wait_for_failure(store)
        assert content(path) == (["before"], {RESULTS: 1})
        batches.append(submit(store, 9, new_entry("behind")))
    assert "view-writer" not in [thread.name for thread in threading.enumerate()]
    assert not any(written.is_set() for written in batches)
    assert content(path) == (["before"], {RESULTS: 1})


# -- failures


def test_batches_wait_in_order_behind_one_that_fails_and_the_failure_is_reported(path: Path, store: Store) -> None:
    assert store.failure is None
    fail_at_row(path, "r0")
    batches = [submit(store, 0, new_entry("r0"))]
    assert "disk full" in str(wait_for_failure(store))
    assert not store.is_behind
    batches += [submit(store, at, new_entry(f"r{at}")) for at in range(1, MAX_WAITING + 1)]
    assert store.is_behind
    assert (store.offsets(), batches[0].is_set()) == ({}, False), "a later batch passed the one that fails"
    execute(path, "DROP TRIGGER full")
    assert all(written.wait(60) for written in batches)
    wait_until(lambda: store.failure is None, describe="the failure is over")
    assert (store.is_behind, store.offsets()) == (False, {RESULTS: MAX_WAITING})
    assert len(live(store)) == MAX_WAITING + 1


def test_a_fault_of_the_writer_is_told(store: Store) -> None:
    row: Any = "no row"
    store.submit(Batch([row], {}, threading.Event()))
    assert isinstance(wait_for_failure(store), AttributeError)
    wait_until(lambda: store.has_ended, describe="the writer has ended")


# -- a file that is not this cluster's, or no database


def damage(path: Path, bad: bytes) -> None:
    path.unlink()
    path.write_bytes(bad)


@pytest.mark.parametrize("number", ["VERSION", "RELEASED"])
@pytest.mark.parametrize("step", [1, -1], ids=["upgrade", "downgrade"])
def test_a_file_of_another_release_is_emptied(
    path: Path, number: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that knew fewer schemas has passed over records of newer releases: outcomes would be missing for good."""
    written_to(path, new_entry())
    monkeypatch.setattr(view_file, number, getattr(view_file, number) + step)
    assert content(path) == ([], {})


def with_other_columns(path: Path) -> None:
    path.unlink()
    execute(path, "CREATE TABLE requests (tenant, request_id, done, PRIMARY KEY (tenant, request_id))")
    execute(path, "CREATE TABLE offsets (topic, partition, offset, PRIMARY KEY (topic, partition))")
    execute(path, "CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL)")
    execute(path, "INSERT INTO meta VALUES ('identity', '0 cluster')")
    execute(path, "INSERT INTO offsets VALUES ('results', 3, 7)")


@pytest.mark.parametrize(
    ("identity", "change"),
    [
        ("other", lambda path: None),
        ("cluster ", lambda path: None),
        ("cluster", lambda path: execute(path, "UPDATE meta SET value = '0 cluster' WHERE name = 'identity'")),
        ("cluster", with_other_columns),
        ("cluster", lambda path: damage(path, b"not a database at all " * 100)),
        ("cluster", lambda path: damage(path, b"SQLite format 3\0" + b"\xff" * 4096)),
    ],
    ids=["another cluster's", "a blank more", "another version", "other columns", "no database", "a damaged database"],
)
def test_a_file_that_cannot_be_used_is_created_again(
    path: Path, identity: str, change: Callable[[Path], object]
) -> None:
    written_to(path, new_entry())
    change(path)
    assert content(path, identity) == ([], {})
    written_to(path, new_entry("new"), identity=identity)
    assert content(path, identity) == (["new"], {RESULTS: 1})


@pytest.mark.parametrize("imported", [False, True])
def test_a_file_that_cannot_be_opened_now_is_kept(path: Path, imported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is temporary; the rows are still good then."""
    written_to(path, new_entry("kept"))
    if imported:
        path.replace(view_file.imported_path(path))

    full: Any = sqlite3.OperationalError("database or disk is full")
    full.sqlite_errorcode = sqlite3.SQLITE_FULL
    with monkeypatch.context() as patch:
        patch.setattr(log_copies, "connect", Mock(side_effect=full))
        with pytest.raises(Overloaded, match="full"):
            Store(path, "cluster")
    assert content(path)[0] == ["kept"]


# -- pruning


def test_prune_deletes_rows_that_were_not_touched_since(store: Store) -> None:
    write(store, 1, *(new_entry(f"r{at:04}", updated_ms=at) for at in range(2_500)))
    prune(store, 0)
    assert len(live(store)) == 2_500
    batches = [submit(store, at, new_entry(f"s{at:02}", updated_ms=2_600)) for at in range(2, 21)]
    prune(store, 2_300)
    assert all(written.wait(60) for written in batches)
    assert store.failure is None
    assert live(store) == [f"r{at:04}" for at in range(2_300, 2_500)] + [f"s{at:02}" for at in range(2, 21)]
    assert store.offsets() == {RESULTS: 20}, "pruned records have been read all the same"


def reads_of_unknown(store: Store, connections: list[sqlite3.Connection]) -> int:
    """How many of 1,000 requests that it does not have it looks up in its file."""
    read: list[str] = []
    for connection in connections:
        with suppress(sqlite3.ProgrammingError):  # closed, or of the writer's thread
            connection.set_trace_callback(read.append)
    assert all(store.get(("other", str(number))) is None for number in range(1_000))
    return len(read)


def test_days_of_requests_do_not_make_unknown_ones_cost_a_read(
    path: Path, connections: list[sqlite3.Connection]
) -> None:
    with closing(Store(path, "cluster", KeyFilter(64, 8))) as store:
        waits = new_entry("waits", updated_ms=39)
        write(store, 0, waits)
        for day in range(1, 41):
            written = submit(store, day, *(ended(new_entry(f"{day}/{n}", updated_ms=day)) for n in range(60)))
            prune(store, day - 1)
            assert written.wait(60)
            assert all(store.get(("default", f"{day}/{n}")) for n in range(60))
        write(store, 41, ended(new_entry("last", updated_ms=40)))
        assert store.get(waits.key)
        assert reads_of_unknown(store, connections) < 40
    connections.clear()
    with closing(Store(path, "cluster", KeyFilter(64, 8))) as store:
        assert store.get(waits.key)
        assert all(store.get(("default", f"{day}/{n}")) for day in (39, 40) for n in range(60))
        assert reads_of_unknown(store, connections) < 40


@pytest.mark.parametrize(
    "ask",
    [
        lambda store: store.live_turns("default", "c", FIRST_TURN, 1 << 62, 10),
        lambda store: store.live_of_tenant("default", ("", 0, ""), 10),
        lambda store: store.overdue((0, "", ""), 1 << 62, 10),
        lambda store: store.silent_live(1 << 62),
        lambda store: list(store.live_counts()),
    ],
)
def test_queries_for_live_rows_do_not_read_ended_ones(
    store: Store, connections: list[sqlite3.Connection], ask: Callable[[Store], Any]
) -> None:
    write(store, 1, *(ended(new_entry(f"c{at}")) for at in range(300)), new_entry("c-live"))
    assert page(store), "this thread has its connection"
    steps: list[None] = []
    for connection in connections:
        with suppress(sqlite3.ProgrammingError):  # closed
            connection.set_progress_handler(lambda: steps.append(None), 10)
    assert ask(store)
    assert len(steps) < 30, "ten instructions of SQLite each"


def test_overdue_requests_are_found_part_by_part(store: Store) -> None:
    entries = [new_entry(f"r{at}", accepted_ms=1_000 if at < 7 else 2_000 + at) for at in range(10)]
    write(store, 1, *entries, ended(new_entry("done")))
    due_ms = entries[0].must_end_ms
    found, after = list[str](), (0, "", "")
    while part := store.overdue(after, due_ms + 1_008, 3):
        found += [request_id for _, _, request_id in part]
        after = part[-1]
    assert found == [f"r{at}" for at in range(8)]


# -- pages


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("limit", [1, 3, 4, 10, 11])
def test_pages_in_both_orders(store: Store, newest_first: bool, limit: int) -> None:
    """By the time of acceptance, then by id; no row is skipped or listed twice, also when rows come meanwhile."""
    entries = [new_entry(f"r{at}", accepted_ms=1_000 + at // 3) for at in range(10)]
    write(store, 1, *reversed(entries), new_entry("r3", tenant="other", accepted_ms=1_001), new_entry("x", tenant="o"))
    found: list[str] = []
    while part := ids(page(store, limit, found[-1] if found else None, newest_first=newest_first)):
        assert len(part) <= limit
        if not found:  # at the end that has been read already
            write(store, 2, new_entry("newest" if newest_first else "oldest", accepted_ms=2_000 if newest_first else 1))
        found += part
    assert found == sorted(found, reverse=newest_first) == sorted(ids(entries), reverse=newest_first)
    for unknown in ("unknown", "x"):
        assert page(store, after=unknown, newest_first=newest_first) is None


def test_a_record_that_is_no_request_stands_at_its_time(store: Store) -> None:
    """Its outcome alone is known: no record of a request was read."""
    poison = Entry("default", "poison", 3)
    poison.on_result(replace(TERMINAL, request_id="poison", origin=replace(ORIGIN, append_time_ms=1_500)), 5)
    write(store, 1, new_entry("before", accepted_ms=1_000), poison, new_entry("behind", accepted_ms=2_000))
    listed = page(store, newest_first=True)
    assert ids(listed) == ["behind", "poison", "before"]
    assert request_json(listed[1])["created_at"] == request_json(poison)["created_at"] == rfc3339(1_500)
    assert listed[1].to_note == poison.to_note, "it was not accepted"


@pytest.mark.parametrize("status", [None, "waiting"])
@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("limit", [1, 3, 20])
def test_pages_of_all_tenants_in_both_orders(store: Store, newest_first: bool, limit: int, status: str | None) -> None:
    """By the time of acceptance, then by id, then by tenant: also of requests that have one id and one time."""
    entries = [new_entry(f"r{at // 2}", tenant=f"t{at % 3}", accepted_ms=1_000 + at // 4) for at in range(16)]
    for entry in entries[:3]:
        ended(entry)
    write(store, 1, *entries)
    found: list[Entry] = []
    while part := store.page(
        None,
        limit=limit,
        after=found[-1].key if found else None,
        newest_first=newest_first,
        where=RequestFilter(status=status),
    ):
        found += part
    wanted = entries if status is None else entries[3:]
    order = sorted(((e.accepted_ms, e.request_id, e.tenant) for e in wanted), reverse=newest_first)
    assert [(e.accepted_ms, e.request_id, e.tenant) for e in found] == order


@pytest.mark.parametrize("status", [None, "completed", "unsuccessful", "waiting"])
def test_a_page_of_all_tenants_asks_only_tenants_whose_rows_are_on_it(
    store: Store, connections: list[sqlite3.Connection], status: str | None
) -> None:
    entries = [new_entry(f"r{at}", tenant=f"t{at % 40:02}", accepted_ms=at) for at in range(160)]
    for entry, end in zip(entries, itertools.cycle(["completed", "failed", "expired", None]), strict=False):
        if end is not None:
            ended(entry, end)
    write(store, 1, *entries)
    where = RequestFilter(status=status)
    page(store)
    asked: list[str] = []
    connections[-1].set_trace_callback(asked.append)
    found = store.page(None, limit=5, after=entries[100].key, newest_first=True, where=where)
    connections[-1].set_trace_callback(None)
    wanted = [entry for entry in reversed(entries[:100]) if where.matches(entry)][:5]
    assert ids(found) == ids(wanted)
    assert sum("INDEXED BY" in query for query in asked) <= 6 * len(where.statuses), "5 tenants of each status"


LABELLED: list[dict[str, Any]] = [
    {"request_id": "a", "user_id": "u", "metadata": {"correlation_id": "k"}},
    {"request_id": "b", "user_id": "u", "session_id": "s", "model": "m"},
    {"request_id": "c", "conversation_id": "c", "priority": 9, "metadata": {"correlation_id": "k"}},
    {"request_id": "d", "task": "embedding", "model": "m", "priority": 8, "user_id": "v"},
    {"request_id": "e", "conversation_id": "c"},
    {"request_id": "f"},
]
"""The last two have ended."""


@pytest.mark.parametrize(
    ("where", "found"),
    [
        ({"user_id": "u"}, "ab"),
        ({"session_id": "s"}, "b"),
        ({"correlation_id": "k"}, "ac"),
        ({"correlation_id": "k", "user_id": "u", "status": "accepted"}, "a"),
        ({"conversation_id": "c"}, "ce"),
        ({"conversation_id": "c", "task": "text_generation"}, "ce"),
        ({"conversation_id": "c", "status": "completed"}, "e"),
        ({"status": "completed"}, "ef"),
        ({"status": "accepted"}, "abcd"),
        ({"status": "waiting"}, "abcd"),
        ({"status": "waiting", "klass": "low"}, "cd"),
        ({"task": "embedding"}, "d"),
        ({"task": "embedding", "status": "completed"}, ""),
        ({"model": "m"}, "bd"),
        ({"klass": "low"}, "cd"),
        ({"klass": "low", "model": "m"}, "d"),
        ({"klass": "high"}, ""),
    ],
)
def test_each_filter_alone_and_with_others(store: Store, where: dict[str, str], found: str) -> None:
    entries = [new_entry(accepted_ms=at, **fields) for at, fields in enumerate(LABELLED)]
    for entry in entries[-2:]:
        ended(entry)
    write(store, 1, *entries, new_entry("x", tenant="other"))
    chosen = RequestFilter(**where)
    assert ids(page(store, where=chosen)) == [*found]
    assert [entry.request_id for entry in entries if chosen.matches(entry)] == [*found]
    for after in "ae":
        assert ids(page(store, after=after, where=chosen)) == [one for one in found if one > after]
    assert page(store, where=chosen, tenant="none") == []


def test_unsuccessful_is_each_end_but_completed_and_cancelled(store: Store) -> None:
    ends = ("completed", "failed", "dead_lettered", "expired", "cancelled")
    write(store, 1, *(ended(new_entry(status, accepted_ms=at), status) for at, status in enumerate(ends)))
    assert ids(page(store, where=RequestFilter(status="unsuccessful"))) == ["failed", "dead_lettered", "expired"]


def test_erased_requests_are_known_and_not_listed(store: Store) -> None:
    entries = [new_entry(f"r{at}", accepted_ms=at) for at in range(3)]
    entries[1].erased = True
    write(store, 1, *entries)
    assert ids(page(store)) == ["r0", "r2"]
    assert ids(page(store, after="r1")) == ["r2"], "a cursor at it is still valid"
    assert store.get(("default", "r1")).erased


@pytest.mark.parametrize(
    ("filters", "index"),
    [
        ({}, "COVERING INDEX by_time"),
        ({"task": "embedding", "klass": "low", "model": "m"}, "COVERING INDEX by_time"),
        ({"id_contains": "r", "accepted_until_ms": 5}, "COVERING INDEX by_time"),
        ({"status": "completed"}, "COVERING INDEX by_time"),
        ({"status": "failed"}, "COVERING INDEX by_status"),
        ({"status": "waiting", "task": "embedding"}, "COVERING INDEX by_status"),
        ({"conversation_id": "c"}, "INDEX by_conversation"),
        ({"status": "completed", "conversation_id": "c"}, "INDEX by_conversation"),
        ({"user_id": "u", "status": "completed"}, "INDEX by_user"),
        ({"session_id": "s", "user_id": "u"}, "INDEX by_session"),
        ({"correlation_id": "k", "conversation_id": "c"}, "INDEX by_correlation"),
    ],
)
@pytest.mark.parametrize("newest_first", [True, False])
@pytest.mark.parametrize("after", [None, "r"])
def test_a_page_reads_its_own_rows_alone(
    store: Store, connections: list[sqlite3.Connection], filters: Any, index: str, newest_first: bool, after: str | None
) -> None:
    """By an index that has the filter and the order. Filters that match many rows are checked in the index alone."""
    write(store, 1, new_entry("r"), new_entry("c", user_id="u"))
    asked: list[str] = []
    page(store)
    connection = connections[-1]
    connection.set_trace_callback(asked.append)
    page(store, after=after, newest_first=newest_first, where=RequestFilter(**filters))
    connection.set_trace_callback(None)
    plans = {q: " ".join(row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {q}")) for q in asked}
    assert not any("SCAN requests" in plan for plan in plans.values())
    scans = [plan for query, plan in plans.items() if "INDEXED BY" in query]
    assert scans
    for plan in scans:
        assert f"USING {index} (" in plan
        assert "TEMP B-TREE FOR ORDER BY" not in plan, "more than rows of one time are sorted"
        assert after is None or "(accepted_ms,request_id)" in plan or "accepted_ms" in plan.split(index)[1]


def test_deleted_facts_are_in_none_of_the_files(path: Path) -> None:

    def bytes_on_disk() -> bytes:
        return b"".join(one.read_bytes() for one in path.parent.iterdir())

    secret = b"the secret title"
    with closing(Store(path, "p")) as store:
        store.submit(Batch([], {}, threading.Event(), {"c": secret}))
        wait_until(lambda: store.facts_of(["c"]), 10, "they are written")
        assert secret in bytes_on_disk()
        with closing(log_copies.connect(path)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM conversations").fetchall()
            store.submit(gone := Batch([], {}, threading.Event(), {"c": None}))
            assert gone.written.wait(5), "the writer does not wait for a reader"
        write(store, 1)
        wait_until(lambda: secret not in bytes_on_disk(), 10, "it is gone")


# -- the filter of keys


KEYS, MOST = 1_024, 4
BYTES = KEYS * 2
"""Of one filter."""

Key = tuple[str, str]


def of_day(day: int, count: int) -> Iterator[Key]:
    return (("default", f"{day}/{number}") for number in range(count))


def taken_for_known(known: KeyFilter) -> float:
    """The part of the keys that nobody added."""
    return sum(("other", f"r{number}") in known for number in range(20_000)) / 20_000


def test_days_of_keys_take_bounded_room_and_unknown_keys_stay_unknown() -> None:
    known = KeyFilter(KEYS, MOST)
    for day in range(1, 41):
        for key in of_day(day, 1_000):
            known.add(key, day)
            known.add(key, day)  # a row is written again with each change
        known.forget(day - 1)
        for kept in range(max(1, day - 1), day + 1):
            assert all(key in known for key in of_day(kept, 1_000))
        assert known.size_bytes <= MOST * BYTES
    assert taken_for_known(known) < MOST * 0.004
    known.forget(41)
    assert (taken_for_known(known), known.size_bytes) == (0, BYTES)


@pytest.mark.parametrize("times", [1, 3])
def test_more_keys_than_it_has_room_for_are_known_all(times: int) -> None:
    known, count = KeyFilter(KEYS, MOST), times * MOST * KEYS
    for key in of_day(0, count):
        known.add(key, 0)
    assert all(key in known for key in of_day(0, count))
    assert known.size_bytes == MOST * BYTES
    assert taken_for_known(known) < (0.02 if times == 1 else 0.4)


def test_a_key_that_was_written_again_is_known_when_its_first_filter_is_dropped() -> None:
    known = KeyFilter(KEYS, MOST)
    known.add(("default", "old"), 1)
    for day in range(2, 5):
        for key in of_day(day, KEYS):
            known.add(key, day)
        known.add(("default", "old"), day)
    known.forget(4)
    assert ("default", "old") in known
    assert known.size_bytes < MOST * BYTES
