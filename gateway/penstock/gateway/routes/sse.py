"""Server-sent events of one request: frames with their cursor as event id, a comment while nothing happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from penstock.gateway.edge.event_stream import KEEPALIVE, KEEPALIVE_S, server_sent
from penstock.gateway.service.subscriptions import SlowConsumer, Subscription
from penstock.gateway.view.frames import ResultFrame
from penstock.schemas.errors import PenstockError


async def events(subscription: Subscription, keepalive_s: float = KEEPALIVE_S) -> AsyncGenerator[bytes]:
    """The stream's bytes to the outcome. A client that does not read is cut off; it resumes with its last event id."""
    try:
        while True:
            try:
                async with asyncio.timeout(keepalive_s):
                    frame = await subscription.next_frame()
            except TimeoutError:
                yield KEEPALIVE
                continue
            if frame is None:
                return
            frames = [frame, *subscription.take_nowait()]
            yield b"".join([server_sent(one.encoded(), one.type, one.cursor) for one in frames])
            if isinstance(frames[-1], ResultFrame):
                return
    except (SlowConsumer, PenstockError):  # it comes again, and hears why
        return
    finally:
        subscription.close()
