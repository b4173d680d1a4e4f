"""Stop strings over streamed text: what may be shown, and where to cut."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Feed text as it comes; what may be the beginning of a stop string is held back until it is decided.

    What is emitted, together, is the text before the earliest place where a stop string is complete.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """Text that can be shown now. After a stop string was seen, `stopped` is set and nothing more comes."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        # Of several stop strings in a piece the one complete first counts, so that the pieces' sizes do not matter.
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            first_end = min(end for end, _ in ends)
            self.stopped, self._held = True, ""
            return text[: min(at for end, at in ends if end == first_end)]
        keep = max(begun_at_end(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, when the text has ended."""
        held, self._held = self._held, ""
        return "" if self.stopped else held


def begun_at_end(text: str, stop: str) -> int:
    """How many characters at the end of the text may be the beginning of the string."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
