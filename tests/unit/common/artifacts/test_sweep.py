"""What a sweep takes away, by what lies there, the time and known outcomes."""

from __future__ import annotations

import dataclasses
import uuid
from typing import Any

import pytest

from penstock.common.artifacts.by_time import path_of
from penstock.common.artifacts.facts import Artifact
from penstock.common.artifacts.sweep import GRACE_MS, MARKED_MS, Doomed, Key, Seen, in_question, listing_of, plan

NOW_MS = 100 * GRACE_MS
OLD_MS, YOUNG_MS = NOW_MS - GRACE_MS, NOW_MS - GRACE_MS + 1


def seen(path: str, modified_ms: int = OLD_MS, store: str | None = None) -> Seen:
    return Seen(store=store, path=path, size_bytes=10, modified_ms=modified_ms)


@dataclasses.dataclass
class Case:
    """One artifact of the tenant `acme`, and what a sweep makes of it."""

    facts: dict[str, Any] | None = None
    modified_ms: int = OLD_MS
    named: dict[str, set[str]] = dataclasses.field(default_factory=dict[str, "set[str]"])
    held_by: str | None = None
    conversations: set[Key] | None = None
    data: list[Seen] | None = None
    artifact_id: str = dataclasses.field(default_factory=lambda: str(uuid.uuid4()))

    def sweep(self) -> list[Doomed]:
        own = f"acme/{self.artifact_id}"
        objects = [seen(f"{own}/data", self.modified_ms)] if self.data is None else self.data
        facts: dict[Key, Artifact] = {}
        if self.facts is not None:
            objects.append(seen(f"{own}/about.json", self.modified_ms))
            facts["acme", self.artifact_id] = Artifact(
                artifact_id=self.artifact_id,
                tenant="acme",
                uri="u",
                media_type="t",
                size_bytes=10,
                sha256="s",
                **self.facts,
            )
        if self.held_by:
            objects += [
                seen(f"{own}/held/{self.held_by}", self.modified_ms),
                seen(f"acme/.holds/{self.held_by}/{self.artifact_id}", self.modified_ms),
            ]
        listing = listing_of(objects)
        named = {("acme", request): ids for request, ids in self.named.items()}
        assert set(named) <= in_question(listing, facts, NOW_MS) or self.modified_ms == YOUNG_MS
        return plan(listing, facts, NOW_MS, named=named, conversations=self.conversations).doomed


KEPT: dict[str, Case] = {
    "an upload": Case({}),
    "one whose time is not over": Case({"expires_at_ms": NOW_MS + 1}),
    "an expired one that a conversation holds": Case({"expires_at_ms": 1}, held_by="c", conversations={("acme", "c")}),
    "a held one while nobody knows the conversations": Case({"expires_at_ms": 1}, held_by="c"),
    "a held one of a conversation that begins": Case(
        {"expires_at_ms": 1}, modified_ms=YOUNG_MS, held_by="c", conversations=set()
    ),
    "an output whose outcome is not known": Case({"request_id": "r"}),
    "an output that is younger than an hour": Case({"request_id": "r"}, modified_ms=YOUNG_MS, named={"r": set()}),
    "what was made in a conversation": Case({"conversation_id": "c"}, conversations={("acme", "c")}),
    "what was made in a conversation, while nobody knows them": Case({"conversation_id": "c"}),
    "what is being made in a conversation that begins": Case(
        {"conversation_id": "c"}, modified_ms=YOUNG_MS, conversations=set()
    ),
    "what was made in a conversation that is gone, and another one holds": Case(
        {"conversation_id": "c"}, held_by="d", conversations={("acme", "d")}
    ),
    "bytes that are younger than an hour": Case(modified_ms=YOUNG_MS),
    "bytes that lie where the facts say": Case(
        {"prefix": "a/b", "store": "cold"}, artifact_id="5fb2c1f4-7a86-4a0e-9d3b-0f5a8f4f3d11",
        data=[seen("acme/a/b/5fb2c1f4-7a86-4a0e-9d3b-0f5a8f4f3d11/data", store="cold")],
    ),
}  # fmt: skip
TAKEN: dict[str, tuple[Case, str]] = {
    "an expired one": (Case({"expires_at_ms": NOW_MS}), "expired"),
    "an expired one, however young": (Case({"expires_at_ms": NOW_MS}, modified_ms=YOUNG_MS), "expired"),
    "one whose conversation is gone": (Case({"expires_at_ms": 1}, held_by="c", conversations={("b", "c")}), "expired"),
    "an output that the outcome does not name": (Case({"request_id": "r"}, named={"r": {"another"}}), "orphan"),
    "an output of an erased request": (Case({"request_id": "r"}, named={"r": set()}), "orphan"),
    "what was made in a conversation that is gone": (
        Case({"conversation_id": "c"}, held_by="c", conversations={("b", "c")}),
        "orphan",
    ),
    "bytes without facts": (Case(), "partial"),
    "marks without an artifact": (Case(data=[], held_by="c"), "partial"),
    "bytes that the facts do not name": (Case({"prefix": "a"}), "partial"),
}


