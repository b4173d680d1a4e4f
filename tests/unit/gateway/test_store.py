"""The view's file: rows and the offsets they reflect stand or fall together, whatever fails and whenever it ends."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.common import log_copies
from penstock.gateway.view import store as store_module
from penstock.gateway.view import view_file
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.filters import RequestFilter
from penstock.gateway.view.rows import snapshot
from penstock.gateway.view.store import MAX_WAITING, TP, Batch, Store
from penstock.schemas.errors import Overloaded
from penstock.schemas.labels import Labels
from penstock.schemas.records import InferenceRequest, Origin, ResultEvent
from support import wait_until

ORIGIN = Origin(topic="t", partition=0, offset=7, append_time_ms=1_000)
RESULTS: TP = ("results", 3)
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
    text="ab",
    text_offset=0,
)
IMAGE = {"artifact_id": "a", "media_type": "image/png", "width": 1, "height": 1}
TERMINAL = replace(
    CHUNK,
    kind="terminal",
    text=None,
    status="completed",
    task="image_generation",
    image_generation={"images": [IMAGE]},
)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "RETRY_S", 0.01)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "view.sqlite"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    found = Store(path, "cluster")
    yield found
    found.close()


def new_entry(
    request_id: str = "r", *, tenant: str = "default", accepted_ms: int = 1_000, updated_ms: int = 1_000
) -> Entry:
    entry = Entry(tenant, request_id, 3)
    request = InferenceRequest(
        request_id=request_id,
        tenant=tenant,
        task="text_generation",
        text_generation={"prompt": "a"},
        conversation_id="c" if request_id.startswith("c") else None,
        created_at=1,
    )
    entry.on_request(request, replace(ORIGIN, append_time_ms=accepted_ms))
    entry.updated_ms = updated_ms
    return entry


def ended(entry: Entry) -> Entry:
    origin = entry.origin
    assert origin is not None
    event = replace(TERMINAL, request_id=entry.request_id, tenant=entry.tenant, origin=origin)
    entry.on_result(event, 5)
    return entry


def submit(store: Store, offset: int, *entries: Entry) -> threading.Event:
    batch = Batch([snapshot(entry) for entry in entries], {RESULTS: offset}, threading.Event())
    store.submit(batch)
    return batch.written


def write(store: Store, offset: int, *entries: Entry) -> None:
    assert submit(store, offset, *entries).wait(10)


def execute(path: Path, script: str) -> None:
    """By another hand, as the file's owner could."""
    with closing(sqlite3.connect(path, isolation_level=None, timeout=10)) as connection:
        connection.executescript(script)


def fail_at_offsets(path: Path) -> None:
    """A disk that fills up when the rows are in and the offsets are not."""
    execute(path, "CREATE TRIGGER full BEFORE INSERT ON offsets BEGIN SELECT RAISE(ABORT, 'disk full'); END")


def fail_at_row(path: Path, request_id: str) -> None:
    execute(
        path,
        f"CREATE TRIGGER full BEFORE INSERT ON requests WHEN NEW.request_id = '{request_id}'"
        " BEGIN SELECT RAISE(ABORT, 'disk full'); END",
    )


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


# -- what is written


def test_an_entry_comes_back_as_it_was(store: Store) -> None:
    waits, done = new_entry("live"), ended(new_entry("done", accepted_ms=2_000))
    waits.on_result(replace(CHUNK, request_id="live"), 4)
    write(store, 6, waits, done)
    for entry in (waits, done):
        found = store.get(entry.key)
        assert found is not None
        if entry.terminal is not None:
            assert found.lacks_outcome, "it is on the result topic"
            assert found.artifact_ids == entry.artifact_ids == {"a"}
            without = {"timings": None, "result": None, "result_omitted": True}
            assert found.to_json() == {**entry.to_json(), **without}
            found.hold_outcome(entry.terminal, entry.large, 0)
        assert found.to_json() == entry.to_json()
        assert found.passed_over == (not found.done), "its text is in the log"
        if not found.done:
            found.hold_text_of(entry.fold)
        assert [frame.to_json() for frame in found.opening(None)] == [f.to_json() for f in entry.opening(None)]
        assert (found.done, found.origin, found.accepted_ms) == (entry.done, entry.origin, entry.accepted_ms)
    assert live(store) == ["live"]
    assert store.get(("other", "live")) is None
    assert store.get(("default", "unknown")) is None
    assert store.offsets() == {RESULTS: 6}


