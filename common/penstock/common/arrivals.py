"""When this process heard the reports of others, by its own clock: the clocks of other machines differ. Pure."""

from __future__ import annotations

from penstock.common.reader import RawMessage


class Arrivals:
    """Of one partition that is read from its start.

    A record that is followed live counts from when it was read. One that stood in the log when reading began counts
    from its time in the log, or from now if that is later.
    """

    def __init__(self) -> None:
        self._live_from = 0

    def begin(self, end: int) -> None:
        """Reading begins, and the log ends here."""
        self._live_from = end

    def heard_ms(self, message: RawMessage, now_ms: int) -> int:
        """When this record counts as heard. The first one that is live ends the past: a later log begins at 0 again."""
        if message.offset >= self._live_from:
            self._live_from = 0
            return now_ms
        return min(message.timestamp_ms, now_ms)
