"""The fold: from a request's events in offset order to what its caller sees. Invariant 3 of the design, as one object.

Events of zombies, repeats and takeovers all are on the result topic. A reader follows the first origin it sees,
ignores what is below the highest (epoch, attempt) seen, epoch first, and everything after the first terminal event.
Two copies of one record may run at once, where a record was moved before partitions were added and again after it. Of
an (epoch, attempt) only what the first worker says counts: the outcome of the followed copy has that place or a higher.

A newer (epoch, attempt) voids the text of the older one, unless its events say `since`: then it goes on from the text
that began at that place, and only exactly where that text ends in the log. So that this end stands still, a worker that
takes a stream over first writes a claim, a chunk without `text_offset`. What older ones write after it is not heard,
and the first chunk with text says whether their text stands.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.schemas.published_logprobs import PublishedLogprobs
from penstock.schemas.records import Origin, ResultEvent, StatusEvent


@dataclass(frozen=True, slots=True)
class Ignored:
    """The event changes nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """New text. `restarted`: what was seen before is void, the text begins again (text_offset 0).

    `calls`: new pieces of calls of tools, each as the record's ToolCallPiece. `logprobs`: new tokens with their log
    probabilities, each as the record's TokenLogprob; `logprobs_offset` came before them.
    """

    text: str
    text_offset: int
    attempt: int
    epoch: int
    restarted: bool
    calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    logprobs: Sequence[dict[str, Any]] = ()
    logprobs_offset: int = 0


@dataclass(frozen=True, slots=True)
class Previewed:
    """A small image of what there is so far. `restarted`: as of a chunk."""

    event: ResultEvent
    restarted: bool


@dataclass(frozen=True, slots=True)
class Terminal:
    """The one outcome."""

    event: ResultEvent


FoldStep = Ignored | Chunk | Previewed | Terminal
IGNORED = Ignored()


def same_origin(left: Origin, right: Origin) -> bool:
    return (left.topic, left.partition, left.offset, left.append_time_ms) == (
        right.topic,
        right.partition,
        right.offset,
        right.append_time_ms,
    )