@pytest.mark.parametrize("name", KEPT)
def test_it_leaves(name: str) -> None:
    assert KEPT[name].sweep() == []


@pytest.mark.parametrize("name", TAKEN)
def test_it_takes(name: str) -> None:
    case, reason = TAKEN[name]
    [doomed] = case.sweep()
    assert (doomed.tenant, doomed.artifact_id, doomed.reason) == ("acme", case.artifact_id, reason)
    assert doomed.size_bytes > 0


def test_an_output_that_its_outcome_names_stays() -> None:
    case = Case({"request_id": "r"})
    case.named = {"r": {case.artifact_id}}
    assert case.sweep() == []


def test_marks_of_a_conversation_that_is_no_more_are_released_after_an_hour() -> None:
    listing = listing_of([seen("acme/.holds/old/x"), seen("acme/.holds/new/x", YOUNG_MS), seen("acme/.holds/lives/x")])
    swept = plan(listing, {}, NOW_MS, named={}, conversations={("acme", "lives"), ("globex", "old")})
    assert swept.released == [("acme", "old")]
    assert plan(listing, {}, NOW_MS, named={}, conversations=None).released == []


def test_marks_of_requests_go_with_the_artifact_or_when_nobody_knows_the_request() -> None:
    there, gone = str(uuid.uuid4()), str(uuid.uuid4())
    facts = Artifact(artifact_id=there, tenant="acme", uri="u", media_type="t", size_bytes=10, sha256="s")

    def marks(artifact_id: str, request: str, modified_ms: int) -> list[Seen]:
        paths = f"acme/.inputs/{request}/{artifact_id}", f"acme/{artifact_id}/input/{request}"
        return [seen(path, modified_ms) for path in paths]

    now_ms = 2 * MARKED_MS
    forgotten, left = marks(there, "r1", now_ms - MARKED_MS), marks(gone, "r1", now_ms - GRACE_MS)
    staying = [*marks(there, "r2", now_ms - MARKED_MS + 1), *marks(gone, "r2", now_ms - GRACE_MS + 1)]
    own = [seen(f"acme/{there}/about.json"), seen(f"acme/{there}/data")]
    listing = listing_of([*forgotten, *left, *staying, *own])
    swept = plan(listing, {("acme", there): facts}, now_ms, named={})
    assert (swept.stale, swept.doomed) == ([*forgotten, *left], [])


def test_the_index_by_time_follows_the_facts() -> None:
    """What cannot be read may be in order: it stays."""
    ids = [str(uuid.uuid4()) for _ in range(4)]
    same, other, unread, gone = (
        Artifact(artifact_id=one, tenant="acme", uri="u", media_type="t", size_bytes=1, sha256="s", created_at_ms=5)
        for one in ids
    )
    entries = {one: seen(path_of(one)) for one in (same, unread, gone)}
    before, young = seen(path_of(dataclasses.replace(other, created_at_ms=4))), seen(path_of(gone) + "x", YOUNG_MS)
    objects = [seen(f"acme/{one.artifact_id}/about.json") for one in (same, other, unread)]
    listing = listing_of([*objects, *entries.values(), before, young])
    swept = plan(listing, {("acme", one.artifact_id): one for one in (same, other)}, NOW_MS, named={})
    assert swept.unindexed == [other]
    assert swept.stale == [entries[gone], before]


def test_what_is_not_ours_is_left_alone() -> None:
    listing = listing_of([seen("README"), seen("acme/notes.txt"), seen("acme/x/data"), seen("acme/a/b/about.json")])
    assert plan(listing, {}, NOW_MS, named={}, conversations=set()).doomed == []
