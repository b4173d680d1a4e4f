"""Which model a request without a name gets, and what it is told of the choice."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.schemas.choosing import Candidate, Choice, choose

DRAINING = "none is ready; it is still loaded"
STATES = ("ready", "draining", "loading", "unloading", "absent", "failed")


def candidates(*facts: dict[str, Any]) -> list[Candidate]:
    return [Candidate(model="abc"[n], order=n, **{"state": "ready", **fact}) for n, fact in enumerate(facts)]


@pytest.mark.parametrize(
    ("facts", "model", "reason"),
    [
        ([{}], "a", "it is the only model for the task"),
        ([{}, {}], "a", "it is ready; first in the configuration"),
        ([{"state": "absent"}, {}], "b", "it is ready"),
        ([{"state": "absent", "priority": 0}, {"state": "loading"}], "b", "none is ready; it is loading"),
        ([{}, {"priority": 1}], "b", "it is ready; best priority"),
        ([{"queued": 9}, {"queued": 3}], "b", "it is ready; shortest queue"),
        ([{"queued": 60, "slots": 64}, {"queued": 4, "slots": 2}], "a", "it is ready; shortest queue"),
        ([{"state": "absent", "load_s": 9}, {"state": "absent", "load_s": 2}], "b", "none is loaded; fastest to load"),
        ([{"state": "absent"}, {"state": "absent", "load_s": 2}], "b", "none is loaded; fastest to load"),
        ([{"load_s": 9}, {"load_s": 2}], "a", "it is ready; first in the configuration"),
        ([{"state": "draining", "load_s": 9}, {"state": "draining"}], "a", f"{DRAINING}; first in the configuration"),
        ([{"state": "failed"}, {"state": "absent"}], "b", "none is loaded"),
        ([{"paused": True}, {"state": "absent"}], "b", "none is loaded"),
        ([{"paused": True}, {"paused": True}], "a", "all models for the task are paused"),
    ],
)
def test_the_choice(facts: list[dict[str, Any]], model: str, reason: str) -> None:
    assert choose(candidates(*facts)) == Choice(model, reason)


def test_nothing_to_choose_from() -> None:
    assert choose([]) is None


FACTS = {
    "state": st.sampled_from(STATES),
    "priority": st.integers(0, 3),
    "queued": st.integers(0, 5),
    "load_s": st.none() | st.floats(0, 100),
    "paused": st.booleans(),
}


@given(st.lists(st.fixed_dictionaries(FACTS), min_size=1, max_size=3))
def test_no_other_is_ready_with_a_better_priority(facts: list[dict[str, Any]]) -> None:
    given_ = candidates(*facts)
    choice = choose(given_)
    (best,) = [one for one in given_ if one.model == choice.model]
    assert choose(list(reversed(given_))) == choice, "the order of the question does not matter"
    usable = [one for one in given_ if not one.paused and one.state == "ready"]
    if usable:
        assert best in usable
        assert best.priority == min(one.priority for one in usable)
