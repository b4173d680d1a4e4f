"""The hub: frames for subscribers, one bounded queue per client. A client that does not read is dropped.

A plain object without I/O. `wake` is called when a client has something new; how it waits is its own business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from enum import StrEnum

from penstock.gateway.view.frames import Frame

Subject = Hashable


def items_subject(tenant: str, conversation_id: str) -> Subject:
    """A conversation in which something may have been appended. Its clients are woken, and get no frames."""
    return "items", tenant, conversation_id


class Gone(StrEnum):
    """Why a client was let go."""

    SLOW = "slow"
    CLOSED = "closed"
    STOPPING = "stopping"


class Client:
    """One reader with its queue, subscribed to any number of subjects."""

    __slots__ = ("_hub", "_wake", "awaiting_snapshot", "frames", "gone", "limit", "resumes", "subjects")

    def __init__(self, hub: Hub, limit: int, wake: Callable[[], None], *, resumes: bool) -> None:
        self._hub = hub
        self._wake = wake
        self.resumes = resumes
        self.limit = limit
        self.frames: deque[Frame] = deque()
        self.subjects: set[Subject] = set()
        self.gone: Gone | None = None
        self.awaiting_snapshot: dict[str, object] = {}
        """Requests whose beginning this client is still to get, and from where: it gets nothing else of them before."""

    def push(self, frame: Frame) -> bool:
        """Queue a frame; False (and gone) when the queue is full."""
        if self.gone is not None:
            return False
        if self.awaiting_snapshot and frame.request_id in self.awaiting_snapshot:
            return True
        if len(self.frames) >= self.limit:
            self._hub.drop(self, Gone.SLOW)
            return False
        self.frames.append(frame)
        self._wake()
        return True

    def push_all(self, frames: Iterable[Frame]) -> None:
        for frame in frames:
            self.push(frame)

    def wake(self) -> None:
        self._wake()


class Hub:
    """Subjects and their clients. `client_frames` is the queue of one client."""

    def __init__(self, *, client_frames: int = 256) -> None:
        self._client_frames = client_frames
        self._clients: dict[Subject, set[Client]] = {}
        self._connected: set[Client] = set()
        self._draining = self._stopping = False
        self.dropped_slow = 0

    @property
    def connected(self) -> int:
        return len(self._connected)

    def connect(self, wake: Callable[[], None], *, resumes: bool = True, most_frames: int | None = None) -> Client:
        """A client that is woken for each frame; one that is gone already when its like were told to stop.

        `resumes`: whether it can follow on at another gateway. `most_frames`: what its queue takes, if not what others'
        do.
        """
        client = Client(self, most_frames or self._client_frames, wake, resumes=resumes)
        self._connected.add(client)
        if self._stopping or (self._draining and resumes):
            self.drop(client, Gone.STOPPING)
        return client

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

    def publish_once(self, subjects: Iterable[Subject], frames: Sequence[Frame]) -> None:
        """Queue frames for the clients that listen to any of the subjects, once for each client."""
        listening = [clients for subject in subjects if (clients := self._clients.get(subject))]
        if not listening:
            return
        for client in set().union(*listening) if len(listening) > 1 else tuple(listening[0]):
            for frame in frames:
                client.push(frame)

    def notify(self, subject: Subject) -> None:
        """Wake the clients of a subject, without a frame."""
        for client in tuple(self._clients.get(subject, ())):
            client.wake()

    def clients(self, subject: Subject) -> Set[Client]:
        """Those that listen to a subject."""
        return self._clients.get(subject, frozenset[Client]())

    @property
    def has_readers(self) -> bool:
        """Whether anybody listens to anything."""
        return bool(self._clients)

    def listens(self, subject: Subject) -> bool:
        """Whether anybody would get a frame of this subject."""
        return subject in self._clients

    def listened(self, subjects: Iterable[Subject]) -> bool:
        """Whether anybody would get a frame of one of these subjects."""
        clients = self._clients
        return any(subject in clients for subject in subjects)

    def drop(self, client: Client, reason: Gone) -> None:
        """Let a client go: it gets nothing more, what it has queued is void, and it is woken to notice."""
        if client.gone is not None:
            return
        client.gone = reason
        self._connected.discard(client)
        if reason is Gone.SLOW:
            self.dropped_slow += 1
            client.frames.clear()
        for subject in tuple(client.subjects):
            self.unsubscribe(client, subject)
        client.wake()

    def drain(self) -> None:
        """Let every client go that can follow on at another gateway."""
        self._draining = True
        for client in tuple(self._connected):
            if client.resumes:
                self.drop(client, Gone.STOPPING)

    def drop_all(self, reason: Gone) -> None:
        """Let every client go; what they have queued can still be read, unless they are slow."""
        self._stopping = self._stopping or reason is Gone.STOPPING
        for client in tuple(self._connected):
            self.drop(client, reason)

    def conversations(self) -> list[tuple[str, str]]:
        """Those that somebody follows, each as (tenant, id)."""
        named = (subject for subject in self._clients if isinstance(subject, tuple))
        return [(str(tenant), str(name)) for kind, tenant, name in named if kind == "conversation"]

    def subjects(self) -> int:
        return len(self._clients)