def test_what_comes_later_replaces_what_was(store: Store) -> None:
    entry = new_entry()
    write(store, 1, entry)
    write(store, 2, ended(entry))
    found = store.get(entry.key)
    assert found is not None
    assert found.status_name == "completed"
    assert live(store) == []
    assert store.offsets() == {RESULTS: 2}


def test_tenants_do_not_share_rows(store: Store) -> None:
    ours, theirs = new_entry(tenant="a"), ended(new_entry(tenant="b"))
    write(store, 1, ours, theirs)
    assert live(store, "a") == ["r"]
    assert live(store, "b") == []
    for entry in (ours, theirs):
        assert [found.key for found in store.page(entry.tenant, limit=9, after=None, newest_first=True)] == [entry.key]


def test_offsets_of_other_partitions_stay(store: Store) -> None:
    write(store, 1)
    other: TP = ("results", 4)
    batch = Batch([], {other: 9}, threading.Event())
    store.submit(batch)
    assert batch.written.wait(10)
    assert store.offsets() == {RESULTS: 1, other: 9}


# -- ends of all kinds


def test_what_was_handed_over_is_written_at_the_end(path: Path) -> None:
    store = Store(path, "cluster")
    batches = [submit(store, at, new_entry(f"r{at}")) for at in range(20)]
    store.close()
    assert all(written.is_set() for written in batches)
    with closing(Store(path, "cluster")) as again:
        assert len(live(again)) == 20
        assert again.offsets() == {RESULTS: 19}


def test_a_crash_between_rows_and_offsets_leaves_neither(path: Path) -> None:
    store = Store(path, "cluster")
    write(store, 1, new_entry("before"))
    fail_at_offsets(path)
    written = submit(store, 2, new_entry("after"), ended(new_entry("before")))
    wait_until(lambda: store.failure, describe="the failure is told")
    with closing(Store(path, "cluster")) as beside:
        assert live(beside) == ["before"]
        assert beside.offsets() == {RESULTS: 1}
    store.close()
    assert not written.is_set()
    with closing(Store(path, "cluster")) as again:
        assert live(again) == ["before"]
        assert again.offsets() == {RESULTS: 1}


def test_whoever_opens_the_file_at_any_time_finds_rows_and_offsets_that_agree(path: Path, store: Store) -> None:
    """As a process that was killed leaves them: each batch n brings the row n and the offset n."""
    last = [submit(store, at, new_entry(f"{at:04}")) for at in range(200)][-1]
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        while not last.is_set():
            query = "SELECT (SELECT count(*) FROM requests), (SELECT max(offset) FROM offsets)"
            rows, offset = reader.execute(query).fetchone()
            assert rows == (0 if offset is None else offset + 1)
    with closing(Store(path, "cluster")) as again:
        assert len(live(again)) == 200
        assert again.offsets() == {RESULTS: 199}


def test_offsets_never_pass_rows_that_were_given_up_at_the_end(path: Path) -> None:
    store = Store(path, "cluster")
    fail_at_row(path, "lost")
    submit(store, 5, new_entry("lost"))
    wait_until(lambda: store.failure, describe="the failure is told")
    submit(store, 9, new_entry("behind"))
    store.close()
    with closing(Store(path, "cluster")) as again:
        assert again.offsets() == {}
        assert live(again) == []


# -- failures


