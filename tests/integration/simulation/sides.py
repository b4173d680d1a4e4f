"""The same operations on a real broker and on the simulated log, with answers that can be compared."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any, Protocol

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from simulation.log import TP, IllegalGeneration, Log, UnknownMember
from support import committed_offsets, wait_until

PROCESS = Path(__file__).with_name("member_process.py")
SESSION_MS = 6_000
"""The least that a broker allows by default."""
Reads = list[tuple[int, int, str]]
"""(partition, offset, value)"""
Commits = list[tuple[int, int, str]]
"""(partition, offset, metadata)"""


class Side(Protocol):
    """One topic, one group."""

    def produce(self, partition: int, value: str) -> int: ...
    def transaction(self, partition: int, values: list[str]) -> None: ...
    def join(self, name: str) -> None: ...
    def leave(self, name: str) -> None: ...
    def kill(self, name: str) -> None: ...
    def stop(self, name: str) -> None: ...
    def commit_when_it_goes_on(self, name: str, commits: Commits) -> None: ...
    def go_on(self, name: str) -> str: ...
    def settle(self, *names: str) -> dict[str, Any]: ...
    def read(self, name: str, count: int) -> Reads: ...
    def positions(self, name: str) -> list[list[int]]: ...
    def commit(self, name: str, commits: Commits) -> str: ...
    def committed(self) -> Commits: ...
    def close(self) -> None: ...


class RealSide:
    """A real broker; each member is a process."""

    def __init__(self, bootstrap: str, partitions: int) -> None:
        self._bootstrap = bootstrap
        self._partitions = partitions
        run = uuid.uuid4().hex[:8]
        self._topic, self._group = f"sim-{run}", f"sim-{run}"
        admin = AdminClient({"bootstrap.servers": bootstrap})
        for future in admin.create_topics([NewTopic(self._topic, partitions, 1)]).values():
            future.result(30)
        self._members: dict[str, subprocess.Popen[str]] = {}
        self._producer = Producer({"bootstrap.servers": bootstrap, "acks": "all"})
        self._reader = Consumer({"bootstrap.servers": bootstrap, "group.id": self._group})
        """No member: it looks at ends and committed offsets."""

    def produce(self, partition: int, value: str) -> int:
        offsets: list[int] = []
        self._producer.produce(
            self._topic, value, partition=partition, on_delivery=lambda _, message: offsets.append(message.offset())
        )
        assert self._producer.flush(30) == 0
        return offsets[0]

    def transaction(self, partition: int, values: list[str]) -> None:
        """Its marker is written a moment after the commit is answered."""
        before = self._end(partition)
        producer = Producer({"bootstrap.servers": self._bootstrap, "transactional.id": uuid.uuid4().hex})
        producer.init_transactions(30)
        producer.begin_transaction()
        for value in values:
            producer.produce(self._topic, value, partition=partition)
        producer.commit_transaction(30)
        wait_until(lambda: self._end(partition) == before + len(values) + 1, 30, "the marker is written")

    def _end(self, partition: int) -> int:
        return self._reader.get_watermark_offsets(TopicPartition(self._topic, partition), 30)[1]

    def join(self, name: str) -> None:
        self._members[name] = subprocess.Popen(
            [sys.executable, str(PROCESS), self._bootstrap, self._group, self._topic, name, str(SESSION_MS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _send(self, name: str, **command: Any) -> None:
        stdin = self._members[name].stdin
        assert stdin is not None
        stdin.write(json.dumps(command) + "\n")
        stdin.flush()

    def _answer(self, name: str) -> Any:
        stdout = self._members[name].stdout
        assert stdout is not None
        return json.loads(stdout.readline())

    def _ask(self, name: str, **command: Any) -> Any:
        self._send(name, **command)
        return self._answer(name)

    def leave(self, name: str) -> None:
        self._ask(name, do="leave")
        self._gone(name)

    def kill(self, name: str) -> None:
        self._members[name].kill()
        self._gone(name)

    def _gone(self, name: str) -> None:
        process = self._members.pop(name)
        process.wait(30)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()

    def stop(self, name: str) -> None:
        self._members[name].send_signal(signal.SIGSTOP)

    def commit_when_it_goes_on(self, name: str, commits: Commits) -> None:
        self._send(name, do="commit", offsets=commits)

    def go_on(self, name: str) -> str:
        """What came of the commit that waited for it."""
        self._members[name].send_signal(signal.SIGCONT)
        return self._answer(name)

    def settle(self, *names: str) -> dict[str, Any]:
        """Who has what once these are the members, all in one generation."""

        def states() -> dict[str, Any] | None:
            found = {name: self._ask(name, do="state") for name in names}
            generations = {state["generation"] for state in found.values()}
            owned = sorted(partition for state in found.values() for partition in state["assigned"])
            whole = owned == list(range(self._partitions))
            return found if whole and len(generations) == 1 and -1 not in generations else None

        found = wait_until(states, 60, lambda: f"{names} share the partitions", poll_s=0.05)
        assert found is not None
        return found

    def read(self, name: str, count: int) -> Reads:
        return [(partition, offset, value) for partition, offset, value in self._ask(name, do="read", count=count)]

    def positions(self, name: str) -> list[list[int]]:
        return self._ask(name, do="positions")

    def commit(self, name: str, commits: Commits) -> str:
        return self._ask(name, do="commit", offsets=commits)

    def committed(self) -> Commits:
        asked = [(self._topic, partition) for partition in range(self._partitions)]
        found = committed_offsets(self._bootstrap, self._group, asked)
        return [(one.partition, one.offset, one.metadata or "") for one in found if one.offset >= 0]

    def close(self) -> None:
        self._reader.close()
        for name in list(self._members):
            self._members[name].send_signal(signal.SIGCONT)
            self.kill(name)


class SimulatedSide:
    """The simulated log. Members are names; what takes time on a broker happens in `settle`."""

    TOPIC = "t"

    def __init__(self, partitions: int) -> None:
        self._log = Log({self.TOPIC: partitions})
        self._group = self._log.group
        self._ids: dict[str, str] = {}
        self._generations: dict[str, int] = {}
        self._positions: dict[str, dict[int, int]] = {}
        self._away: list[str] = []
        self._waiting: tuple[str, Commits] = ("", [])

    def _tp(self, partition: int) -> TP:
        return (self.TOPIC, partition)

    def produce(self, partition: int, value: str) -> int:
        return self._log.append(self._tp(partition), 0, None, value.encode()).offset

    def transaction(self, partition: int, values: list[str]) -> None:
        for value in values:
            self.produce(partition, value)
        self._log.partitions[self._tp(partition)].marker()

    def join(self, name: str) -> None:
        self._ids[name] = self._group.join((self.TOPIC,), client_id=name)

    def leave(self, name: str) -> None:
        self._group.remove(self._ids.pop(name))

    def kill(self, name: str) -> None:
        self._away.append(self._ids.pop(name))

    def stop(self, name: str) -> None:
        self._away.append(self._ids[name])

    def commit_when_it_goes_on(self, name: str, commits: Commits) -> None:
        self._waiting = (name, commits)

    def go_on(self, name: str) -> str:
        """It finds that it is no member any more; it joins again in `settle`."""
        return self.commit(*self._waiting)

    def settle(self, *names: str) -> dict[str, Any]:
        for member_id in self._away:  # their sessions run out
            self._group.remove(member_id)
        self._away.clear()
        for name in names:
            if self._ids[name] not in self._group.members:
                self._ids[name] = self._group.join((self.TOPIC,), client_id=name)
        for name in names:
            if self._ids[name] in self._group.rejoining:
                self._group.join((self.TOPIC,), self._ids[name])
        if self._group.complete():
            for name in names:
                self._assigned(name)
        members = {name: self._group.members[self._ids[name]] for name in names}
        return {
            name: {"assigned": [number for _, number in member.assigned], "generation": member.generation}
            for name, member in members.items()
        }

    def _assigned(self, name: str) -> None:
        member = self._group.members[self._ids[name]]
        known = self._group.committed(member.assigned)
        self._generations[name] = member.generation
        self._positions[name] = {tp[1]: known.get(tp, (0, ""))[0] for tp in member.assigned}

    def read(self, name: str, count: int) -> Reads:
        taken: Reads = []
        for partition, position in self._positions[name].items():
            end, records = self._log.partitions[self._tp(partition)].read(position, 1_000)
            self._positions[name][partition] = end
            taken += [(partition, record.offset, (record.value or b"").decode()) for record in records]
        assert len(taken) >= count
        return taken

    def positions(self, name: str) -> list[list[int]]:
        return [[partition, position] for partition, position in self._positions[name].items()]

    def commit(self, name: str, commits: Commits) -> str:
        offsets = {self._tp(partition): (offset, metadata) for partition, offset, metadata in commits}
        try:
            self._group.commit(self._ids[name], self._generations[name], offsets)
        except (UnknownMember, IllegalGeneration):
            return "refused"
        return "taken"

    def committed(self) -> Commits:
        found = self._group.committed(sorted(self._log.partitions))
        return [(number, offset, metadata) for (_, number), (offset, metadata) in found.items()]

    def close(self) -> None:
        pass
