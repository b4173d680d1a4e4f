"""How orders change desired state: each changes its part, and the record holds the whole."""

from __future__ import annotations

from typing import Any

import pytest

from kit.refusals import refused
from penstock.schemas.desired import desired_key, key_of, ordered
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.records import DesiredState


def after(*actions: str, state: DesiredState | None = None) -> DesiredState:
    for at, action in enumerate(actions):
        entry = '{"id": "m"}' if action == "add" else None
        state = ordered(state, kind="model", name="m", pool=None, action=action, now_ms=at, entry=entry, by="op")
    assert state is not None
    return state


def test_orders_are_merged() -> None:
    state = after("load", "pin", "pause", "unload", "resume", "pause")
    assert (state.loaded, state.pinned, state.paused, state.removed) == (False, True, True, False)
    assert (state.action, state.created_at, state.created_by) == ("pause", 5, "op")


def test_what_was_ordered_of_a_removed_model_is_gone() -> None:
    gone = after("add", "load", "pin", "pause", "remove")
    assert (gone.removed, gone.entry, gone.loaded, gone.pinned, gone.paused) == (True, None, None, None, False)
    again = after("add", state=gone)
    assert (again.removed, again.entry, again.pinned) == (False, '{"id": "m"}', None)


@pytest.mark.parametrize("action", ["pin", "add"])
def test_an_unload_ends_when_the_model_is_to_be_kept_or_served(action: str) -> None:
    """A pinned model that is to be unloaded too would be unloaded and loaded in turns."""
    assert after("unload", action).loaded is None
    assert after("load", action).loaded is True
    assert after("unload", "unpin").loaded is False


def test_a_class_is_paused_and_resumed() -> None:
    state = ordered(None, kind="class", name="low", pool="p", action="pause", now_ms=1)
    assert state.paused
    assert key_of(state) == "class/low@p" == desired_key("class", "low", "p")
    assert desired_key("model", "a/b", None) == "model/a/b"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"action": "paint"}, "action"),
        ({"kind": "class", "name": "low", "action": "load"}, "action"),
        ({"kind": "class", "name": "lowest", "action": "pause"}, "class"),
        ({"kind": "planet", "action": "pause"}, "action"),
        ({"action": "add"}, "entry"),
        ({"action": "load", "entry": "{}"}, "entry"),
    ],
)
def test_orders_that_there_are_not(fields: dict[str, Any], param: str) -> None:
    given: dict[str, Any] = {"kind": "model", "name": "m", "pool": None, "now_ms": 1, **fields}
    with refused(InvalidRequest, param=param):
        ordered(None, **given)
