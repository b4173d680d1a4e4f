"""A run ends exactly once, whatever its sink does."""

import itertools

import pytest

from penstock.processors.engines.base import Delta, Finished, RunFailed
from penstock.processors.engines.sinks import GuardedSink
from penstock.schemas.errors import EngineFailed

DELTA = Delta(run_id="r", text="x", token_ids=[], first_token_index=0)
FINISHED = Finished(run_id="r", output={"text": "x"}, finish_reason="stop")
FAILED = RunFailed(run_id="r", error=EngineFailed("no"), retryable_here=True)


class Sink:
    """Raises at the events it is told to."""

    def __init__(self, raises: tuple[str, ...]) -> None:
        self.raises = raises
        self.told: list[str] = []
        self.ends: list[Finished | RunFailed] = []

    def _take(self, name: str) -> None:
        self.told.append(name)
        if name in self.raises:
            raise ValueError(name)

    def on_delta(self, delta: Delta) -> None:
        self._take("delta")

    def on_finished(self, finished: Finished) -> None:
        self._take("finished")
        self.ends.append(finished)

    def on_failed(self, failed: RunFailed) -> None:
        self._take("failed")
        self.ends.append(failed)


@pytest.mark.parametrize("raises", [(), ("delta",), ("finished",), ("delta", "finished")])
@pytest.mark.parametrize("events", itertools.product("df!", repeat=3))
def test_one_end(raises: tuple[str, ...], events: tuple[str, ...]) -> None:
    sink = Sink(raises)
    guarded = GuardedSink("r", sink)
    for event in events:
        if event == "d":
            assert guarded.delta(DELTA) is not guarded.over
        elif event == "f":
            guarded.finished(FINISHED)
        else:
            guarded.failed(FAILED)
    ended = set(events) != {"d"} or "delta" in raises
    assert len(sink.ends) == int(ended)
    assert guarded.over is ended


def test_a_sink_that_raises_at_every_event_is_left_alone() -> None:
    sink = Sink(("delta", "finished", "failed"))
    guarded = GuardedSink("r", sink)
    assert not guarded.delta(DELTA)
    guarded.finished(FINISHED)
    assert sink.told == ["delta", "failed"]


def test_a_closed_one_tells_nothing() -> None:
    sink = Sink(())
    guarded = GuardedSink("r", sink)
    guarded.close()
    assert not guarded.delta(DELTA)
    guarded.finished(FINISHED)
    guarded.failed(FAILED)
    assert not sink.told
