"""Keeps the logs readable: libraries below WARNING are silent, and what repeats is heard every ten seconds."""

from __future__ import annotations

import logging
import time

_NOISY = ("faust", "mode", "aiokafka", "kafka", "httpx", "asyncio", "aiohttp")


class OncePer(logging.Filter):
    """Lets a message of the same place and text through once per `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self._seen: dict[tuple[str, int, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        key = (record.pathname, record.lineno, str(record.msg))
        if now - self._seen.get(key, -self._seconds) < self._seconds:
            return False
        if len(self._seen) > 1000:
            self._seen.clear()
        self._seen[key] = now
        return True


def quiet_logs() -> None:
    """Apply to the libraries that the worker stands on. A filter on a logger is not inherited, so handlers get it."""
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
    limit = OncePer(10.0)

    class _Libraries(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            return not record.name.startswith(_NOISY) or limit.filter(record)

    for handler in logging.getLogger().handlers:
        handler.addFilter(_Libraries())
