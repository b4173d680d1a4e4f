"""A run ends exactly once, and a sink that raises ends the worker."""

import asyncio
import itertools

import pytest

from penstock.common.background import on_faults
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


@pytest.fixture
async def faults() -> list[str]:
    told: list[str] = []
    on_faults(asyncio.get_running_loop(), lambda: told.append("fault"))
    return told


@pytest.mark.parametrize("events", itertools.product("df!", repeat=3))
def test_one_end(events: tuple[str, ...]) -> None:
    sink = Sink(())
    guarded = GuardedSink("r", sink)
    for event in events:
        if event == "d":
            assert guarded.delta(DELTA) is not guarded.over
        elif event == "f":
            guarded.finished(FINISHED)
        else:
            guarded.failed(FAILED)
    ended = set(events) != {"d"}
    assert len(sink.ends) == int(ended)
    assert guarded.over is ended


@pytest.mark.parametrize("event", ["delta", "finished", "failed"])
async def test_a_sink_that_raises_is_a_fault_of_the_worker_and_not_of_the_request(
    event: str, faults: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    sink = Sink((event,))
    guarded = GuardedSink("r", sink)
    if event == "delta":
        assert not guarded.delta(DELTA)
    elif event == "finished":
        guarded.finished(FINISHED)
    else:
        guarded.failed(FAILED)
    guarded.finished(FINISHED)
    assert sink.told == [event], "nothing more is told of a run whose request the worker may hold wrongly"
    assert guarded.over
    assert faults == ["fault"]
    assert "ValueError" in caplog.text


def test_a_closed_one_tells_nothing() -> None:
    sink = Sink(())
    guarded = GuardedSink("r", sink)
    guarded.close()
    assert not guarded.delta(DELTA)
    guarded.finished(FINISHED)
    guarded.failed(FAILED)
    assert not sink.told