def test_a_failure_is_told_and_mends(path: Path, store: Store) -> None:
    assert store.failure is None
    fail_at_offsets(path)
    written = submit(store, 1, new_entry())
    failure = wait_until(lambda: store.failure, describe="the failure is told")
    assert "disk full" in str(failure)
    assert not written.is_set()
    execute(path, "DROP TRIGGER full")
    assert written.wait(10)
    wait_until(lambda: store.failure is None, describe="the failure is over")
    assert live(store) == ["r"]
    assert store.offsets() == {RESULTS: 1}


def test_batches_wait_in_order_behind_one_that_fails(path: Path, store: Store) -> None:
    fail_at_row(path, "r0")
    submit(store, 0, new_entry("r0"))
    wait_until(lambda: store.failure, describe="the failure is told")
    assert not store.is_behind
    batches = [submit(store, at, new_entry(f"r{at}")) for at in range(1, MAX_WAITING + 1)]
    assert store.is_behind
    assert store.offsets() == {}, "a later batch passed the one that fails"
    execute(path, "DROP TRIGGER full")
    assert all(written.wait(10) for written in batches)
    assert not store.is_behind
    assert store.offsets() == {RESULTS: MAX_WAITING}
    assert len(live(store)) == MAX_WAITING + 1


def test_it_ends_though_it_cannot_write(path: Path) -> None:
    store = Store(path, "cluster")
    fail_at_offsets(path)
    batches = [submit(store, at, new_entry()) for at in range(3)]
    wait_until(lambda: store.failure, describe="the failure is told")
    store.close()
    assert "view-writer" not in [thread.name for thread in threading.enumerate()]
    assert not any(written.is_set() for written in batches)


# -- a file of something else


@pytest.mark.parametrize("identity", ["other", "cluster "])
def test_a_file_of_another_cluster_is_emptied(path: Path, identity: str) -> None:
    with closing(Store(path, "cluster")) as store:
        write(store, 1, new_entry())
    with closing(Store(path, identity)) as store:
        assert live(store) == []
        assert store.offsets() == {}
        write(store, 2, new_entry("new"))
    with closing(Store(path, identity)) as store:
        assert live(store) == ["new"]


def test_a_file_of_another_version_is_emptied(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Store(path, "cluster")) as store:
        write(store, 1, new_entry())
    monkeypatch.setattr(view_file, "VERSION", view_file.VERSION + 1)
    with closing(Store(path, "cluster")) as store:
        assert store.get(("default", "r")) is None
        assert store.offsets() == {}


def test_a_file_of_another_version_with_other_columns_is_made_anew(path: Path) -> None:
    path.parent.mkdir()
    columns = "tenant, request_id, accepted_ms, updated_ms, status, done, PRIMARY KEY (tenant, request_id)"
    script = f"""
        CREATE TABLE requests ({columns});
        CREATE TABLE offsets (topic, partition, offset, PRIMARY KEY (topic, partition));
        CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
        INSERT INTO meta VALUES ('identity', '0 cluster');
        INSERT INTO offsets VALUES ('results', 3, 7);
    """
    execute(path, script)
    with closing(Store(path, "cluster")) as store:
        assert store.offsets() == {}
        written = submit(store, 1, new_entry())
        wait_until(lambda: written.is_set() or store.failure, describe="it is written, or is not")
        assert store.failure is None
        assert live(store) == ["r"]


