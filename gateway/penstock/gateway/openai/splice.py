"""The seam of a restarted stream: what may still be sent so that the client's text stays one text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from penstock.schemas.errors import StreamRestarted

Json = dict[str, Any]


class StreamSplice:
    """Text of one request, over any number of attempts, as one stream without gap, repeat or contradiction.

    After a restart the new attempt's text is held against what was sent: it is swallowed while it repeats that, and
    continues where it goes beyond. All lengths and offsets are in characters.
    """

    def __init__(self) -> None:
        self._sent: list[str] = []
        self._sent_length = 0
        self._joined: str | None = ""
        self._position = 0
        """How far the present attempt's text has come, without a gap."""

    @property
    def sent(self) -> str:
        """All text that was handed out."""
        if self._joined is None:
            self._joined = "".join(self._sent)
            self._sent = [self._joined]
        return self._joined

    def restart(self) -> None:
        """A new attempt begins: its text starts at offset 0 again."""
        self._position = 0

    def chunk(self, text: str, offset: int) -> str:
        """The part of a chunk to send now, maybe empty. Raises StreamRestarted if it contradicts what was sent.

        A chunk behind a gap is left out: the final text brings what is missing.
        """
        if offset > self._position:
            return ""
        fresh = text[self._position - offset :]
        start, self._position = self._position, max(self._position, offset + len(text))
        known = self._sent_length - start
        if known > 0 and fresh[:known] != self.sent[start : start + len(fresh)]:
            raise StreamRestarted("the answer was begun anew with another text than was sent")
        return self._send(fresh[max(0, known) :])

    def snapshot(self, text: str) -> str:
        """The same for the whole text so far of the present attempt."""
        self._position = 0
        return self.chunk(text, 0)

    def finish(self, text: str) -> str:
        """The rest of the final text. Raises StreamRestarted if it is not a continuation of what was sent."""
        if not text.startswith(self.sent):
            raise StreamRestarted("the final answer is another than was sent")
        return self._send(text[self._sent_length :])

    def _send(self, text: str) -> str:
        if text:
            self._sent.append(text)
            self._sent_length += len(text)
            self._joined = None
        return text


class LogprobSplice:
    """Log probabilities of the tokens of one stream, over any number of attempts, each token once.

    A text that was begun anew must have the same tokens. What is missing behind a gap is brought by `finish`.
    """

    def __init__(self) -> None:
        self._sent: list[str] = []
        """The tokens that were handed out."""
        self._position = 0
        """How far the present attempt's tokens have come, without a gap."""

    def restart(self) -> None:
        """A new attempt begins: its tokens start again."""
        self._position = 0

    def pieces(self, tokens: Sequence[Json], offset: int) -> list[Json]:
        """Those to be sent now, of tokens behind `offset` others. Raises StreamRestarted if they contradict."""
        if offset > self._position:
            return []
        fresh = tokens[self._position - offset :]
        start, self._position = self._position, max(self._position, offset + len(tokens))
        known = max(0, len(self._sent) - start)
        if self._sent[start : start + len(fresh)] != [one["token"] for one in fresh[:known]]:
            raise StreamRestarted("the answer was begun anew with other tokens than were sent")
        return self._send(fresh[known:])

    def finish(self, tokens: Sequence[Json]) -> list[Json]:
        """The rest of the outcome's tokens. Raises StreamRestarted if they are others than were sent."""
        if [one["token"] for one in tokens[: len(self._sent)]] != self._sent:
            raise StreamRestarted("the final answer has other tokens than were sent")
        return self._send(tokens[len(self._sent) :])

    def _send(self, tokens: Sequence[Json]) -> list[Json]:
        self._sent += [one["token"] for one in tokens]
        return [*tokens]


class CallSplice:
    """The calls of tools of one stream, over any number of attempts, as `StreamSplice` does it for the text.

    Pieces in and out are {index, id, name, arguments, offset}; of a call that was begun anew only what goes beyond what
    was sent comes out. What is missing behind a gap is brought by `finish`.
    """

    def __init__(self) -> None:
        self._sent: list[tuple[str, str, StreamSplice]] = []
        """(id, name, arguments) of each call."""

    def restart(self) -> None:
        """A new attempt begins: its calls start again."""
        for _, _, arguments in self._sent:
            arguments.restart()

    def pieces(self, pieces: Iterable[Json]) -> list[Json]:
        """What of them is to be sent now. Raises StreamRestarted if they contradict what was sent."""
        told: list[Json] = []
        for piece in pieces:
            told += self._piece(piece)
        return told

    def finish(self, calls: Sequence[Json]) -> list[Json]:
        """The rest of the outcome's calls. Raises StreamRestarted if they are others than were sent."""
        if len(calls) < len(self._sent):
            raise StreamRestarted("the final answer has fewer calls than were sent")
        told: list[Json] = []
        for index, call in enumerate(calls):
            function = call["function"]
            known = index < len(self._sent)
            arguments = self._begin(index, call["id"], function["name"])
            place = len(arguments.sent)
            rest = arguments.finish(function["arguments"])
            if not known:
                told.append(_piece(index, rest, 0, call["id"], function["name"]))
            elif rest:
                told.append(_piece(index, rest, place))
        return told

    def _piece(self, piece: Json) -> list[Json]:
        index, offset = piece["index"], piece["offset"]
        named = piece["id"] is not None
        if index > len(self._sent) or (index == len(self._sent) and not named):
            return []
        fresh = index == len(self._sent)
        arguments = self._begin(index, piece["id"], piece["name"]) if named else self._sent[index][2]
        place = len(arguments.sent)
        text = arguments.chunk(piece["arguments"], offset)
        if fresh:
            return [_piece(index, text, 0, piece["id"], piece["name"])]
        return [_piece(index, text, place)] if text else []

    def _begin(self, index: int, call_id: str, name: str) -> StreamSplice:
        """The arguments of a call, as far as they were sent. Raises StreamRestarted if another call was."""
        if index == len(self._sent):
            self._sent.append((call_id, name, StreamSplice()))
        known_id, known_name, arguments = self._sent[index]
        if (known_id, known_name) != (call_id, name):
            raise StreamRestarted("the answer was begun anew with other calls than were sent")
        return arguments


def _piece(index: int, arguments: str, offset: int, call_id: str | None = None, name: str | None = None) -> Json:
    return {"index": index, "id": call_id, "name": name, "arguments": arguments, "offset": offset}
