"""The seam of a restarted stream: what may still be sent so that the client's text stays one text."""

from __future__ import annotations

from penstock.schemas.errors import StreamRestarted


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
