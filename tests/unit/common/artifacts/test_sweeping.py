"""A sweep that is told to stop ends soon, however much the store has."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.common.artifacts import ArtifactStore
from penstock.common.artifacts.sweeping import Stopped, Sweeper
from support import wait_until


@pytest.mark.parametrize("what", ["peek", "add"])
def test_a_sweeper_that_is_stopped_ends_with_the_calls_that_it_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A gateway that was told to stop read the facts of all artifacts first."""
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
