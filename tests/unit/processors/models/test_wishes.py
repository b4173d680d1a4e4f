"""Wishes over the configured models: who is told what, whatever stands on the topic."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from penstock.common.model_entry import parse_entry
from penstock.processors.kafka.desired import Wished
from penstock.processors.models.catalog import ModelConfig
from penstock.processors.models.wishes import WishedModels
from penstock.schemas.desired import key_of
from penstock.schemas.records import DesiredState


class Told:
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.models: list[str] = []
        self.priorities: dict[str, int] = {}
        self.orders: list[tuple[Any, ...]] = []

    def configure(self, models: Sequence[ModelConfig]) -> None:
        self.models = [model.id for model in models]
        self.priorities = {model.id: model.priority for model in models}

    def desire(self, model: str, loaded: bool | None, pinned: bool | None) -> None:
        self.orders.append((model, loaded, pinned))

    def pause(self, kind: str, name: str, paused: bool) -> None:
        self.orders.append((kind, name, paused))


def entry(name: str, **fields: Any) -> dict[str, Any]:
    return {"id": name, "source": "noop", "engine": "noop", **fields}


class Room:
    def __init__(self, *configured: str, pool: str | None = None) -> None:
        self.told = Told()
        self.wished = WishedModels([parse_entry(entry(name)) for name in configured], pool, self.told)
        self._now = 0

    def wish(self, name: str, *, kind: str = "model", **fields: Any) -> None:
        self._now += 1
        if isinstance(fields.get("entry"), dict):
            fields["entry"] = json.dumps(fields["entry"])
        wish = DesiredState(kind=kind, name=name, action="load", created_at=self._now, **fields)
        self.wished.on_wishes([Wished(key_of(wish), wish)])

    @property
    def served(self) -> list[str]:
        return [model.id for model in self.wished.models]


def test_a_model_is_loaded_pinned_and_paused() -> None:
    room = Room("a", "b")
    room.wish("a", loaded=True, pinned=True, paused=True)
    assert room.told.orders == [("model", "a", True), ("a", True, True)]
    assert room.told.models == [], "the models are as they were"


def test_a_tombstone_takes_a_wish_back() -> None:
    room = Room("a")
    room.wish("a", loaded=True, paused=True)
    room.wished.on_wishes([Wished("model/a", None), Wished("model/zzz", None)])
    assert room.told.orders[2:] == [("model", "a", False), ("a", None, None)]


def test_models_come_change_and_go() -> None:
    room = Room("a", "b")
    room.wish("c", entry=entry("c"), loaded=True)
    assert room.told.models == room.served == ["a", "b", "c"]
    assert room.told.orders == [("model", "c", False), ("c", True, None)]
    room.wish("a", removed=True)
    assert room.told.models == ["b", "c"]
    room.wish("b", entry=entry("b", priority=0))
    assert room.told.priorities == {"b": 0, "c": 5}
    room.wish("c", removed=True)
    assert room.told.models == ["b"]
    room.wish("a", entry=entry("a"))
    assert room.told.models == ["a", "b"], "a configured model keeps its place"


def test_other_pools_are_not_ours() -> None:
    room = Room("a", pool="p")
    room.wish("a", loaded=False)
    room.wish("b", entry=entry("b"), pool="q")
    assert (room.told.orders, room.served) == ([], ["a"])
    room.wish("b", entry=entry("b"), pool="p")
    assert room.served == ["a", "b"]


def test_classes_are_paused() -> None:
    room = Room("a")
    room.wish("low", kind="class", paused=True)
    room.wish("lowest", kind="class", paused=True)
    room.wish("x", kind="UNKNOWN", paused=True)
    room.wished.on_wishes([Wished("class/low", None)])
    assert room.told.orders == [("class", "low", True), ("class", "low", False)]


def test_entries_that_cannot_be_served_are_passed_over() -> None:
    room = Room("a")
    for odd in ("no json", "[]", "{}", json.dumps(entry("b", engine="steam")), json.dumps(entry("b", aliases=["a"]))):
        room.wish("b", entry=odd, loaded=True)
        assert room.served == ["a"]
    assert room.told.orders == [], "of a model that is not served nothing is wanted"
    room.wish("b", entry=entry("other name", pool="p"))
    assert room.served == ["a", "b"], "the record's own name and pool count"
