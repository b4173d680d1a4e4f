"""The file of the shared topic agrees with the log, whether it is read at once, in parts or compacted."""

from __future__ import annotations

import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.examples import examples
from penstock.common.reader import RawMessage
from penstock.common.shards.addresses import address_of, first_offset, id_of, is_shared, split_key
from penstock.common.shards.shard_file import ShardFile
from penstock.schemas.errors import Overloaded
from penstock.schemas.topics import TopicNames

FAR_MS = 1 << 40
TOPIC_ID = "AA+A/AAAAAAAAAAAAAAA/1"


@contextmanager
def opened(path: Path, topic_id: str = TOPIC_ID) -> Iterator[ShardFile]:
    file = ShardFile(path, topic_id, 2)
    try:
        yield file
    finally:
        file.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[ShardFile]:
    with opened(tmp_path / "f") as made:
        yield made


def record(offset: int, key: str, text: str | None, at_ms: int = 9) -> RawMessage:
    return RawMessage("t", 0, offset, at_ms, key.encode(), None if text is None else text.encode())


def log_of(*records: tuple[str, str | None]) -> list[RawMessage]:
    """Of one partition, each as `conversation/key` and its text."""
    return [record(offset, key, text, 1_000 + offset) for offset, (key, text) in enumerate(records)]


def feed(file: ShardFile, log: Sequence[RawMessage]) -> None:
    file.apply(log, {0: log[-1].offset + 1} if log else {}, 5)


def started(target: Callable[[], None], count: int) -> list[threading.Thread]:
    threads = [threading.Thread(target=target) for _ in range(count)]
    for one in threads:
        one.start()
    return threads


def contents(file: ShardFile, conversation: str) -> tuple[int, list[tuple[int, bytes, bytes | None]]] | None:
    span = file.span(conversation)
    if span is None:
        return None
    return span.head, [(offset, key, value) for offset, _, key, value in file.records(conversation, span.head)]


def test_a_conversation_is_found_among_others_and_ends_with_its_head(file: ShardFile) -> None:
    others = (("t.c/fork/3", "x"), ("d/q", "y"))
    feed(file, log_of(("c/fork/1", "head"), ("d/fork/2", "other"), ("c/q", "question"), *others))
    assert contents(file, "c") == (0, [(0, b"fork/1", b"head"), (2, b"q", b"question")])
    assert (file.ids("default"), file.ids("t"), len(file.everyone())) == (["c", "d"], ["c"], 3)
    feed(file, [record(5, "c/q", None), record(6, "c/fork/1", None)])
    assert contents(file, "c") is None
    assert file.records("c", 0) == []
    feed(file, [record(7, "c/late", "came after the end")])
    assert file.records("c", 0) == []
    feed(file, [record(8, "c/fork/9", "anew")])
    assert contents(file, "c") == (8, [(8, b"fork/9", b"anew")])


def test_strays_are_listed_until_they_are_erased(file: ShardFile) -> None:
    feed(file, log_of(("c/fork/1", "head"), ("c/q", "cut off"), ("c/r", "erased"), ("c/r", None)))
    assert file.strays(5_000, 10) == []
    feed(file, [record(4, "c/fork/1", None, 5_000), record(5, "c/s", "late", 6_000)])
    assert file.strays(6_000, 10) == [(0, b"c/q")]
    assert file.strays(6_001, 10) == [(0, b"c/q"), (0, b"c/s")]
    assert len(file.strays(6_001, 1)) == 1
    feed(file, [record(6, "c/fork/2", "anew", 9_000), record(7, "c/q", "again", 9_000)])
    assert file.strays(9_001, 10) == [(0, b"c/s")], "the later record takes the place of the first"
    feed(file, [record(8, "c/s", None, 9_000)])
    assert file.strays(9_001, 10) == []


def test_erased_text_is_in_no_file(tmp_path: Path) -> None:
    with opened(tmp_path / "f") as file:
        texts = [f"secret-{number}" * 200 for number in range(50)]
        feed(file, log_of(("c/fork/1", "head"), *((f"c/{number}", text) for number, text in enumerate(texts))))
        assert any(b"secret-7" in path.read_bytes() for path in tmp_path.iterdir())
        feed(file, [record(100 + number, f"c/{number}", None) for number in range(50)])
        assert not any(b"secret" in path.read_bytes() for path in tmp_path.iterdir())


