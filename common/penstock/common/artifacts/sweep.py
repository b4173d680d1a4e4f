"""What a sweep takes away, decided from what lies in the store, the time and known outcomes. No I/O.

 - *expired*: its time is over, and no conversation holds it;
 - *orphan*: the output of a request that has ended and whose outcome does not name it: an attempt whose worker died
   before its event, a preview, an erased request; or what was made in a conversation that is no more;
 - *partial*: bytes without facts, or bytes that the facts do not name: an upload that broke off.

What is younger than GRACE_MS may be under way, and stays. So does all whose request's outcome is not known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Literal

from penstock.common.artifacts import by_time
from penstock.common.artifacts.facts import ID_LENGTH, Artifact, is_artifact_id
from penstock.common.artifacts.holds import CONVERSATIONS, REQUESTS
from penstock.common.artifacts.inputs import INPUT_KEPT_S
from penstock.common.artifacts.places import data_path

GRACE_MS = 3_600_000
MARKED_MS = 2 * INPUT_KEPT_S * 1000
"""The mark of a request at its input is taken away after this time: nobody knows the request any more."""
Key = tuple[str, str]
"""Tenant, then the id of an artifact, a request or a conversation."""
Reason = Literal["expired", "orphan", "partial"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """One object of a place."""

    store: str | None
    path: str
    size_bytes: int
    modified_ms: int


@dataclass(frozen=True, slots=True)
class Listing:
    """All objects, by what they are. Those that are none of ours are in none of these."""

    facts: dict[Key, Seen] = field(default_factory=dict[Key, Seen])
    data: dict[Key, list[Seen]] = field(default_factory=dict[Key, "list[Seen]"])
    held: dict[Key, dict[str, Seen]] = field(default_factory=dict[Key, "dict[str, Seen]"])
    """By artifact: the marks of conversations at it."""
    holding: dict[Key, int] = field(default_factory=dict[Key, int])
    """By conversation: when its newest mark was made, in milliseconds since the epoch."""
    inputs: dict[Key, list[Seen]] = field(default_factory=dict[Key, "list[Seen]"])
    """By artifact: the marks of requests whose input it is."""
    by_time: dict[Key, list[Seen]] = field(default_factory=dict[Key, "list[Seen]"])
    """By artifact: its entries in the indexes by time, that of all and that of files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Doomed:
    """An artifact, or what there is of one, that is to be taken away."""

    tenant: str
    artifact_id: str
    reason: Reason
    size_bytes: int
    artifact: Artifact | None
    """Its facts; None for a partial one."""
    objects: tuple[Seen, ...]


@dataclass(frozen=True, slots=True)
class Sweep:
    """What to do: `released` are conversations that are no more, with marks left.

    `stale` are marks of requests and entries of the index by time that are not needed, `unindexed` lack an entry.
    """

    doomed: list[Doomed]
    released: list[Key]
    stale: list[Seen]
    unindexed: list[Artifact]


def listing_of(objects: Iterable[Seen]) -> Listing:
    found = Listing()
    for one in objects:
        match one.path.split("/"):
            case [tenant, by_time.FOLDER | by_time.FILES, _, name]:
                found.by_time.setdefault((tenant, name[-ID_LENGTH:]), []).append(one)
            case [tenant, REQUESTS.by_holder, _, artifact_id]:
                found.inputs.setdefault((tenant, artifact_id), []).append(one)
            case [tenant, artifact_id, REQUESTS.at_artifact, _] if is_artifact_id(artifact_id):
                found.inputs.setdefault((tenant, artifact_id), []).append(one)
            case [tenant, CONVERSATIONS.by_holder, conversation, _]:
                key = (tenant, conversation)
                found.holding[key] = max(found.holding.get(key, 0), one.modified_ms)
            case [tenant, artifact_id, CONVERSATIONS.at_artifact, conversation] if is_artifact_id(artifact_id):
                found.held.setdefault((tenant, artifact_id), {})[conversation] = one
            case [tenant, artifact_id, "about.json"] if one.store is None and is_artifact_id(artifact_id):
                found.facts[tenant, artifact_id] = one
            case [tenant, *_, artifact_id, "data"] if is_artifact_id(artifact_id):
                found.data.setdefault((tenant, artifact_id), []).append(one)
            case _:
                pass
    return found


