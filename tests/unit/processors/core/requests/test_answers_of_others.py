"""An outcome that another run may have given: readers can tell it from what was published under this attempt."""

from __future__ import annotations

import pytest

from flow_driver import Finished, World
from penstock.processors.core import effects as ask


@pytest.mark.parametrize("found", ["as it is prepared", "as it is to end"])
def test_an_answer_that_stands_after_a_claim_has_an_attempt_of_its_own(found: str) -> None:
    """A claim moves readers to this attempt, and leaves the words of an earlier run on their screens."""
    world = World()
    world.flow.registry.owned_since_ms = world.wall_ms + 1
    world.up()
    world.hold_answers |= {ask.Prepare, ask.CheckForAnswer}
    work = world.submit("r", stream=True, conversation="c")
    (prepare,) = world.held(ask.Prepare)
    assert prepare.may_resume_stream, "it publishes a claim"
    if found == "as it is prepared":
        world.flow.attempts.answer_stands(work.subject, prepare.run_id, Finished(), world.now, large=False)
        world.settle()
    else:
        world.cancel("r")
        world.answer_checked(work, Finished())
    (outcome,) = world.effects(ask.Terminal)
    assert (outcome.status, outcome.subject.attempt) == ("completed", 2)