def test_positions_are_written_with_the_records_and_forgotten_with_them(tmp_path: Path) -> None:
    with opened(tmp_path / "f") as file:
        feed(file, log_of(("c/fork/1", "head")))
    with opened(tmp_path / "f") as file:
        assert [(one, stand.offset, stand.followed_ms) for one, stand in file.positions().items()] == [(0, 1, 5)]
        assert file.span("c") is not None
        file.forget(0)
        assert (file.positions(), file.span("c"), file.records("c", 0)) == ({}, None, [])
    with opened(tmp_path / "f") as file:
        feed(file, log_of(("c/fork/1", "head")))
    with opened(tmp_path / "f", "another topic") as file:
        assert (file.positions(), file.span("c")) == ({}, None)


def test_a_batch_is_written_whole_or_not_at_all(file: ShardFile) -> None:
    broken = RawMessage("t", 0, 1, 9, b"c/q", object())  # type: ignore[arg-type]
    with pytest.raises(sqlite3.Error):
        file.apply([*log_of(("c/fork/1", "head")), broken], {0: 2}, 5)
    assert (file.positions(), file.span("c")) == ({}, None)


def test_a_conversation_is_not_taken_for_one_that_gets_its_number(file: ShardFile) -> None:
    """Heads of `c` have even offsets, those of `d` odd ones; each gets the number that the other had."""
    found: list[int | Exception] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            try:
                span = file.span("c")
            except Exception as error:
                found.append(error)
            else:
                found.extend([] if span is None or span.head % 2 == 0 else [span.head])

    readers = started(look, 3)
    for at in range(0, 600, 6):
        feed(file, [record(at, f"c/fork/{at}", "head")])
        feed(file, [record(at + 1, f"c/fork/{at}", None), record(at + 3, f"d/fork/{at}", "head")])
        feed(file, [record(at + 4, f"d/fork/{at}", None)])
    done.set()
    for one in readers:
        one.join()
    assert found == []


def test_it_is_closed_while_others_read(tmp_path: Path) -> None:
    with opened(tmp_path / "f") as file:
        feed(file, log_of(("c/fork/1", "head"), *((f"c/{number}", "text" * 500) for number in range(2_000))))
        reads = threading.Semaphore(0)
        ends: list[Exception] = []

        def read() -> None:
            try:
                while True:
                    assert len(file.records("c", 0)) == 2_001
                    reads.release()
            except Overloaded as error:
                ends.append(error)

        readers = started(read, 4)
        for _ in range(8):
            assert reads.acquire(timeout=20)
    for one in readers:
        one.join(20)
    assert len(ends) == 4
    with pytest.raises(Overloaded, match="closed"):
        file.span("c")


