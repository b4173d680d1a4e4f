"""uvicorn as our processes run it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn

HANDSHAKES_S = 1.0
LOOK_S = 0.01


class Server(uvicorn.Server):
    """Without its own signal handlers: the process decides when to stop, so that clients hear of it first."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """What is being opened is opened first, and then ended as all others.

        uvicorn would answer 500 to a socket, and close a connection whose first request is on its way.
        """
        for server in self.servers:
            server.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(HANDSHAKES_S):
                while any(_is_opening(one) for one in self.server_state.connections):
                    await asyncio.sleep(LOOK_S)
        await super().shutdown(sockets)


def _is_opening(connection: Any) -> bool:
    """Whether a connection has asked for nothing yet, or its handshake is under way."""
    return getattr(connection, "cycle", False) is None or not getattr(connection, "handshake_complete", True)
