"""A dead letter as the index holds it, as operators see it, and the request that is in it. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.common.reader import RawMessage
from penstock.schemas.codec import Codec
from penstock.schemas.errors import InvalidRequest, PenstockError, RegistryUnavailable
from penstock.schemas.histories import history_json
from penstock.schemas.ids import check_request_id, check_tenant
from penstock.schemas.json_records import json_text
from penstock.schemas.lifetimes import with_header
from penstock.schemas.records import DeadLetter, DeadLetterAction, InferenceRequest
from penstock.schemas.requests import parse_request_bytes, request_to_json
from penstock.schemas.texts import shortened
from penstock.schemas.times import rfc3339
from penstock.schemas.topics import kind_of_topic

HEADER_KIND = "penstock-kind"
REDRIVEN, PURGED = "redriven", "purged"
"""Kinds of DeadLetterAction."""
UNREADABLE = "unreadable"
"""The reason of a record on the topic that is no dead letter."""
MOST_CHARS = 1_000
_ID = re.compile(r"(\d{1,9})/(\d{1,18})")
_CURSOR = re.compile(r"(\d{1,9}/\d{1,18})?(?:@((?:\d{1,9}:\d{1,18},?)*))?")

LetterPlace = tuple[int, int]
"""(partition, offset) on the topic of dead letters."""


def letter_id(place: LetterPlace) -> str:
    return f"{place[0]}/{place[1]}"


def place_of(text: str, param: str = "id") -> LetterPlace:
    """Raises InvalidRequest."""
    found = _ID.fullmatch(text)
    if found is None:
        raise InvalidRequest(f"{text[:60]} is no id of a dead letter: they are as 2/17", param=param)
    return int(found[1]), int(found[2])


@dataclass(frozen=True, kw_only=True, slots=True)
class LetterCount:
    """Dead letters of one reason that nobody ran again."""

    reason: str
    letters: int
    since_ms: int
    """When the oldest of them was written."""
    redrivable: bool = True
    """Whether they hold valid requests."""
    newest: str = ""
    """The error of the newest of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LetterGroup:
    """Dead letters of one reason and model that nobody ran again."""

    reason: str
    model: str | None
    letters: int
    redrivable: int
    """So many of them hold valid requests."""
    oldest_ms: int
    newest_ms: int

    def to_json(self) -> dict[str, Any]:
        return {
            "reason": self.reason,
            "model": self.model,
            "letters": self.letters,
            "redrivable": self.redrivable,
            "oldest_at": rfc3339(self.oldest_ms),
            "newest_at": rfc3339(self.newest_ms),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class LetterCursor:
    """Where a redrive or a purge continues: after `place`, with letters below the end offsets of its first call.

    As text: `2/17@0:40,2:31`. An id alone fixes no ends.
    """

    place: LetterPlace | None = None
    ends: Mapping[int, int] | None = None
    """By partition; one that is missing had no letters."""

    def __str__(self) -> str:
        place = "" if self.place is None else letter_id(self.place)
        ends = "" if self.ends is None else "@" + ",".join(f"{number}:{end}" for number, end in self.ends.items())
        return place + ends

    @classmethod
    def of(cls, text: str) -> LetterCursor:
        """Raises InvalidRequest."""
        found = _CURSOR.fullmatch(text)
        if not text or found is None:
            raise InvalidRequest("after is the last_id of the call before, or the id of a letter", param="after")
        ends = None if found[2] is None else (one.split(":") for one in found[2].split(",") if one)
        return cls(
            place=None if found[1] is None else place_of(found[1], "after"),
            ends=None if ends is None else {int(number): int(end) for number, end in ends},
        )


class LetterAction(NamedTuple):
    """What was done with a letter of this partition. `request_id`: of its request; the record's key says it.

    In a mirrored topic an offset can name another letter: the action says nothing of that one.
    """

    partition: int
    offset: int
    request_id: str | None
    action: DeadLetterAction


@dataclass(frozen=True, kw_only=True, slots=True)
class LetterFacts:
    """What the index holds of a letter: no payload. `origin` is where the first record of its request stands."""

    partition: int
    offset: int
    created_ms: int
    reason: str
    error: str = ""
    tenant: str | None = None
    request_id: str | None = None
    task: str | None = None
    model: str | None = None
    origin: str = ""
    worker_id: str = ""
    attempts: int = 0
    size_bytes: int = 0
    history: str = "{}"
    """The JSON of `history_json`."""
    redrivable: bool = False
    redriven_as: str | None = None
    """The newest request that it was run again as."""
    redrives: int = 0

    @property
    def place(self) -> LetterPlace:
        return self.partition, self.offset

    def to_json(self) -> dict[str, Any]:
        """As operators see it, whatever their keys allow."""
        topic, partition, offset = self.origin.rsplit(" ", 2) if self.origin else ("", "0", "0")
        return {
            "object": "dead_letter",
            "id": letter_id(self.place),
            "created_at": rfc3339(self.created_ms),
            "request_id": self.request_id,
            "tenant": self.tenant,
            "task": self.task,
            "model": self.model,
            "reason": self.reason,
            "error": self.error,
            "attempts": self.attempts,
            "worker_id": self.worker_id,
            "origin": {"topic": topic, "partition": int(partition), "offset": int(offset)} if topic else None,
            "bytes": self.size_bytes,
            "redrivable": self.redrivable,
            "redriven_as": self.redriven_as,
            "redrives": self.redrives,
            "history": [],
            **json.loads(self.history),
        }


def facts_of(message: RawMessage, codec: Codec) -> LetterFacts:
    """What to hold of a record of the topic. Raises RegistryUnavailable."""
    try:
        letter = codec.decode(message.value or b"", DeadLetter)
    except RegistryUnavailable:
        raise
    except PenstockError as error:
        return LetterFacts(
            partition=message.partition,
            offset=message.offset,
            created_ms=message.timestamp_ms,
            reason=UNREADABLE,
            error=shortened(error.message, MOST_CHARS),
            size_bytes=len(message.value or b""),
        )
    try:
        request = request_of(letter, codec)
    except RegistryUnavailable:
        raise
    except PenstockError:
        request = None
    return LetterFacts(
        partition=message.partition,
        offset=message.offset,
        created_ms=letter.created_at,
        reason=letter.reason_code,
        error=shortened(letter.reason, MOST_CHARS),
        tenant=letter.tenant,
        request_id=letter.request_id,
        task=letter.task or (None if request is None else request.task),
        model=letter.model or (None if request is None else request.model),
        origin=f"{letter.origin.topic} {letter.origin.partition} {letter.origin.offset}",
        worker_id=letter.worker_id,
        attempts=letter.attempts,
        size_bytes=len(letter.original),
        history=json.dumps(history_json(letter.history), separators=(",", ":")),
        redrivable=request is not None,
    )


def request_of(letter: DeadLetter, codec: Codec) -> InferenceRequest:
    """The request that a letter holds. Raises PenstockError when there is no valid one in it."""
    if letter.request_id is None or letter.tenant is None:
        raise InvalidRequest("this letter holds no request: its record could not be read")
    if (text := json_text(letter.original)) is not None:
        at_ms = letter.origin.append_time_ms
        request = parse_request_bytes(
            text,
            tenant=letter.tenant,
            request_id=letter.request_id,
            now_ms=at_ms,
            topic_kind=kind_of_topic(letter.origin.topic),
        )
    else:
        request = codec.decode(letter.original, InferenceRequest)
    check_request_id(request.request_id)
    check_tenant(request.tenant)
    return with_header(request, letter.original_headers.items(), letter.origin.append_time_ms)


def payload_json(letter: DeadLetter, codec: Codec) -> dict[str, Any]:
    """What only those see who may read what the tenant asks: text where the bytes are UTF-8, else hex.

    Raises RegistryUnavailable.
    """
    try:
        request = request_to_json(request_of(letter, codec))
    except RegistryUnavailable:
        raise
    except PenstockError:
        request = None
    return {
        "request": request,
        "original": bytes_text(letter.original),
        "headers": {name: bytes_text(value) for name, value in letter.original_headers.items()},
        "error_chain": letter.error_chain,
    }


def bytes_text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return "hex:" + value.hex()