def left_on_disk(path: Path, text: bytes) -> list[str]:
    return [one.name for one in path.parent.glob(f"{path.name}*") if text in one.read_bytes()]


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Another connection reads the file as it is now."""
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM records").fetchall()
        yield


def test_text_erased_during_a_read_leaves_the_disk_with_the_next_write(tmp_path: Path) -> None:
    path = tmp_path / "f"
    with opened(path) as file:
        feed(file, log_of(("c/fork/1", "head"), ("c/q", "a secret")))
        with reading(path):
            feed(file, [record(2, "c/q", None)])
            assert left_on_disk(path, b"a secret"), "the other still reads what it began with"
        file.apply((), {0: 3}, 6)
        assert left_on_disk(path, b"a secret") == []


def test_a_process_that_was_killed_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    path, killed = tmp_path / "f", tmp_path / "g"
    with opened(path) as file:
        feed(file, log_of(("c/fork/1", "head"), ("c/q", "a secret")))
        with reading(path):
            feed(file, [record(2, "c/q", None)])
            for suffix in ("", "-wal"):  # what a kill leaves
                shutil.copy(f"{path}{suffix}", f"{killed}{suffix}")
    assert left_on_disk(killed, b"a secret")
    with opened(killed):
        assert left_on_disk(killed, b"a secret") == []


def test_a_read_that_sqlite_refuses_is_overload(tmp_path: Path) -> None:
    with opened(tmp_path / "f") as file:
        feed(file, log_of(("c/fork/1", "head")))
        with closing(sqlite3.connect(tmp_path / "f", isolation_level=None)) as other:
            other.execute("DROP TABLE heads")
        with pytest.raises(Overloaded, match="no such table"):
            file.span("c")


def test_an_unreadable_file_is_replaced_and_one_that_cannot_be_opened_is_left(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"no database" * 500)
    with opened(tmp_path / "f") as file:
        feed(file, log_of(("c/fork/1", "head")))
        assert file.span("c") is not None
    (tmp_path / "folder").mkdir()
    with pytest.raises(Overloaded, match="folder"):
        ShardFile(tmp_path / "folder", TOPIC_ID, 2)
    (tmp_path / "folder").rmdir()
    with opened(tmp_path / "folder") as file:  # whoever tries again in the same process
        assert file.everyone() == []


def test_addresses() -> None:
    names = TopicNames("p.")
    mine, theirs = address_of(names, "p.conversation.c", 8), address_of(names, "p.conversations.t.c", 8)
    assert (mine.key(b"r/in/0"), theirs.key(b"r/in/0")) == (b"c/r/in/0", b"t.c/r/in/0")
    assert split_key(theirs.key(b"fork/1")) == ("t.c", b"fork/1")
    assert [split_key(key) for key in (None, b"", b"c", b"/x", b"\xff/x", b"a b/fork/1", b"x.y.z/fork/1")] == [None] * 7
    with pytest.raises(ValueError, match="no conversation"):
        address_of(names, "p.inference.result", 8)
    assert (first_offset(id_of(TOPIC_ID, 7, 42)), first_offset(TOPIC_ID), first_offset(None)) == (42, 0, 0)
    assert (is_shared(id_of(TOPIC_ID, 0, 0)), is_shared(TOPIC_ID), is_shared(None)) == (True, False, False)
    assert len({id_of(TOPIC_ID, partition, head) for partition in range(12) for head in range(12)}) == 144


KEYS = st.sampled_from(
    [f"{conversation}/{key}" for conversation in ("a", "t.b") for key in ("fork/1", "fork/2", "x", "y")]
)
LOGS = st.lists(st.tuples(KEYS, st.one_of(st.none(), st.just("text"))), max_size=30)


def compacted(log: Sequence[RawMessage], upto: int) -> list[RawMessage]:
    """As Kafka may have it: below an offset the newest record of each key, without tombstones."""
    newest = {one.key: one.offset for one in log if one.offset < upto}
    return [one for one in log if one.offset >= upto or (newest[one.key] == one.offset and one.value is not None)]


@settings(max_examples=examples(50))
@given(LOGS, st.data())
def test_how_it_was_read_makes_no_difference(records: list[tuple[str, str | None]], data: st.DataObject) -> None:
    log = log_of(*records)
    cut = data.draw(st.integers(0, len(log)))
    with TemporaryDirectory() as folder, opened(Path(folder) / "1") as one, opened(Path(folder) / "2") as two:
        feed(one, log)
        feed(two, log[:cut])
        feed(two, log[cut:])
        for conversation in ("a", "t.b"):
            assert contents(one, conversation) == contents(two, conversation)
            span = one.span(conversation)
            heads = _live_heads(log, conversation)
            assert (None if span is None else span.head) == min(heads, default=None)
        assert one.strays(FAR_MS, 100) == two.strays(FAR_MS, 100)
        held = {conversation: one.live_keys(conversation) for conversation in ("a", "t.b")}
        standing = {key for key, text in dict(records).items() if text is not None}
        strays = {key.decode() for _, key in one.strays(FAR_MS, 100)}
        assert standing == strays | {f"{name}/{key.decode()}" for name, keys in held.items() for key in keys}


def _live_heads(log: Sequence[RawMessage], conversation: str) -> list[int]:
    live: dict[bytes, int] = {}
    for one in log:
        key = one.key or b""
        if key.startswith(f"{conversation}/fork/".encode()):
            if one.value is None:
                live.pop(key, None)
            else:
                live[key] = min(one.offset, live.get(key, one.offset))
    return list(live.values())


@settings(max_examples=examples(50))
@given(LOGS, st.data())
def test_a_compacted_log_says_the_same_of_what_lives(
    records: list[tuple[str, str | None]], data: st.DataObject
) -> None:
    written: set[str] = set()
    distinct = [(key, text) for key, text in records if text is None or not (key in written or written.add(key))]
    log = log_of(*distinct)
    with TemporaryDirectory() as folder, opened(Path(folder) / "1") as whole, opened(Path(folder) / "2") as less:
        feed(whole, log)
        feed(less, compacted(log, data.draw(st.integers(0, len(log)))))
        for conversation in ("a", "t.b"):
            assert _living(whole, conversation) == _living(less, conversation)
            # Of several heads the first may have gone: what stands behind it, before the next, is held in one alone.
            held = {key for _, key, _, _ in less.records(conversation, 0)}
            strays = [key.partition(b"/")[2] for _, key in less.strays(FAR_MS, 100)]
            assert not held & set(strays)
        assert set(whole.strays(FAR_MS, 100)) <= set(less.strays(FAR_MS, 100))


def _living(file: ShardFile, conversation: str) -> tuple[int, list[tuple[int, bytes]]] | None:
    found = contents(file, conversation)
    return found and (found[0], [(offset, key) for offset, key, value in found[1] if value is not None])
