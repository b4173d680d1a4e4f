"""Values of metrics' labels that come from requests and configurations: only so many differ."""

from __future__ import annotations

OTHER = "other"
NONE = "none"
MOST = 200


class BoundedLabel:
    """The first `most` values keep their names, all later ones are `other`; what has no value is `none`.

    A series is kept for each value for as long as the process lives: names without a limit would fill its memory, and
    that of who collects them.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._known: set[str] = set()

    def of(self, value: str | None) -> str:
        if not value:
            return NONE
        if value in self._known:
            return value
        if len(self._known) >= self._most:
            return OTHER
        self._known.add(value)
        return value
