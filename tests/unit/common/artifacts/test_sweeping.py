"""A sweep that is told to stop ends soon, however much the store has."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.common.artifacts import ArtifactStore
from penstock.common.artifacts.sweep import plan
from penstock.common.artifacts.sweeping import Stopped, Sweeper
from support import wait_until


@pytest.mark.parametrize("what", ["peek", "add"])
def test_a_sweeper_that_is_stopped_ends_with_the_calls_that_it_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    store = ArtifactStore(tmp_path)
    for _ in range(40):
        store.by_time.remove(store.put("acme", b"1"))
    sweeper, calls, let_go = Sweeper(store), list[Any](), threading.Event()
    holder: Any = store if what == "peek" else store.by_time
    real = getattr(holder, what)

    def slow(*args: Any) -> Any:
        calls.append(args)
        assert let_go.wait(30)
        return real(*args)

    monkeypatch.setattr(holder, what, slow)
    ended: list[BaseException] = []

    def index() -> None:
        try:
            sweeper.index()
        except Stopped as error:
            ended.append(error)

    thread = threading.Thread(target=index)
    thread.start()
    wait_until(lambda: calls, describe="it has begun")
    sweeper.stop()
    let_go.set()
    thread.join(30)
    assert not thread.is_alive()
    assert ended
    assert len(calls) < 20
    assert not store.by_time.is_complete()


def swept(store: ArtifactStore, hours: float) -> None:
    """A sweep so many hours from now."""
    sweeper = Sweeper(store, lambda: time.time() + hours * 3_600)
    listing, facts = sweeper.look()
    sweeper.apply(plan(listing, facts, sweeper.now_ms(), named={}))


def test_what_a_killed_writer_left_of_batches_and_marks_goes_after_an_hour(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    of = store.put("acme", b"x").artifact_id
    store.holds.hold("acme", of, "trip")
    names = (
        f"acme/.batches/{uuid.uuid4()}/parts/00001.out#1",
        f".open_batches/acme/{uuid.uuid4()}#2",
        f"acme/.holds/trip/{of}#1",
        f"acme/{of}/held/trip#1",
    )
    others = ("acme/notes#1", "acme/.batches/b/notes#x", "acme/.batches/b/lease/1")
    for name in (*names, *others):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"an answer")
    swept(store, 0.9)
    assert all((tmp_path / name).exists() for name in (*names, *others))
    swept(store, 1.1)
    assert [name for name in names if (tmp_path / name).exists()] == []
    assert all((tmp_path / name).exists() for name in others)
    assert store.holds.of("acme", of) == ["trip"]


async def test_a_file_that_is_written_again_has_one_entry_in_the_list_of_files(tmp_path: Path) -> None:
    one, now_s = str(uuid.uuid4()), time.time()
    store = ArtifactStore(tmp_path, clock=lambda: now_s)

    async def pieces() -> AsyncIterator[bytes]:
        yield b"answers"

    for _ in range(2):
        now_s += 5
        kept = await store.put_stream("acme", pieces(), artifact_id=one, purpose="batch_output", filename="out.jsonl")
    store.files.add_id("acme", kept.created_at_ms, str(uuid.uuid4()))
    plain = store.put("acme", b"x")
    store.files.add(plain)  # it is no file
    folder = "acme/.files"
    assert len(store.places[None].names(folder)) == 4
    swept(store, 0.9)
    assert len(store.places[None].names(folder)) == 4
    swept(store, 1.1)
    assert [f"{folder}/{name}" for name in store.places[None].names(folder)] == [
        store.files.path("acme", kept.created_at_ms, one)
    ]
    assert [found.artifact_id for found in store.list_files("acme").artifacts] == [one]
    assert {found.artifact_id for found in store.list("acme").artifacts} == {one, plain.artifact_id}