def in_question(listing: Listing, facts: Mapping[Key, Artifact], now_ms: int) -> set[Key]:
    """The requests, as (tenant, request id), whose outcomes decide about artifacts."""
    return {
        (artifact.tenant, artifact.request_id)
        for key, artifact in facts.items()
        if artifact.request_id is not None and _is_old(listing.facts[key], now_ms)
    }


def plan(
    listing: Listing,
    facts: Mapping[Key, Artifact],
    now_ms: int,
    *,
    named: Mapping[Key, Set[str]],
    conversations: Set[Key] | None = None,
) -> Sweep:
    """`named`: by request that has ended, the ids of artifacts that its outcome names. `conversations`: all there are.

    `facts` may lack some that `listing` has: what is not known stays.
    """
    released = [
        key
        for key, marked_ms in listing.holding.items()
        if conversations is not None and key not in conversations and marked_ms + GRACE_MS <= now_ms
    ]
    gone = set(released)
    doomed: list[Doomed] = []
    for key in sorted({*listing.facts, *listing.data, *listing.held}):
        data = listing.data.get(key, [])
        if key not in listing.facts:
            objects = [one for one in (*data, *listing.held.get(key, {}).values()) if _is_old(one, now_ms)]
            doomed += _taken(key, "partial", None, objects)
            continue
        artifact = facts.get(key)
        if artifact is None:
            continue
        held = any((key[0], conversation) not in gone for conversation in listing.held.get(key, {}))
        about = listing.facts[key]
        reason = None if held else _reason(artifact, about, now_ms, named)
        made_in = artifact.conversation_id
        if not held and made_in is not None and conversations is not None and (key[0], made_in) not in conversations:
            reason = reason or ("orphan" if _is_old(about, now_ms) else None)
        if reason is not None:
            doomed += _taken(key, reason, artifact, [about, *data])
            continue
        elsewhere = [one for one in data if (one.store, one.path) != (artifact.store, data_path(artifact))]
        doomed += _taken(key, "partial", None, [one for one in elsewhere if _is_old(one, now_ms)])
    stale = _stale_marks(listing, now_ms) + _stale_entries(listing, facts, now_ms)
    return Sweep(doomed, released, stale, unindexed(listing, facts))


def unindexed(listing: Listing, facts: Mapping[Key, Artifact]) -> list[Artifact]:
    """The artifacts that are not in the index by time: an older release wrote them."""
    return [
        artifact
        for key, artifact in facts.items()
        if all(one.path != by_time.path_of(artifact) for one in listing.by_time.get(key, []))
    ]


def _stale_entries(listing: Listing, facts: Mapping[Key, Artifact], now_ms: int) -> list[Seen]:
    """Entries of artifacts that are gone or were written again, and entries as files of what is none."""
    stale: list[Seen] = []
    for key, entries in listing.by_time.items():
        artifact = facts.get(key)
        if artifact is not None or key not in listing.facts:
            paths = set[str]() if artifact is None else _entries_of(artifact)
            stale += [one for one in entries if one.path not in paths and _is_old(one, now_ms)]
    return stale


def _entries_of(artifact: Artifact) -> set[str]:
    folders = [by_time.FOLDER] if artifact.purpose is None else [by_time.FOLDER, by_time.FILES]
    return {by_time.path_of(artifact, folder) for folder in folders}


def _stale_marks(listing: Listing, now_ms: int) -> list[Seen]:
    """Marks of requests at artifacts that are no more, and of requests that nobody knows any more."""
    return [
        mark
        for key, marks in listing.inputs.items()
        for mark in marks
        if _is_old(mark, now_ms, GRACE_MS if key not in listing.facts else MARKED_MS)
    ]


def _reason(artifact: Artifact, about: Seen, now_ms: int, named: Mapping[Key, Set[str]]) -> Reason | None:
    if artifact.expires_at_ms is not None and artifact.expires_at_ms <= now_ms:
        return "expired"
    if artifact.request_id is None or not _is_old(about, now_ms):
        return None
    kept = named.get((artifact.tenant, artifact.request_id))
    return "orphan" if kept is not None and artifact.artifact_id not in kept else None


def _taken(key: Key, reason: Reason, artifact: Artifact | None, objects: Iterable[Seen]) -> list[Doomed]:
    found = tuple(objects)
    size = sum(one.size_bytes for one in found)
    one = Doomed(tenant=key[0], artifact_id=key[1], reason=reason, size_bytes=size, artifact=artifact, objects=found)
    return [one] if found else []


def _is_old(one: Seen, now_ms: int, age_ms: int = GRACE_MS) -> bool:
    return one.modified_ms + age_ms <= now_ms
