"""Keeps the logs readable: libraries below WARNING are silent, and what repeats is heard every ten seconds."""

from __future__ import annotations

import logging

from penstock.schemas.logs import OncePer

_NOISY = ("faust", "mode", "aiokafka", "kafka", "httpx", "asyncio", "aiohttp")


def limit_library_logs() -> None:
    """Apply to the libraries that the worker stands on. A filter on a logger is not inherited, so handlers get it."""
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
    limit = OncePer(10.0, lambda record: (record.pathname, record.lineno, str(record.msg)))

    class _Libraries(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            return not record.name.startswith(_NOISY) or limit.filter(record)

    for handler in logging.getLogger().handlers:
        handler.addFilter(_Libraries())
