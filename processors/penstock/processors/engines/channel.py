"""Messages between a worker and an engine's process: pickled values in frames on a socket pair, blocking neither.

A pipe with blocking sends deadlocks when both sides send more than the kernel buffers (long prompts one way, embeddings
the other). Here asyncio buffers. What is unpickled comes from the worker's own child, or from its own parent.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from collections.abc import Callable
from typing import Any, cast

_LENGTH = struct.Struct("!I")


class Channel(asyncio.Protocol):
    """One end. `on_message` gets each value in order; `on_lost` is called once, when the other side is gone."""

    def __init__(self, on_message: Callable[[Any], None], on_lost: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._closed = False

    @classmethod
    async def open(cls, sock: socket.socket, on_message: Callable[[Any], None], on_lost: Callable[[], None]) -> Channel:
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_unix_connection(lambda: cls(on_message, on_lost), sock=sock)
        return channel

    def send(self, message: Any) -> None:
        """Queue a value. Sending to one that is gone does nothing: `on_lost` tells."""
        if self._transport is not None and not self._transport.is_closing():
            body = pickle.dumps(message, protocol=5)
            self._transport.write(_LENGTH.pack(len(body)) + body)

    @property
    def unsent_bytes(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def close(self) -> None:
        """Close this end; `on_lost` is not called for it."""
        self._closed = True
        if self._transport is not None:
            self._transport.close()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        at = 0
        while len(self._buffer) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, at)
            end = at + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            message = pickle.loads(memoryview(self._buffer)[at + _LENGTH.size : end])
            at = end
            self._on_message(message)
        if at:
            del self._buffer[:at]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self._closed:
            self._closed = True
            self._on_lost()
