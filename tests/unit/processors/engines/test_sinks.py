"""A run ends exactly once, and a sink that raises ends the worker."""

import itertools
from unittest.mock import Mock

import pytest

from penstock.processors.engines.base import Delta, Finished, RunFailed
from penstock.processors.engines.sinks import GuardedSink
from penstock.schemas.errors import EngineFailed

DELTA = Delta(run_id="r", text="x", token_ids=[], first_token_index=0)
FINISHED = Finished(run_id="r", output={"text": "x"}, finish_reason="stop")
FAILED = RunFailed(run_id="r", error=EngineFailed("no"), retryable_here=True)


@pytest.mark.parametrize("events", itertools.product("df!", repeat=3))
def test_one_end(events: tuple[str, ...]) -> None:
    sink = Mock()
    guarded = GuardedSink("r", sink)
    for event in events:
        if event == "d":
            assert guarded.delta(DELTA) is not guarded.over
        elif event == "f":
            guarded.finished(FINISHED)
        else:
            guarded.failed(FAILED)
    ended = set(events) != {"d"}
    assert sink.on_finished.call_count + sink.on_failed.call_count == int(ended)
    assert guarded.over is ended


@pytest.mark.parametrize("event", [DELTA, FINISHED, FAILED])
async def test_a_sink_that_raises_is_a_fault_of_the_worker_and_not_of_the_request(
    event: Delta | Finished | RunFailed, faults: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    sink = Mock(
        **dict.fromkeys(("on_delta.side_effect", "on_finished.side_effect", "on_failed.side_effect"), ValueError)
    )
    guarded = GuardedSink("r", sink)
    if isinstance(event, Delta):
        assert not guarded.delta(event)
    elif isinstance(event, Finished):
        guarded.finished(event)
    else:
        guarded.failed(event)
    guarded.finished(FINISHED)
    told = {Delta: "on_delta", Finished: "on_finished", RunFailed: "on_failed"}[type(event)]
    assert [name for name, *_ in sink.mock_calls] == [told], (
        "nothing more is told of a run whose request the worker may hold wrongly"
    )
    assert guarded.over
    assert faults == ["fault"]
    assert "ValueError" in caplog.text


def test_a_closed_one_tells_nothing() -> None:
    sink = Mock()
    guarded = GuardedSink("r", sink)
    guarded.close()
    assert not guarded.delta(DELTA)
    guarded.finished(FINISHED)
    guarded.failed(FAILED)
    assert not sink.mock_calls
