"""Which streams a view holds the text of: those that somebody follows here. Pure, on the event loop.

Pieces of other streams are passed over (see `selecting`). When a client comes to one of them, what was passed over is
read again from the log, up to where pieces are held from then on; then the client is told all of it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from penstock.gateway.view.entries import Entry
from penstock.gateway.view.hub import Hub
from penstock.gateway.view.request_state import Key
from penstock.schemas.codec import Codec
from penstock.schemas.cursor import Cursor
from penstock.schemas.fold import IGNORED, FoldStep, ResultFold
from penstock.schemas.records import Origin, ResultEvent

Piece = tuple[ResultEvent, int]
"""An event of a stream, with its offset."""
Told = Callable[[Entry], None]


def place_reader(codec: Codec) -> Callable[[bytes], ResultEvent]:
    """What reads of a piece only that which decides about later ones: the event that it gives has no text."""
    head = codec.head(ResultEvent, "request_id", "tenant", "kind", "origin", "attempt", "epoch", "worker_id")

    def read(record: bytes) -> ResultEvent:
        request_id, tenant, kind, origin, attempt, epoch, worker_id, _ = head(record)
        return ResultEvent(
            request_id=request_id,
            tenant=tenant,
            kind=kind,
            origin=Origin(**origin),
            attempt=attempt,
            epoch=epoch,
            task="",
            created_at=0,
            worker_id=worker_id,
        )

    return read


@dataclass(slots=True, eq=False)
class Filling:
    """A stream whose pieces are being read from the log."""

    entry: Entry
    told: Cursor
    """Up to here its readers were told already."""
    came_meanwhile: list[Piece] = field(default_factory=list[Piece])
    waiting: list[Told] = field(default_factory=list[Told])


@dataclass(frozen=True, slots=True)
class Wanted:
    """Pieces of a stream to be read from `begin` on, up to `end`, or to where the view holds them from now on."""

    key: Key
    partition: int
    begin: int
    end: int | None


class Streams:
    """`read` is asked for pieces; `filled` takes them. A stream that ends meanwhile needs them no more."""

    def __init__(self, hub: Hub, read: Callable[[Wanted], None] = lambda wanted: None) -> None:
        self._hub = hub
        self._filling: dict[Key, Filling] = {}
        self.read = read
        self.followed: set[bytes] = set()
        """The record keys of requests whose pieces the view is told of."""

    def expect(self, request_id: str) -> None:
        """A stream is about to begin whose text is wanted from its first piece on."""
        self.followed.add(request_id.encode())

    def forget(self, request_id: str) -> None:
        """It does not begin, or nothing more will come of it."""
        self.followed.discard(request_id.encode())

    def follow(self, entry: Entry) -> bool:
        """Hold the text of a stream from now on, whole; False if some of it must be read first: see `when_whole`."""
        if entry.done:
            if not entry.lacks_text:
                return True
            if entry.key not in self._filling:
                self._fill(entry, end=entry.terminal_offset)
            return False
        if not entry.stream and entry.content:
            return True
        self.expect(entry.request_id)
        if entry.passed_over and entry.key not in self._filling:
            self._fill(entry)
        return entry.key not in self._filling

    def when_whole(self, entry: Entry, told: Told) -> None:
        """Call `told` once `follow` would say yes, with the entry that holds the text."""
        self._filling[entry.key].waiting.append(told)

    def on_piece(self, entry: Entry, place: ResultEvent, offset: int, decode: Callable[[], ResultEvent]) -> FoldStep:
        """Take a piece of a stream: `place` is what `place_reader` gives, `decode` gives it whole."""
        filling = self._filling.get(entry.key)
        if filling is not None:
            filling.came_meanwhile.append((decode(), offset))
        elif self._is_followed(entry):
            if not entry.passed_over:
                step = entry.on_result(decode(), offset)
                if entry.fold.gap and entry.filled != entry.fold.place:
                    self._fill(entry)
                return step
            self._fill(entry)
        entry.pass_over(place, offset)
        return IGNORED

    def on_end(self, entry: Entry) -> Cursor | None:
        """Its outcome is there. What its readers were told before, if its text was being read."""
        self.forget(entry.request_id)
        filling = self._filling.pop(entry.key, None)
        return None if filling is None else self._done(filling)

    def filled(self, key: Key, pieces: Iterable[Piece]) -> None:
        """The pieces that were asked for, in their order; perhaps some that came by themselves too."""
        filling = self._filling.pop(key, None)
        if filling is None:
            return
        entry, fold = filling.entry, ResultFold(key[1], key[0])
        for event, offset in [*pieces, *filling.came_meanwhile]:
            fold.apply(event, offset)
        entry.hold_text_of(fold)
        if not entry.done:
            self._hub.publish_once(entry.subjects, entry.text_after(filling.told))
        self._done(filling)

    def is_wanted(self, key: Key) -> bool:
        """Whether anybody waits for what was asked for."""
        return key in self._filling

    def _is_followed(self, entry: Entry) -> bool:
        if entry.request_id.encode() in self.followed:
            return True
        if not self._hub.has_readers or not self._hub.listened(entry.subjects):
            return False
        self.expect(entry.request_id)
        return True

    def _fill(self, entry: Entry, end: int | None = None) -> None:
        held = None if entry.passed_over else entry.fold
        told = Cursor(
            partition=entry.place,
            offset=-1,
            epoch=-1 if held is None else held.epoch,
            attempt=0 if held is None else held.attempt,
            text_length=0 if held is None else held.text_length,
        )
        entry.passed_over = True
        self._filling[entry.key] = Filling(entry, told)
        self.read(Wanted(entry.key, entry.place, entry.pieces_from, end))

    @staticmethod
    def _done(filling: Filling) -> Cursor:
        for told in filling.waiting:
            told(filling.entry)
        return filling.told
