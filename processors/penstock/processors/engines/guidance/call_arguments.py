"""Where the arguments of a call end, found while they come: the object's last brace, or where it is no JSON. Pure."""

from __future__ import annotations

_OPENING, _CLOSING = frozenset("{["), frozenset("}]")


class ArgumentsScanner:
    """Feed it a JSON object in pieces, from its first brace on. `over` when nothing more belongs to it."""

    def __init__(self) -> None:
        self.over = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> int:
        """How many of these characters belong to the object.

        A line break inside a string is not allowed in JSON: whatever wrote it has forgotten to close the string.
        """
        for place, char in enumerate(text):
            if self._in_string:
                if char < " ":
                    self.over = True
                    return place
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in _OPENING:
                self._depth += 1
            elif char in _CLOSING:
                self._depth -= 1
                if self._depth == 0:
                    self.over = True
                    return place + 1
        return len(text)
