"""What orders make of a wish: each changes its part, and the record holds the whole."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.schemas.desired import desired_key, key_of, ordered
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.records import DesiredState


def after(*actions: str, wish: DesiredState | None = None) -> DesiredState:
    for at, action in enumerate(actions):
        entry = '{"id": "m"}' if action == "add" else None
        wish = ordered(wish, kind="model", name="m", pool=None, action=action, now_ms=at, entry=entry, by="op")
    assert wish is not None
    return wish


def test_orders_are_merged() -> None:
    wish = after("load", "pin", "pause", "unload", "resume", "pause")
    assert (wish.loaded, wish.pinned, wish.paused, wish.removed) == (False, True, True, False)
    assert (wish.action, wish.created_at, wish.created_by) == ("pause", 5, "op")


def test_what_was_wished_of_a_removed_model_is_gone() -> None:
    gone = after("add", "load", "pin", "pause", "remove")
    assert (gone.removed, gone.entry, gone.loaded, gone.pinned, gone.paused) == (True, None, None, None, False)
    again = after("add", wish=gone)
    assert (again.removed, again.entry, again.pinned) == (False, '{"id": "m"}', None)


def test_a_class_is_paused_and_resumed() -> None:
    wish = ordered(None, kind="class", name="low", pool="p", action="pause", now_ms=1)
    assert wish.paused
    assert key_of(wish) == "class/low@p" == desired_key("class", "low", "p")
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
    with pytest.raises(InvalidRequest) as caught:
        ordered(None, **given)
    assert caught.value.param == param
