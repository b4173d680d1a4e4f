"""What became durable of a request that ends: its outcome says it."""

from __future__ import annotations

import pytest

from flow_driver import World, ready
from penstock.processors.core import effects as ask
from penstock.processors.core.work.work import Work


def storing(*, stream: bool = True) -> tuple[World, Work, ask.StoreOutput]:
    """A request that has run, whose large output is on its way to the store."""
    world = ready()
    world.hold_answers = {ask.StoreOutput}
    work = world.submit("r", stream=stream)
    world.finish("r", large=True, output_bytes=1 << 20)
    (asked,) = world.asked
    return world, work, asked


@pytest.mark.parametrize(("left", "held"), [(None, 1 << 20), (7, 7)])
def test_an_outcome_is_of_what_the_store_holds(left: int | None, held: int) -> None:
    world, work, asked = storing()
    world.flow.durable.stored(asked.subject, "as stored", "an artifact", world.now, output_bytes=left)
    assert (work.outcome.status, work.outcome.finished, work.outcome.artifact) == (
        "completed",
        "as stored",
        "an artifact",
    )
    assert work.output_bytes == held
    assert work.outcome.subject.attempt == 1


@pytest.mark.parametrize("stream", [True, False])
def test_readers_of_a_stream_tell_an_earlier_answer_from_what_this_run_said(*, stream: bool) -> None:
    world, work, asked = storing(stream=stream)
    world.flow.durable.stored(asked.subject, "another run's", None, world.now, another=True)
    assert work.outcome.subject.attempt == (2 if stream else 1)
