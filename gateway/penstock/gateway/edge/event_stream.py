"""Server-sent events as they go over the wire."""

from __future__ import annotations

KEEPALIVE = b": waiting\n\n"
"""A comment, which no client takes for an event: the stream lives, and has nothing to say."""
KEEPALIVE_S = 10.0


def server_sent(data: str, event: str | None = None, event_id: str | None = None) -> bytes:
    """One event. `data` is JSON on one line: it holds no line's end."""
    identity = f"id: {event_id}\n" if event_id else ""
    kind = f"event: {event}\n" if event else ""
    return f"{identity}{kind}data: {data}\n\n".encode()