@pytest.mark.parametrize("content", [b"not a database at all " * 100, b"SQLite format 3\0" + b"\xff" * 4096])
def test_a_file_that_cannot_be_read_is_made_anew(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    with closing(Store(path, "cluster")) as store:
        assert live(store) == []
        assert store.offsets() == {}
        write(store, 1, new_entry())
    with closing(Store(path, "cluster")) as store:
        assert live(store) == ["r"]


# -- pruning


def test_prune_takes_what_was_not_touched_since(store: Store) -> None:
    entries = [new_entry(f"r{at:04}", updated_ms=at) for at in range(2_500)]
    write(store, 1, *entries)
    prune(store, 0)
    assert len(live(store)) == 2_500
    prune(store, 2_300)
    assert live(store) == [f"r{at:04}" for at in range(2_300, 2_500)]
    assert store.offsets() == {RESULTS: 1}, "what is forgotten has been read all the same"


def test_what_lives_is_deleted_by_its_key_unless_there_was_news(store: Store) -> None:
    waits, heard = new_entry("waits"), new_entry("heard")
    write(store, 1, waits, heard, ended(new_entry("done")))
    assert not store.prune(2_000)
    assert store.get(("default", "done")) is None
    silent = store.silent_live(2_000)
    assert sorted(ids(silent)) == ["heard", "waits"]
    heard.updated_ms = 3_000
    write(store, 2, heard)
    store.delete([entry.key for entry in silent], 2_000)
    assert live(store) == ["heard"]


@pytest.mark.parametrize(
    "ask",
    [
        lambda store: store.live_turns("default", "c"),
        lambda store: store.live_of_tenant("default", ("", 0, ""), 10),
        lambda store: store.overdue((0, "", ""), 1 << 62, 10),
        lambda store: store.silent_live(1 << 62),
        lambda store: list(store.live_counts()),
    ],
)
def test_what_has_ended_costs_questions_about_what_lives_nothing(store: Store, ask: Callable[[Store], Any]) -> None:
    """An index of those that live was left aside by SQLite once: each turn of a conversation walked over all rows."""
    write(store, 1, *(ended(new_entry(f"c{at}")) for at in range(300)), new_entry("c-live"))
    steps = 0

    def step() -> int:
        nonlocal steps
        steps += 1
        return 0

    for connection in (store._reader, store._page_connection()):
        connection.set_progress_handler(step, 10)
    assert ask(store)
    assert steps < 30, "ten instructions of SQLite each"


def test_what_had_to_end_is_found_part_by_part(store: Store) -> None:
    """However many are due at one moment."""
    entries = [new_entry(f"r{at}", accepted_ms=1_000 if at < 7 else 2_000 + at) for at in range(10)]
    write(store, 1, *entries, ended(new_entry("done")))
    due_ms = entries[0].must_end_ms
    found, after = list[str](), (0, "", "")
    while part := store.overdue(after, due_ms + 1_008, 3):
        found += [request_id for _, _, request_id in part]
        after = part[-1]
    assert found == [f"r{at}" for at in range(8)]


def test_prune_and_the_writer_take_turns(store: Store) -> None:
    write(store, 0, *(new_entry(f"old{at}", updated_ms=1) for at in range(3_000)))
    batches = [submit(store, at, new_entry(f"new{at}", updated_ms=9)) for at in range(1, 20)]
    prune(store, 5)
    assert all(written.wait(10) for written in batches)
    assert store.failure is None
    assert len(live(store)) == 19


# -- pages


def test_pages_in_both_orders(store: Store) -> None:
    """By the time of acceptance, those of one time by id; nothing is skipped or told twice."""
    entries = [new_entry(f"r{at}", accepted_ms=1_000 + at // 3) for at in range(10)]
    write(store, 1, *reversed(entries), new_entry("r3", tenant="other", accepted_ms=1_001))
    in_order = [f"r{at}" for at in range(10)]
    for newest_first, expected in ((False, in_order), (True, in_order[::-1])):
        for limit in (1, 3, 4, 10, 11):
            found: list[str] = []
            after: str | None = None
            while page := ids(store.page("default", limit=limit, after=after, newest_first=newest_first)):
                assert len(page) <= limit
                found += page
                after = page[-1]
            assert found == expected


def test_a_page_goes_on_though_new_ones_came(store: Store) -> None:
    write(store, 1, *(new_entry(f"r{at}", accepted_ms=at) for at in range(4)))
    assert ids(store.page("default", limit=2, after=None, newest_first=True)) == ["r3", "r2"]
    write(store, 2, new_entry("r9", accepted_ms=9))
    assert ids(store.page("default", limit=2, after="r2", newest_first=True)) == ["r1", "r0"]
    assert ids(store.page("default", limit=2, after="r3", newest_first=False)) == ["r9"]


def test_behind_what_nobody_knows_there_is_no_page(store: Store) -> None:
    write(store, 1, new_entry("a"), new_entry("b", tenant="other"))
    for after in ("unknown", "b"):
        assert store.page("default", limit=9, after=after, newest_first=True) is None


def test_pages_of_a_status_and_of_a_conversation(store: Store) -> None:
    entries = [new_entry(name, accepted_ms=at) for at, name in enumerate(("a", "c1", "b", "c2", "c3"))]
    for entry in (entries[0], entries[1], entries[3]):
        ended(entry)
    write(store, 1, *entries)
    page = {"limit": 9, "after": None, "newest_first": False}
    both = RequestFilter(status="completed", conversation_id="c")
    assert ids(store.page("default", **page, where=RequestFilter(status="completed"))) == ["a", "c1", "c2"]
    assert ids(store.page("default", **page, where=RequestFilter(status="accepted"))) == ["b", "c3"]
    assert ids(store.page("default", **page, where=RequestFilter(conversation_id="c"))) == ["c1", "c2", "c3"]
    assert ids(store.page("default", **page, where=both)) == ["c1", "c2"]
    assert ids(store.page("default", **page | {"after": "c1"}, where=both)) == ["c2"]
    assert store.page("other", **page, where=RequestFilter(conversation_id="c")) == []


FILTERS: list[tuple[dict[str, str], list[str]]] = [
    ({"user_id": "u"}, ["a", "b"]),
    ({"session_id": "s"}, ["b"]),
    ({"correlation_id": "k"}, ["a", "c"]),
    ({"correlation_id": "k", "user_id": "u", "status": "accepted"}, ["a"]),
    ({"conversation_id": "c", "task": "text_generation"}, ["c"]),
    ({"task": "embedding"}, ["d"]),
    ({"task": "embedding", "status": "completed"}, []),
    ({"model": "m"}, ["b", "d"]),
    ({"klass": "low"}, ["c", "d"]),
    ({"klass": "low", "model": "m"}, ["d"]),
    ({"klass": "high"}, []),
]


@pytest.mark.parametrize(("where", "found"), FILTERS)
def test_each_filter_alone_and_with_others(store: Store, where: dict[str, str], found: list[str]) -> None:
    """The file and `matches` choose the same, and what is read of the file is what is on the page."""
    asked: list[dict[str, Any]] = [
        {"request_id": "a", "user_id": "u", "metadata": {"correlation_id": "k"}},
        {"request_id": "b", "user_id": "u", "session_id": "s", "model": "m"},
        {"request_id": "c", "conversation_id": "c", "priority": 9, "metadata": {"correlation_id": "k"}},
        {"request_id": "d", "task": "embedding", "model": "m", "priority": 8, "user_id": "v"},
    ]
    entries: list[Entry] = []
    for at, fields in enumerate(asked):
        entry = Entry("default", fields["request_id"], 3)
        entry.on_request(
            InferenceRequest(**{"task": "text_generation", "created_at": 1, **fields}),
            replace(ORIGIN, append_time_ms=at),
        )
        entries.append(entry)
    write(store, 1, *entries, new_entry("x", tenant="other"))
    chosen = RequestFilter(**where)
    assert ids(store.page("default", limit=9, after=None, newest_first=False, where=chosen)) == found
    assert [entry.request_id for entry in entries if chosen.matches(entry)] == found
    behind = ids(store.page("default", limit=9, after="a", newest_first=False, where=chosen))
    assert behind == [one for one in found if one != "a"]


def test_labels_are_there_again_after_a_restart(path: Path) -> None:
    entry = new_entry()
    entry.labels = Labels("u", None, "k")
    first = Store(path, "cluster")
    write(first, 1, entry)
    first.close()
    second = Store(path, "cluster")
    again = second.get(entry.key)
    second.close()
    assert again is not None
    assert again.labels == entry.labels
    assert {name: again.to_json()[name] for name in Labels._fields} == {
        "user_id": "u",
        "session_id": None,
        "correlation_id": "k",
    }


def test_the_erased_are_known_and_not_listed(store: Store) -> None:
    entries = [new_entry(f"r{at}", accepted_ms=at) for at in range(3)]
    entries[1].erased = True
    write(store, 1, *entries)
    assert ids(store.page("default", limit=9, after=None, newest_first=False)) == ["r0", "r2"]
    assert ids(store.page("default", limit=9, after="r1", newest_first=False)) == ["r2"], "a cursor at it still holds"
    found = store.get(("default", "r1"))
    assert found is not None
    assert found.erased


@pytest.mark.parametrize(
    ("filters", "index"),
    [
        ({}, "COVERING INDEX by_time"),
        ({"task": "embedding", "klass": "low", "model": "m"}, "COVERING INDEX by_time"),
        ({"status": "completed"}, "COVERING INDEX by_status"),
        ({"status": "completed", "task": "embedding"}, "COVERING INDEX by_status"),
        ({"conversation_id": "c"}, "INDEX by_conversation"),
        ({"status": "completed", "conversation_id": "c"}, "INDEX by_both"),
        ({"user_id": "u", "status": "completed"}, "INDEX by_user"),
        ({"session_id": "s", "user_id": "u"}, "INDEX by_session"),
        ({"correlation_id": "k", "conversation_id": "c"}, "INDEX by_correlation"),
    ],
)
@pytest.mark.parametrize("newest_first", [True, False])
@pytest.mark.parametrize("after", [None, "r"])
def test_a_page_reads_its_own_rows_alone(
    store: Store, monkeypatch: pytest.MonkeyPatch, filters: Any, index: str, newest_first: bool, after: str | None
) -> None:
    """By an index that has the filter and the order; what many share is looked for in the index alone."""
    write(store, 1, new_entry("r"))
    asked: list[str] = []
    store.page("default", limit=9, after=None, newest_first=True)
    connection = store._page_connection()
    connection.set_trace_callback(asked.append)
    store.page("default", limit=9, after=after, newest_first=newest_first, where=RequestFilter(**filters))
    connection.set_trace_callback(None)
    steps = list(connection.execute(f"EXPLAIN QUERY PLAN {asked[-1]}"))
    plan = " ".join(str(row[3]) for row in steps if row[1])  # the rest reads and sorts what is on the page
    assert f"USING {index} (" in plan
    assert "TEMP B-TREE" not in plan
    assert after is None or "(accepted_ms,request_id)" in plan or "accepted_ms" in plan.split(index)[1]


def test_a_file_that_cannot_be_opened_now_is_not_thrown_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full passes; the rows are still good then."""
    with closing(Store(path, "cluster")) as store:
        write(store, 1, new_entry("kept"))

    def full(*_: object, **__: object) -> None:
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL  # pyright: ignore[reportAttributeAccessIssue]
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(log_copies, "connect", full)
        with pytest.raises(Overloaded, match="full"):
            Store(path, "cluster")
    with closing(Store(path, "cluster")) as store:
        assert live(store) == ["kept"]


def test_facts_that_were_taken_away_stand_nowhere_in_the_files(path: Path) -> None:
    """The write-ahead log had them until it was full, four megabytes later; also where somebody reads meanwhile."""
    store = Store(path, "p")
    try:
        store.submit(Batch([], {}, threading.Event(), {"c": b"the secret title"}))
        wait_until(lambda: store.facts_of(["c"]), 10, "they are written")
        assert b"the secret title" in b"".join(one.read_bytes() for one in path.parent.iterdir())
        with closing(log_copies.connect(path)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM conversations").fetchall()
            gone = Batch([], {}, threading.Event(), {"c": None})
            store.submit(gone)
            assert gone.written.wait(5), "nobody waits for a reader"
        store.submit(last := Batch([], {RESULTS: 1}, threading.Event()))
        assert last.written.wait(5)
        wait_until(
            lambda: b"the secret title" not in b"".join(one.read_bytes() for one in path.parent.iterdir()),
            10,
            "it is gone",
        )
    finally:
        store.close()
