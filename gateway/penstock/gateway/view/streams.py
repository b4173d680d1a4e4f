"""Which streams a view holds the text of: those that somebody follows here. Pure, on the event loop.

Pieces of other streams are passed over (see `selecting`). When a client comes to one of them, what was passed over is
read again from the log, up to the offset from which on every piece is told; then the client is told all of it at once.
The outcome of what ended long ago is read again in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from penstock.gateway.view.entries import Entry
from penstock.gateway.view.frames import FailureFrame, Frame
from penstock.gateway.view.hub import Client, Hub
from penstock.gateway.view.request_state import Key
from penstock.schemas.codec import Codec
from penstock.schemas.cursor import Cursor
from penstock.schemas.errors import PenstockError
from penstock.schemas.fold import IGNORED, FoldStep, ResultFold
from penstock.schemas.records import Origin, ResultEvent

Piece = tuple[ResultEvent, int]
"""An event of a stream, with its offset."""
Opening = Callable[[Entry, Cursor | None], Sequence[Frame]]


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


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """Pieces of a stream that are to be read, from the offset `begin` on.

    Up to `end`, its outcome; None: up to the offset from which on the view gets every piece, which is for the
    reader to find. `origin`: the record that its readers follow, if that is known.
    """

    key: Key
    origin: Origin | None
    partition: int
    begin: int
    end: int | None


@dataclass(slots=True, eq=False)
class Filling:
    """A request whose outcome, or whose pieces, are being read from the log."""

    entry: Entry
    wanted: Wanted | None
    """The pieces; None: the outcome."""
    told: Cursor
    """How much its readers have got; the epoch is -1 if that is nothing."""
    came_meanwhile: list[Piece] = field(default_factory=list[Piece])
    waiting: list[tuple[Client, Opening]] = field(default_factory=list[tuple[Client, Opening]])
    pieces: bool = False
    """Whether somebody who waits counts the pieces: the outcome alone is not enough then."""


class Streams:
    """`read` is asked for pieces, `filled` takes what they make. A stream that ends meanwhile needs them no more.

    `load` is asked for outcomes, `loaded` takes them.
    """

    def __init__(
        self,
        hub: Hub,
        read: Callable[[Wanted], None] = lambda wanted: None,
        load: Callable[[Entry], None] = lambda entry: None,
    ) -> None:
        self._hub = hub
        self._filling: dict[Key, Filling] = {}
        self.read = read
        self.load = load
        self.followed: dict[bytes, set[str]] = {}
        """The record keys of requests whose pieces the view gets, with the tenants that have one of that id.

        The reader's thread looks into it."""

    def expect(self, key: Key) -> None:
        """A stream is about to begin whose text is wanted from its first piece on."""
        self.followed.setdefault(key[1].encode(), set()).add(key[0])

    def forget(self, key: Key) -> None:
        """It does not begin, or nothing more will come of it."""
        tenants = self.followed.get(record_key := key[1].encode())
        if tenants is not None:
            tenants.discard(key[0])
            if not tenants:
                del self.followed[record_key]

    def follow(self, entry: Entry, *, pieces: bool = False) -> bool:
        """Hold a request's outcome, or its text from now on, whole.

        `pieces`: also the pieces of its text, if it has ended. False if some of it must be read first: see
        `subscribe_after_load`.
        """
        if entry.key in self._filling:
            return False
        if entry.lacks_outcome:
            self._filling[entry.key] = Filling(entry, None, _nothing_of(entry))
            self.load(entry)
        elif entry.done:
            if entry.lacks_text or (pieces and entry.lacks_pieces):
                self._fill(entry, end=entry.terminal_offset)
        elif entry.stream or not entry.content:
            self.expect(entry.key)
            if entry.passed_over:
                self._fill(entry)
        return entry.key not in self._filling

    def subscribe_after_load(
        self,
        entry: Entry,
        client: Client,
        after: Cursor | None,
        opening: Opening = Entry.opening,
        *,
        pieces: bool = False,
    ) -> None:
        """Tell a client the beginning of what is being read, from its cursor on; until then nothing of the request.

        `pieces`: as `follow`.
        """
        client.awaiting_snapshot[entry.request_id] = after
        filling = self._filling[entry.key]
        filling.waiting.append((client, opening))
        filling.pieces = filling.pieces or pieces

    def on_piece(
        self, entry: Entry, place: ResultEvent, offset: int, decode: Callable[[], ResultEvent], *, alone: bool = False
    ) -> FoldStep:
        """Take a piece of a stream: `place` is what `place_reader` gives, `decode` gives it whole.

        `alone`: nobody followed the stream when this piece was read; those behind it may be passed over.
        """
        filling = self._filling.get(entry.key)
        if filling is not None:
            filling.came_meanwhile.append((decode(), offset))
        elif self._is_followed(entry):
            if not entry.passed_over and not alone:
                step = entry.on_result(decode(), offset)
                if entry.fold.gap and entry.filled != entry.fold.place:
                    self._fill(entry)
                return step
            entry.note_piece(offset)
            self._fill(entry)
        entry.pass_over(place, offset)
        return IGNORED

    def on_end(self, entry: Entry) -> Filling | None:
        """Its outcome is there, or nothing will come. If its text was being read, `tell` those who wait for it."""
        self.forget(entry.key)
        return self._filling.pop(entry.key, None)

    def loaded(self, entry: Entry, found: Entry | PenstockError) -> None:
        """What became of the outcome that was asked for: the entry with it, or why it cannot be given."""
        filling = self._filling.get(entry.key)
        if filling is None or filling.entry is not entry:
            return
        del self._filling[entry.key]
        if isinstance(found, PenstockError):
            failure = [FailureFrame(request_id=entry.request_id, cursor=None, error=found)]

            def refusal(entry: Entry, after: Cursor | None) -> Sequence[Frame]:
                return failure

            filling.waiting = [(client, refusal) for client, _ in filling.waiting]
        else:
            filling.entry = found
            if found.lacks_text or (filling.pieces and found.lacks_pieces):
                self._read_pieces(filling)
                return
        self.tell(filling)

    def filled(self, wanted: Wanted, fold: ResultFold) -> None:
        """What the pieces make that were asked for."""
        filling = self._filling.get(wanted.key)
        if filling is None or filling.wanted is not wanted:
            return
        del self._filling[wanted.key]
        entry = filling.entry
        try:
            for event, offset in filling.came_meanwhile:
                fold.apply(event, offset)
            entry.hold_text_of(fold)
            if not entry.done:
                self._hub.publish_once(entry.subjects, entry.text_after(filling.told))
        finally:
            self.tell(filling)
            if entry.done:
                entry.forget_text()

    def is_read(self, entry: Entry) -> bool:
        """Whether its outcome or its pieces are being read from the log."""
        return entry.key in self._filling

    def is_wanted(self, wanted: Wanted) -> bool:
        """Whether anybody still follows what is to be read; if not, it is not read."""
        filling = self._filling.get(wanted.key)
        if filling is None or filling.wanted is not wanted:
            return False
        if not self._hub.listened(_subjects(filling.entry)):
            del self._filling[wanted.key]
            self.forget(wanted.key)
            return False
        return True

    def _is_followed(self, entry: Entry) -> bool:
        if entry.tenant in self.followed.get(entry.request_id.encode(), ()):
            return True
        if not self._hub.has_readers or not self._hub.listened(entry.subjects):
            return False
        self.expect(entry.key)
        return True

    def _fill(self, entry: Entry, end: int | None = None) -> Filling:
        told, fold = _nothing_of(entry), entry.fold
        if not entry.passed_over:
            epoch, attempt = fold.text_place
            told = replace(told, epoch=epoch, attempt=attempt, text_length=fold.text_length)
        entry.passed_over = True
        wanted = Wanted(entry.key, fold.origin, entry.place, entry.pieces_from, end)
        filling = self._filling[entry.key] = Filling(entry, wanted, told)
        self.read(wanted)
        return filling

    def tell_end(self, filling: Filling) -> None:
        """The outcome, to who waits; if one of them counts the pieces, all wait until these are read."""
        if filling.pieces and filling.entry.lacks_pieces:
            self._read_pieces(filling)
        else:
            self.tell(filling)

    def _read_pieces(self, filling: Filling) -> None:
        """Have the pieces of what has ended read, for who waits."""
        again = self._fill(filling.entry, end=filling.entry.terminal_offset)
        again.waiting, again.pieces = filling.waiting, filling.pieces

    @staticmethod
    def tell(filling: Filling) -> None:
        """The beginning, to who waits for it: from now on frames come as they are made."""
        entry = filling.entry
        subjects = _subjects(entry)
        for client, opening in filling.waiting:
            if client.gone is None and entry.request_id in client.awaiting_snapshot:
                after = cast("Cursor | None", client.awaiting_snapshot.pop(entry.request_id))
                if not client.subjects.isdisjoint(subjects):
                    client.push_all(opening(entry, after))


def _subjects(entry: Entry) -> list[Hashable]:
    """Followers of one of these get its frames, or its outcome."""
    return [*entry.subjects, ("outcome", *entry.key)]


def _nothing_of(entry: Entry) -> Cursor:
    """The position of a reader that has got nothing of it yet."""
    return Cursor(partition=entry.place, offset=-1, epoch=-1, attempt=0, text_length=0)
