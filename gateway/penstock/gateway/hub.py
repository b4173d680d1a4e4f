"""The hub: frames to whoever subscribed, one bounded queue per client; one that does not read is let go.

A plain object without I/O. `wake` is called when a client has something new; how it waits is its own business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from enum import StrEnum

from penstock.gateway.frames import Frame

Subject = Hashable


class Gone(StrEnum):
    """Why a client was let go."""

    SLOW = "slow"
    CLOSED = "closed"


class Client:
    """One reader with its queue, subscribed to any number of subjects."""

    __slots__ = ("_hub", "_wake", "frames", "gone", "limit", "subjects")

    def __init__(self, hub: Hub, limit: int, wake: Callable[[], None]) -> None:
        self._hub = hub
        self._wake = wake
        self.limit = limit
        self.frames: deque[Frame] = deque()
        self.subjects: set[Subject] = set()
        self.gone: Gone | None = None

    def push(self, frame: Frame) -> bool:
        """Queue a frame; False (and gone) when the queue is full."""
        if self.gone is not None:
            return False
        if len(self.frames) >= self.limit:
            self._hub.drop(self, Gone.SLOW)
            return False
        self.frames.append(frame)
        self._wake()
        return True

    def wake(self) -> None:
        self._wake()


class Hub:
    """Subjects and their clients. `client_frames` is the queue of one client."""

    def __init__(self, *, client_frames: int = 256) -> None:
        self._client_frames = client_frames
        self._clients: dict[Subject, set[Client]] = {}
        self.connected = 0
        self.dropped_slow = 0

    def connect(self, wake: Callable[[], None]) -> Client:
        self.connected += 1
        return Client(self, self._client_frames, wake)

    def subscribe(self, client: Client, subject: Subject) -> None:
        if client.gone is None:
            client.subjects.add(subject)
            self._clients.setdefault(subject, set()).add(client)

    def unsubscribe(self, client: Client, subject: Subject) -> None:
        client.subjects.discard(subject)
        clients = self._clients.get(subject)
        if clients is not None:
            clients.discard(client)
            if not clients:
                del self._clients[subject]

    def publish(self, subject: Subject, frame: Frame) -> None:
        """Queue a frame for all clients of a subject; those whose queue is full are let go."""
        for client in tuple(self._clients.get(subject, ())):
            client.push(frame)

    def listened(self, subject: Subject) -> bool:
        """Whether anybody would get a frame of this subject."""
        return subject in self._clients

    def drop(self, client: Client, reason: Gone) -> None:
        """Let a client go: it gets nothing more, what it has queued is void, and it is woken to notice."""
        if client.gone is not None:
            return
        client.gone = reason
        self.connected -= 1
        if reason is Gone.SLOW:
            self.dropped_slow += 1
            client.frames.clear()
        for subject in tuple(client.subjects):
            self.unsubscribe(client, subject)
        client.wake()

    def subjects(self) -> int:
        return len(self._clients)
