"""An outcome that another run may have given: readers can tell it from what was published under this attempt."""

from __future__ import annotations

from flow_driver import Finished, World
from penstock.processors.core import effects as ask


def test_an_answer_that_stands_after_a_claim_has_an_attempt_of_its_own() -> None:
    """A claim moves readers to this attempt, and leaves the words of an earlier run on their screens."""
    world = World()
    world.flow.registry.owned_since_ms = world.wall_ms + 1
    world.up()
    world.hold_answers.add(ask.Prepare)
    work = world.submit("r", stream=True, line="c")
    assert work is not None
    (prepare,) = [effect for effect in world.asked if isinstance(effect, ask.Prepare)]
    assert prepare.may_resume_stream, "it publishes a claim"
    world.flow.attempts.answer_stands(work.subject, prepare.run_id, Finished(), world.now, large=False)
    world.settle()
    (outcome,) = [effect for effect in world.seen if isinstance(effect, ask.Terminal)]
    assert (outcome.status, outcome.subject.attempt) == ("completed", 2)


def test_so_has_one_that_is_found_when_it_is_to_end() -> None:
    world = World()
    world.flow.registry.owned_since_ms = world.wall_ms + 1
    world.up()
    world.hold_answers |= {ask.Prepare, ask.CheckForAnswer}
    work = world.submit("r", stream=True, line="c")
    assert work is not None
    world.cancel("r")
    world.flow.durable.answer_checked(work.subject, Finished(), world.now)
    world.settle()
    (outcome,) = [effect for effect in world.seen if isinstance(effect, ask.Terminal)]
    assert (outcome.status, outcome.subject.attempt) == ("completed", 2)
