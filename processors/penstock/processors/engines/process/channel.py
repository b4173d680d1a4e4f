"""Messages between a worker and an engine's process: pickled values in frames on a socket pair, blocking neither.

A pipe with blocking sends deadlocks when both sides send more than the kernel buffers (long prompts one way, embeddings
the other). Here what the kernel does not take waits in a queue, as it is: asyncio's transports put all that waits into
one buffer, which they move again and again, and with a dozen images in it that took most of the worker's time. What is
unpickled comes from the worker's own child, or from its own parent.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

_LENGTH = struct.Struct("!I")
_APART = 1 << 31
"""Marks the length of a frame that is no message, but a buffer of the next one: large bytes are not copied into it."""
_READ_BYTES = 256 * 1024
_PIECES = 64
"""How many messages at once are given to the kernel."""
_AT_ONCE = 8
"""Reads and writes before the event loop turns to others."""


class Channel:
    """One end. `on_message` gets each value in order; `on_lost` is called once, when the other side is gone."""

    def __init__(self, sock: socket.socket, on_message: Callable[[Any], None], on_lost: Callable[[], None]) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_lost = on_lost
        self._over = False
        self._unsent: deque[memoryview] = deque()
        self._buffer = bytearray()
        """The beginning of the next frames, while they are small."""
        self._frame: memoryview | None = None
        """A large frame that is being read, and how much of it is there."""
        self._filled = 0
        self._is_apart = False
        self._apart: list[memoryview] = []

    @classmethod
    async def open(cls, sock: socket.socket, on_message: Callable[[Any], None], on_lost: Callable[[], None]) -> Channel:
        sock.setblocking(False)
        channel = cls(sock, on_message, on_lost)
        channel._loop.add_reader(sock, channel._readable)
        return channel

    def send(self, message: Any) -> None:
        """Queue a value. Sending to one that is gone does nothing: `on_lost` reports it."""
        if self._over:
            return
        apart: list[pickle.PickleBuffer] = []
        body = pickle.dumps(message, protocol=5, buffer_callback=apart.append)
        idle = not self._unsent
        for buffer in apart:
            self._queue(buffer.raw(), _APART)
        self._queue(memoryview(body))
        if idle:
            self._write()
            if self._unsent and not self._over:
                self._loop.add_writer(self._sock, self._writable)

    def _queue(self, body: memoryview, mark: int = 0) -> None:
        if len(body) >= _APART:
            raise ValueError(f"a message of {len(body)} bytes is too long")
        head = _LENGTH.pack(len(body) | mark)
        if len(body) <= _READ_BYTES:
            self._unsent.append(memoryview(head + bytes(body)))
        else:
            self._unsent += (memoryview(head), body)

    @property
    def unsent_bytes(self) -> int:
        return sum(map(len, self._unsent))

    def close(self) -> None:
        """Close this end, with what is unsent; `on_lost` is not called for it."""
        self._on_lost = lambda: None
        self._end()

    def _writable(self) -> None:
        self._write()
        if not self._unsent and not self._over:
            self._loop.remove_writer(self._sock)

    def _write(self) -> None:
        for _ in range(_AT_ONCE):
            if not self._unsent:
                return
            try:
                sent = self._sock.sendmsg(list(islice(self._unsent, _PIECES)))
            except (BlockingIOError, InterruptedError):
                return
            except OSError:  # gone; what it said last is not read any more
                self._end()
                return
            self._forget(sent)

    def _forget(self, sent: int) -> None:
        """Forget bytes that were sent."""
        while sent:
            piece = self._unsent[0]
            if sent < len(piece):
                self._unsent[0] = piece[sent:]
                return
            sent -= len(piece)
            self._unsent.popleft()

    def _readable(self) -> None:
        for _ in range(_AT_ONCE):
            if self._over:
                return
            try:
                there = self._read_large() if self._frame is not None else self._read_small()
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                there = False
            if not there:
                self._end()
                return

    def _read_small(self) -> bool:
        """False at the end of what the other side says."""
        data = self._sock.recv(_READ_BYTES)
        if not data:
            return False
        whole = len(data) < _READ_BYTES
        self._buffer += data
        self._take_frames()
        if whole:
            raise BlockingIOError  # nothing more is there, or the loop says so again
        return True

    def _take_frames(self) -> None:
        buffer, at = self._buffer, 0
        try:
            while len(buffer) - at >= _LENGTH.size and not self._over:
                (length,) = _LENGTH.unpack_from(buffer, at)
                self._is_apart, length = bool(length & _APART), length & ~_APART
                begin, end = at + _LENGTH.size, at + _LENGTH.size + length
                if len(buffer) < end:
                    if length > _READ_BYTES:
                        self._filled = len(buffer) - begin
                        self._frame = memoryview(bytearray(length))
                        self._frame[: self._filled] = memoryview(buffer)[begin:]
                        at = len(buffer)
                    return
                at = end
                self._take(memoryview(bytes(buffer[begin:end])))
        finally:
            del buffer[:at]

    def _read_large(self) -> bool:
        assert self._frame is not None
        read = self._sock.recv_into(self._frame[self._filled :])
        self._filled += read
        if read and self._filled == len(self._frame):
            frame, self._frame = self._frame, None
            self._take(frame)
        return read > 0

    def _take(self, frame: memoryview) -> None:
        if self._is_apart:
            self._apart.append(frame)
            return
        buffers, self._apart = self._apart, []
        self._on_message(pickle.loads(frame, buffers=buffers))

    def _end(self) -> None:
        """Once: either side has closed, or cannot be spoken to any more."""
        if self._over:
            return
        self._over = True
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        self._unsent.clear()
        self._loop.call_soon(lambda: self._on_lost())