class ResultFold:
    """One request's result events folded so far. `text` is that of the current (epoch, attempt)."""

    __slots__ = (
        "_calls",
        "_ends",
        "_parts",
        "attempt",
        "epoch",
        "gap",
        "logprobs",
        "offset",
        "origin",
        "request_id",
        "restarts",
        "since",
        "tenant",
        "terminal",
        "text_length",
        "text_place",
        "token_count",
        "worker_id",
    )

    def __init__(self, request_id: str, tenant: str) -> None:
        self.request_id = request_id
        self.tenant = tenant
        self.origin: Origin | None = None
        self.epoch = -1
        self.attempt = 0
        self.since = (-1, 0)
        """The (epoch, attempt) in which the text began: what was published from there on counts."""
        self.text_place = (-1, 0)
        """The (epoch, attempt) that published the end of the text. It is below the current one after a claim: then the
        first chunk says whether the text stands."""
        self.worker_id: str | None = None
        """Of the current (epoch, attempt); None after `restore`, until the next event."""
        self.offset: int | None = None
        self.token_count = 0
        self.restarts = 0
        self.terminal: ResultEvent | None = None
        self.gap = False
        """Whether text, a piece of a call or a log probability of the current (epoch, attempt) is missing before a
        later one."""
        self.logprobs: PublishedLogprobs | None = None
        """Of the tokens of the text, where they were asked for."""
        self._parts: list[str] = []
        self.text_length = 0
        self._ends: list[int] = []
        self._calls: list[int] | None = None

    @property
    def place(self) -> tuple[int, int]:
        """The current (epoch, attempt): the highest that was seen."""
        return self.epoch, self.attempt

    @property
    def text(self) -> str:
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    @property
    def _has_output(self) -> bool:
        """Whether readers have seen any part of the answer: tokens without text have log probabilities."""
        return self.text_length > 0 or bool(self._calls) or (self.logprobs is not None and self.logprobs.count > 0)

    @property
    def piece_ends(self) -> tuple[int, ...]:
        """Where the pieces of the text end, in characters. Each reader of the same log finds the same pieces."""
        return tuple(self._ends)

    @property
    def call_chars(self) -> tuple[int, ...]:
        """Characters of the arguments of each call of a tool."""
        return tuple(self._calls or ())

    def restore(self, *, origin: Origin | None, epoch: int, attempt: int, text: str, token_count: int) -> None:
        """Set the state that another fold of the same request had (a gateway's view after its restart)."""
        self.origin, self.epoch, self.attempt = origin, epoch, attempt
        self.since = self.text_place = self.place
        self._parts, self.text_length, self.token_count = ([text] if text else []), len(text), token_count
        self._ends = [len(text)] if text else []
        self._calls, self.worker_id, self.gap, self.logprobs = None, None, False, None

    def hold_text_of(self, other: ResultFold) -> None:
        """Take the text that another fold of the same request made of the current (epoch, attempt).

        Pieces of calls are not taken: a reader of the text does not get those, and the outcome brings them.
        """
        self.restarts = max(self.restarts, other.restarts)
        goes_on = self.terminal is not None and other.since == self.since
        if other.place != self.place and not goes_on:
            self.restarts += other._has_output
            return
        self._ends, self.logprobs = list(other._ends), None if other.logprobs is None else other.logprobs.copy()
        self._parts, self.text_length, self.token_count = [other.text], other.text_length, other.token_count
        self.gap, self.worker_id, self.since, self.text_place = (
            other.gap,
            other.worker_id,
            other.since,
            other.text_place,
        )
        if self.terminal is None and other.offset is not None:
            self.offset = max(other.offset, -1 if self.offset is None else self.offset)

    def apply(self, event: ResultEvent, offset: int | None = None) -> FoldStep:
        """Take the next event of the log. Events of other requests are ignored."""
        newer = self._follows(event)
        if newer is None:
            return IGNORED
        if event.kind == "terminal":
            self.epoch, self.attempt = event.epoch, event.attempt
            self.hold_terminal(event)
            self.offset = offset
            return Terminal(event)
        if event.kind == "preview" and event.preview is not None:
            return self._preview(event, newer, offset)
        return self._chunk(event, newer, offset)

    def hold_terminal(self, event: ResultEvent) -> None:
        """Have the outcome: what was published since its text began is the beginning of that."""
        self.terminal, self.text_place = event, self.place
        self.since = event.since or self.place

    def forget_text(self) -> None:
        """Of a request that has ended: the outcome holds the text, or refers to it."""
        self._parts, self.text_length, self._ends, self._calls, self.gap = [], 0, [], None, False
        self.logprobs = None

    def pass_over(self, event: ResultEvent) -> bool:
        """Take the place of a piece without its text; whether it began a newer (epoch, attempt).

        Of the pieces of one (epoch, attempt) only the first decides which later events are heard.
        """
        newer = self._follows(event)
        if newer:
            self._begin(event)
        return bool(newer)

    def _follows(self, event: ResultEvent) -> bool | None:
        """Whether the event begins a newer (epoch, attempt); None if it is not to be heard."""
        if self.terminal is not None or (event.request_id, event.tenant) != (self.request_id, self.tenant):
            return None
        if self.origin is not None and not same_origin(self.origin, event.origin):
            return None
        place = (event.epoch, event.attempt)
        current = (self.epoch, self.attempt)
        if place < current or (place == current and self.worker_id not in (None, event.worker_id)):
            return None
        self.origin, self.worker_id = event.origin, event.worker_id
        return place > current

    def _begin(self, event: ResultEvent) -> None:
        """What is held is void: the event's (epoch, attempt) begins."""
        self.epoch, self.attempt = event.epoch, event.attempt
        self.since = self.text_place = self.place
        self._parts, self.text_length, self.token_count, self._calls, self.gap = [], 0, 0, None, False
        self._ends, self.logprobs = [], None

    def _enter(self, event: ResultEvent, at: int) -> bool:
        """An (epoch, attempt) publishes its first text, at `at`; whether that voids what older ones have published."""
        told = self._has_output
        if event.since is None or (told and (event.since != self.since or at < self.text_length)):
            self._begin(event)
            return told
        self.epoch, self.attempt, self.since = event.epoch, event.attempt, event.since
        self.text_place = self.place
        return False

    def _preview(self, event: ResultEvent, newer: bool, offset: int | None) -> FoldStep:
        voided = self._chunk(event, newer, offset)  # of a newer place it voids the older text as any event does
        self.offset = offset
        return Previewed(event, isinstance(voided, Chunk) and voided.restarted)

    def _chunk(self, event: ResultEvent, newer: bool, offset: int | None) -> FoldStep:
        # Whatever is no chunk brings no text, but of a newer place it voids the text of the older one all the same:
        # what a zombie writes after it must not be heard.
        text, at = (event.text or "", event.text_offset or 0) if event.kind == "chunk" else ("", 0)
        if event.kind == "chunk" and event.text_offset is None:
            self.epoch, self.attempt = event.epoch, event.attempt
            return IGNORED
        restarted = (newer or self.text_place != self.place) and self._enter(event, at)
        if restarted:
            self.restarts += 1
        # A repeat brings nothing new, an overlap only its tail. A gap cannot be shown without breaking the sequence:
        # its text comes with the terminal event, which carries the whole.
        if at > self.text_length:
            self.gap = True
            return (
                Chunk(text="", text_offset=0, attempt=self.attempt, epoch=self.epoch, restarted=True)
                if restarted
                else IGNORED
            )
        new = text[self.text_length - at :]
        calls = [] if event.tool_call_pieces is None else self._new_pieces(event.tool_call_pieces)
        logprobs = () if event.token_logprobs is None else self._new_logprobs(event)
        if not new and not calls and not logprobs and not restarted:
            return IGNORED
        start = self.text_length
        if new:
            self._parts.append(new)
            self.text_length += len(new)
            self._ends.append(self.text_length)
            if self.logprobs is not None:
                self.logprobs.ends[self.text_length] = self.logprobs.count
        self.token_count = (event.first_token_index or 0) + len(event.token_ids or ())
        self.offset = offset
        return Chunk(
            text=new,
            text_offset=start,
            attempt=self.attempt,
            epoch=self.epoch,
            restarted=restarted,
            calls=calls,
            logprobs=logprobs,
            logprobs_offset=0 if self.logprobs is None else self.logprobs.count - len(logprobs),
        )

    def _new_logprobs(self, event: ResultEvent) -> Sequence[dict[str, Any]]:
        """Log probabilities without gap and repeat, as of text: what is missing comes with the terminal event."""
        if self.logprobs is None:
            self.logprobs = PublishedLogprobs()
        new = self.logprobs.add(event.token_logprobs or (), event.first_logprob_index or 0)
        self.gap = self.gap or new is None
        return new or ()

    def _new_pieces(self, pieces: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Pieces of calls without gap and repeat, as of text: what is missing comes with the terminal event."""
        self._calls = [] if self._calls is None else self._calls
        new, gap = new_pieces(self._calls, pieces)
        self.gap = self.gap or gap
        return new


def new_pieces(known: list[int], pieces: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], bool]:
    """What is new of pieces of calls to who knows so many characters of each call's arguments, and whether one lacks.

    `known` is brought up to date.
    """
    new: list[dict[str, Any]] = []
    gap = False
    for piece in pieces:
        index, at, arguments = piece["index"], piece["offset"], piece["arguments"]
        if index == len(known) and at == 0:
            known.append(len(arguments))
            new.append(piece)
        elif 0 <= index < len(known) and at <= known[index] < at + len(arguments):
            rest = arguments[known[index] - at :]
            new.append({"index": index, "id": None, "name": None, "arguments": rest, "offset": known[index]})
            known[index] += len(rest)
        elif index >= len(known) or (index >= 0 and at > known[index]):
            gap = True
    return new, gap


class StatusFold:
    """One request's statuses folded so far, by (epoch, attempt, rank); `latest` is what to show."""

    __slots__ = ("latest", "origin", "request_id", "tenant")

    def __init__(self, request_id: str, tenant: str) -> None:
        self.request_id = request_id
        self.tenant = tenant
        self.origin: Origin | None = None
        self.latest: StatusEvent | None = None

    def apply(self, event: StatusEvent) -> bool:
        """Whether the event is news. A status of equal rank is (its position may have changed), but for the end."""
        if (event.request_id, event.tenant) != (self.request_id, self.tenant):
            return False
        if self.origin is not None and not same_origin(self.origin, event.origin):
            return False
        if self.latest is not None:
            old = (self.latest.epoch, self.latest.attempt, self.latest.rank)
            if self.latest.done or (event.epoch, event.attempt, event.rank) < old:
                return False
        self.origin = event.origin
        self.latest = event
        return True
