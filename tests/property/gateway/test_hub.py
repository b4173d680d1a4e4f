"""The hub in any order of calls: bounded queues, order kept, slow clients let go, others not touched."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kit.examples import examples
from penstock.gateway.view.frames import Frame
from penstock.gateway.view.hub import Client, Gone, Hub

LIMIT = 4
SUBJECTS = ("a", "b", "c")


class HubMachine(RuleBasedStateMachine):
    """For each client what should be in its queue."""

    def __init__(self) -> None:
        super().__init__()
        self.hub = Hub(client_frames=LIMIT)
        self.clients: list[Client] = []
        self.queues: dict[Client, list[Frame]] = {}
        self.subjects: dict[Client, set[str]] = {}
        self.gone: dict[Client, Gone] = {}
        self.woken: dict[int, int] = {}
        self.slow = 0
        self.number = 0

    def pick(self, at: int) -> Client | None:
        return self.clients[at % len(self.clients)] if self.clients else None

    @rule()
    def connect(self) -> None:
        if len(self.clients) >= 6:
            return
        at = len(self.clients)
        self.woken[at] = 0

        def wake() -> None:
            self.woken[at] += 1

        client = self.hub.connect(wake)
        self.clients.append(client)
        self.queues[client], self.subjects[client] = [], set()

    @rule(at=st.integers(0, 5), subject=st.sampled_from(SUBJECTS))
    def subscribe(self, at: int, subject: str) -> None:
        if (client := self.pick(at)) is not None:
            self.hub.subscribe(client, subject)
            if client not in self.gone:
                self.subjects[client].add(subject)

    @rule(at=st.integers(0, 5), subject=st.sampled_from(SUBJECTS))
    def unsubscribe(self, at: int, subject: str) -> None:
        if (client := self.pick(at)) is not None:
            self.hub.unsubscribe(client, subject)
            self.subjects[client].discard(subject)

    @rule(subject=st.sampled_from(SUBJECTS))
    def publish(self, subject: str) -> None:
        self.number += 1
        frame = Frame(request_id=str(self.number), cursor=None)
        before = dict(self.woken)
        self.hub.publish(subject, frame)
        for at, client in enumerate(self.clients):
            if subject not in self.subjects[client]:
                assert self.woken[at] == before[at]
                continue
            assert self.woken[at] > before[at]
            if len(self.queues[client]) < LIMIT:
                self.queues[client].append(frame)
            else:
                self.slow += 1
                self.forget(client, Gone.SLOW)
                self.queues[client] = []

    @rule(at=st.integers(0, 5), count=st.integers(1, LIMIT))
    def read(self, at: int, count: int) -> None:
        if (client := self.pick(at)) is not None:
            for _ in range(min(count, len(client.frames))):
                assert client.frames.popleft() is self.queues[client].pop(0)

    @rule(at=st.integers(0, 5))
    def close(self, at: int) -> None:
        if (client := self.pick(at)) is not None:
            self.hub.drop(client, Gone.CLOSED)
            self.forget(client, Gone.CLOSED)

    def forget(self, client: Client, reason: Gone) -> None:
        self.gone.setdefault(client, reason)
        self.subjects[client] = set()

    @invariant()
    def agrees(self) -> None:
        assert self.hub.connected == len(self.clients) - len(self.gone)
        assert self.hub.dropped_slow == self.slow
        for client in self.clients:
            assert client.gone == self.gone.get(client)
            assert client.subjects == self.subjects[client]
            assert len(client.frames) <= LIMIT
            assert list(client.frames) == self.queues[client]
            if client.gone is not None:
                assert not client.push(Frame(request_id="late", cursor=None))
        listened = set().union(*self.subjects.values())
        assert {subject for subject in SUBJECTS if self.hub.listens(subject)} == listened
        assert self.hub.subjects() == len(listened)


HubMachine.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=50, deadline=None)
TestHub = HubMachine.TestCase
