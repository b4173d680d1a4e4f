"""Desired state over the configured models: which models are served, what the flow hears, and what was observed."""

from __future__ import annotations

import json
from collections.abc import Set
from typing import Any
from unittest.mock import Mock

import pytest

from penstock.common.desired import DesiredRecord
from penstock.common.model_entry import parse_entry
from penstock.processors.models.desired_models import NO_UNLOAD, DesiredModels
from penstock.schemas.desired import key_of
from penstock.schemas.records import DesiredState


def entry(name: str, **fields: Any) -> dict[str, Any]:
    return {"id": name, "source": "noop", "engine": "noop", **fields}


class Topic:
    """Writes records, each with the next offset, and hands them to the desired models of a pool."""

    def __init__(self, *configured: str, pool: str | None = None) -> None:
        self.target = Mock()
        self.observed: list[int | None] = []
        self.desired = DesiredModels([parse_entry(entry(name)) for name in configured], pool, self.target)
        self.desired.on_observed = lambda: self.observed.append(self.desired.observed_revision)
        self._next = 0

    def order(self, name: str, action: str = "load", *, kind: str = "model", **fields: Any) -> None:
        if isinstance(fields.get("entry"), dict):
            fields["entry"] = json.dumps(fields["entry"])
        state = DesiredState(kind=kind, name=name, action=action, created_at=self._next + 1, **fields)
        self.record(key_of(state), state)

    def record(self, key: str, state: DesiredState | None) -> None:
        self._last = DesiredRecord(key, state, self._next)
        self._next += 1
        self.again()

    def again(self) -> None:
        """Hands over the newest record."""
        self.desired.on_records([self._last])

    def made_anew(self, topic_id: str) -> None:
        self.desired.on_topic(topic_id)
        self._next = 0

    def told(self, *names: str) -> list[tuple[Any, ...]]:
        """The arguments of these calls, in order."""
        return [args for name, args, _ in self.target.mock_calls if name in names]

    @property
    def calls(self) -> list[tuple[Any, ...]]:
        """Of `desire` without the revision, and of `pause`."""
        return [args[:3] for args in self.told("desire", "pause")]

    @property
    def unload_revisions(self) -> list[int]:
        return [args[3] for args in self.told("desire")]

    @property
    def models(self) -> list[str]:
        return [model.id for model in self.target.configure.call_args.args[0]]

    @property
    def removed(self) -> Set[str]:
        return self.target.configure.call_args.args[1]

    @property
    def served(self) -> list[str]:
        return [model.id for model in self.desired.models]


def test_a_model_is_loaded_pinned_and_paused_until_a_tombstone_takes_the_order_back() -> None:
    topic = Topic("a", "b")
    topic.order("a", loaded=True, pinned=True, paused=True)
    for name in ("a", "zzz"):
        topic.record(f"model/{name}", None)
    ordered, back = [("model", "a", True), ("a", True, True)], [("model", "a", False), ("a", None, None)]
    assert topic.calls == ordered + back
    assert not topic.target.configure.called, "the models are as they were"


def test_models_come_change_and_go() -> None:
    topic = Topic("a", "b")
    topic.order("c", entry=entry("c"), loaded=True)
    assert topic.models == topic.served == ["a", "b", "c"]
    assert topic.calls == [("model", "c", False), ("c", True, None)]
    topic.order("a", removed=True)
    assert topic.models == ["b", "c"]
    topic.order("b", entry=entry("b", priority=0))
    assert {model.id: model.priority for model in topic.desired.models} == {"b": 0, "c": 5}
    topic.order("c", removed=True)
    assert (topic.models, topic.removed) == (["b"], {"a", "c"})
    topic.order("of-another-file", removed=True)
    assert topic.removed == {"a", "c", "of-another-file"}
    topic.order("a", entry=entry("a"))
    assert topic.removed == {"c", "of-another-file"}
    assert topic.models == ["a", "b"], "a configured model keeps its place"


def test_a_removed_model_is_not_paused_any_more() -> None:
    topic = Topic("a")
    topic.order("a", "pause", paused=True)
    topic.order("a", "remove", removed=True)
    assert topic.calls[-1] == ("model", "a", False)
    before = list(topic.calls)
    topic.order("never-served", "remove", removed=True)
    assert topic.calls == before, "nothing is ordered of a model that was never served"


