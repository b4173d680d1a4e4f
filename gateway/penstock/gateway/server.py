"""uvicorn as our processes run it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Generator
from contextlib import contextmanager, suppress

import uvicorn

HANDSHAKES_S = 1.0
LOOK_S = 0.01


class Server(uvicorn.Server):
    """Without its own signal handlers: the process decides when to stop, so that clients are told first."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Sockets that are being opened are opened first, and closed as all others: uvicorn would answer 500."""
        for server in self.servers:
            server.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(HANDSHAKES_S):
                while not all(getattr(one, "handshake_complete", True) for one in self.server_state.connections):
                    await asyncio.sleep(LOOK_S)
        await super().shutdown(sockets)
