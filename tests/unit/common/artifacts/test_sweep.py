"""What a sweep deletes, by the listing, the time and known outcomes."""

from __future__ import annotations

import dataclasses
import uuid
from typing import Any

import pytest

from penstock.common.artifacts.by_time import path_of
from penstock.common.artifacts.facts import Artifact
from penstock.common.artifacts.sweep import GRACE_MS, Doomed, Key, Seen, in_question, listing_of, plan

NOW_MS = 100 * GRACE_MS
OLD_MS, YOUNG_MS = NOW_MS - GRACE_MS, NOW_MS - GRACE_MS + 1


def seen(path: str, modified_ms: int = OLD_MS, store: str | None = None) -> Seen:
    return Seen(store=store, path=path, size_bytes=10, modified_ms=modified_ms)


def artifact(artifact_id: str, **facts: Any) -> Artifact:
    common: dict[str, Any] = {"tenant": "acme", "uri": "u", "media_type": "t", "size_bytes": 10, "sha256": "s"}
    return Artifact(artifact_id=artifact_id, **common, **facts)


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
            facts["acme", self.artifact_id] = artifact(self.artifact_id, **self.facts)
        if self.held_by:
            marks = f"{own}/held/{self.held_by}", f"acme/.holds/{self.held_by}/{self.artifact_id}"
            objects += [seen(mark, self.modified_ms) for mark in marks]
        listing = listing_of(objects)
        named = {("acme", request): ids for request, ids in self.named.items()}
        assert set(named) <= in_question(listing, facts, NOW_MS) or self.modified_ms == YOUNG_MS
        return plan(listing, facts, NOW_MS, named=named, conversations=self.conversations).doomed


EXPIRED: dict[str, Any] = {"expires_at_ms": 1}
OUTPUT: dict[str, Any] = {"request_id": "r"}
MADE: dict[str, Any] = {"conversation_id": "c"}
COLD = "5fb2c1f4-7a86-4a0e-9d3b-0f5a8f4f3d11"
NAMED = "0b0d8a55-5a54-4f4e-8b35-0f0d5a2e9c11"
KEPT: dict[str, Case] = {
    "an upload": Case({}),
    "one that has not expired": Case({"expires_at_ms": NOW_MS + 1}),
    "an expired one that a conversation holds": Case(EXPIRED, held_by="c", conversations={("acme", "c")}),
    "a held one while the conversations are unknown": Case(EXPIRED, held_by="c"),
    "a held one of a new conversation": Case(EXPIRED, modified_ms=YOUNG_MS, held_by="c", conversations=set()),
    "an output without a known outcome": Case(OUTPUT),
    "an output that its outcome names": Case(OUTPUT, named={"r": {NAMED}}, artifact_id=NAMED),
    "an output younger than an hour": Case(OUTPUT, modified_ms=YOUNG_MS, named={"r": set()}),
    "made in a conversation": Case(MADE, conversations={("acme", "c")}),
    "made in a conversation, while they are unknown": Case(MADE),
    "made in a new conversation": Case(MADE, modified_ms=YOUNG_MS, conversations=set()),
    "made in a deleted conversation and held by another": Case(MADE, held_by="d", conversations={("acme", "d")}),
    "bytes younger than an hour": Case(modified_ms=YOUNG_MS),
    "bytes where the facts say": Case(
        {"prefix": "a/b", "store": "cold"}, artifact_id=COLD, data=[seen(f"acme/a/b/{COLD}/data", store="cold")]
    ),
}
TAKEN: dict[str, tuple[Case, str]] = {
    "an expired one": (Case({"expires_at_ms": NOW_MS}), "expired"),
    "an expired one, however young": (Case({"expires_at_ms": NOW_MS}, modified_ms=YOUNG_MS), "expired"),
    "one of a deleted conversation": (Case(EXPIRED, held_by="c", conversations={("b", "c")}), "expired"),
    "an output that the outcome does not name": (Case(OUTPUT, named={"r": {"another"}}), "orphan"),
    "an output of an erased request": (Case(OUTPUT, named={"r": set()}), "orphan"),
    "made in a deleted conversation": (Case(MADE, held_by="c", conversations={("b", "c")}), "orphan"),
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


def test_marks_of_a_deleted_conversation_are_released_after_an_hour() -> None:
    listing = listing_of([seen("acme/.holds/old/x"), seen("acme/.holds/new/x", YOUNG_MS), seen("acme/.holds/lives/x")])
    swept = plan(listing, {}, NOW_MS, named={}, conversations={("acme", "lives"), ("globex", "old")})
    assert swept.released == [("acme", "old")]
    assert plan(listing, {}, NOW_MS, named={}, conversations=None).released == []


def test_the_index_by_time_follows_the_facts() -> None:
    """An entry whose facts cannot be read may be correct: it stays."""
    same, other, unread, gone = (artifact(str(uuid.uuid4()), created_at_ms=5) for _ in range(4))
    entries = {one: seen(path_of(one)) for one in (same, unread, gone)}
    before, young = seen(path_of(dataclasses.replace(other, created_at_ms=4))), seen(path_of(gone) + "x", YOUNG_MS)
    objects = [seen(f"acme/{one.artifact_id}/about.json") for one in (same, other, unread)]
    listing = listing_of([*objects, *entries.values(), before, young])
    swept = plan(listing, {("acme", one.artifact_id): one for one in (same, other)}, NOW_MS, named={})
    assert swept.unindexed == [other]
    assert swept.stale == [entries[gone], before]


def test_foreign_files_are_left_alone() -> None:
    listing = listing_of([seen("README"), seen("acme/notes.txt"), seen("acme/x/data"), seen("acme/a/b/about.json")])
    assert plan(listing, {}, NOW_MS, named={}, conversations=set()).doomed == []