def test_an_added_model_is_preloaded_whether_its_entry_is_new_or_not() -> None:
    topic = Topic("a")
    for _ in range(2):
        topic.order("c", "add", entry=entry("c"))
    topic.order("c", "pause", entry=entry("c"), paused=True)
    topic.order("d", "add", entry="no json")
    assert topic.told("preload") == [("c",), ("c",)]


def test_other_pools_are_not_ours() -> None:
    topic = Topic("a", pool="p")
    topic.order("a", loaded=False)
    topic.order("b", entry=entry("b"), pool="q")
    assert (topic.calls, topic.served) == ([], ["a"])
    topic.order("b", entry=entry("b"), pool="p")
    assert topic.served == ["a", "b"]


def test_classes_are_paused() -> None:
    topic = Topic("a")
    topic.order("low", kind="class", paused=True)
    topic.order("lowest", kind="class", paused=True)
    topic.order("x", kind="UNKNOWN", paused=True)
    topic.record("class/low", None)
    assert topic.calls == [("class", "low", True), ("class", "low", False)]


def test_entries_that_cannot_be_served_are_passed_over() -> None:
    topic = Topic("a")
    for odd in ("no json", "[]", "{}", json.dumps(entry("b", engine="steam")), json.dumps(entry("b", aliases=["a"]))):
        topic.order("b", entry=odd, loaded=True)
        assert topic.served == ["a"]
    assert topic.calls == [], "nothing is ordered of a model that is not served"
    topic.order("b", entry=entry("other name", pool="p"))
    assert topic.served == ["a", "b"], "the record's own name and pool count"


# -- revisions


TO_A: dict[str, dict[str, Any]] = {
    "unload": {"loaded": False},
    "pause": {"loaded": False, "paused": True},
    "resume": {"loaded": False},
    "pin": {"loaded": False},
    "load": {"loaded": True},
}


@pytest.mark.parametrize(
    ("orders", "revisions"),
    [
        ("other unload pause resume unload", [NO_UNLOAD, 1, 1, 1, 4]),  # ordered once more, it is meant once more
        ("unload load pause", [0, NO_UNLOAD, 2]),
        ("unload tombstone pin", [0, NO_UNLOAD, 2]),
        ("other unload again", [NO_UNLOAD, 1, 1]),  # one record that comes twice
        ("other unload topic other unload", [NO_UNLOAD, 1, NO_UNLOAD, 3]),  # above all of the former topic
    ],
)
def test_the_revision_of_an_unload(orders: str, revisions: list[int]) -> None:
    topic = Topic("a", "other")
    topic.made_anew("one")
    for order in orders.split():
        if order == "tombstone":
            topic.record("model/a", None)
        elif order == "topic":
            topic.made_anew("two")
        elif order == "again":
            topic.again()
        else:
            topic.order("other" if order == "other" else "a", order, **TO_A.get(order, {}))
    assert topic.unload_revisions == revisions


def test_what_was_followed_is_observed_whatever_it_was() -> None:
    topic = Topic("a", pool="p")
    assert topic.desired.observed_revision is None
    topic.order("a", loaded=True, pool="p")
    topic.order("elsewhere", loaded=True, pool="q")
    topic.order("b", entry="no json", pool="p")
    topic.order("low", kind="class", paused=True, pool="p")
    topic.record("model/zzz", None)
    assert topic.observed == [0, 1, 2, 3, 4]


def test_a_revision_is_observed_when_its_order_has_been_carried_out() -> None:
    topic = Topic("a")
    seen: list[int | None] = []
    topic.target.desire.side_effect = lambda *_: seen.append(topic.desired.observed_revision)
    state = DesiredState(kind="model", name="a", action="load", created_at=1, loaded=True)
    topic.desired.on_records([DesiredRecord("model/a", state, 0), DesiredRecord("model/a", state, 1)])
    assert (seen, topic.desired.observed_revision) == ([None, 0], 1)


def test_the_topic_made_anew_is_observed_from_its_first_offset() -> None:
    topic = Topic("a")
    seen: list[tuple[str | None, int | None]] = []
    topic.desired.on_observed = lambda: seen.append((topic.desired.observed_topic_id, topic.desired.observed_revision))
    topic.made_anew("one")
    for _ in range(3):
        topic.order("a", loaded=True)
    topic.made_anew("two")
    topic.order("a", loaded=True)
    assert seen == [("one", None), ("one", 0), ("one", 1), ("one", 2), ("two", None), ("two", 0)]
