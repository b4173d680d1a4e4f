"""A topic set of its own, members of a group of its own, and a record of what each member was handed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from penstock.common.settings import KafkaSettings
from penstock.processors.kafka.batches import Assignment, Batch, Committed, DeliveredRecord
from penstock.processors.kafka.membership import TP, GroupSettings, Membership
from support import committed_offsets, wait_until_async


class Seen:
    """What one member was told. Fails on the spot when a batch does not join to what came before it."""

    def __init__(self, *, take: bool = True) -> None:
        self.assignments: list[Assignment] = []
        self.batches: list[Batch] = []
        self.records: list[tuple[TP, DeliveredRecord]] = []
        self.ends: dict[TP, int] = {}
        self.faults: list[str] = []
        self.take = take
        self.member: Membership | None = None

    def on_assigned(self, assignment: Assignment) -> None:
        assert set(assignment.committed) == assignment.partitions
        self.assignments.append(assignment)
        self.ends = {tp: offset for tp, (offset, _) in assignment.committed.items()}

    def on_batch(self, batch: Batch) -> None:
        if batch.generation != self.assignments[-1].generation:
            self.faults.append(f"{batch} is of generation {batch.generation}")
        if batch.start != self.ends[batch.tp]:
            self.faults.append(f"{batch} does not join to {self.ends[batch.tp]}")
        offsets = [record.offset for record in batch.records]
        if offsets != sorted(set(offsets)) or any(not batch.start <= o < batch.end for o in offsets):
            self.faults.append(f"{batch} has {offsets}")
        self.ends[batch.tp] = batch.end
        self.batches.append(batch)
        self.records += [(batch.tp, record) for record in batch.records]
        if self.take:
            batch.taken()

    def places(self) -> list[tuple[str, int, int]]:
        return [(*tp, record.offset) for tp, record in self.records]

    def values(self) -> list[bytes | None]:
        return [record.value for _, record in self.records]

    async def commit_all(self) -> None:
        assert self.member is not None
        results = await self.member.commit({tp: (end, "") for tp, end in self.ends.items()})
        assert all(results.values()), results


class Group:
    """A topic of its own and members of a group of its own."""

    def __init__(self, bootstrap: str, folder: Path, partitions: int = 1, topics: int = 1) -> None:
        self.bootstrap = bootstrap
        self.folder = folder
        run = uuid.uuid4().hex[:8]
        self.id = f"faust-{run}"
        self.topics = [f"faust-{run}-{number}" for number in range(topics)]
        self.admin = AdminClient({"bootstrap.servers": bootstrap})
        for future in self.admin.create_topics([NewTopic(t, partitions, 1) for t in self.topics]).values():
            future.result(20)
        self.partitions = [(topic, number) for topic in self.topics for number in range(partitions)]

    @property
    def tp(self) -> TP:
        return self.partitions[0]

    def produce(self, count: int, *, partition: int = 0, start: int = 0, size: int = 0, topic: int = 0) -> None:
        # What it sends again after a pause of the broker is not written twice: tests count the records.
        producer = Producer({"bootstrap.servers": self.bootstrap, "linger.ms": 5, "enable.idempotence": True})
        for number in range(start, start + count):
            value = str(number).encode().ljust(size)
            producer.produce(self.topics[topic], value, key=str(number), partition=partition)
        assert producer.flush(120) == 0  # a test may stop the broker meanwhile

    def committed(self) -> dict[TP, Committed]:
        """What the broker has, asked by a client of its own."""
        found = committed_offsets(self.bootstrap, self.id, self.partitions)
        assert all(p.error is None for p in found)
        return {(p.topic, p.partition): (p.offset, p.metadata or "") for p in found if p.offset >= 0}

    def settings(self, name: str, **options: Any) -> GroupSettings:
        wanted: dict[str, Any] = {"session_timeout_s": 6, "heartbeat_s": 0.5, **options}
        return GroupSettings(group_id=self.id, client_id=name, **wanted)

    @asynccontextmanager
    async def member(
        self,
        name: str,
        seen: Seen,
        *,
        on_revoking: Callable[[], Mapping[TP, Committed]] = dict,
        urgency: Callable[[str], int] = lambda _: 0,
        **options: Any,
    ) -> AsyncIterator[Membership]:
        member = seen.member = Membership(
            KafkaSettings(bootstrap_servers=self.bootstrap),
            self.settings(name, **options),
            self.topics,
            on_batch=seen.on_batch,
            on_assigned=seen.on_assigned,
            on_revoking=on_revoking,
            urgency=urgency,
        )
        member.start()
        try:
            await wait_until_async(lambda: member.joined, 30, f"{name} did not join")
            yield member
            assert seen.faults == []
            assert not member.crashed
        finally:
            await member.stop()


class MemberProcess:
    """A member in a process of its own, and what it has told."""

    def __init__(self, group: Group, name: str, stall_s: float = 60) -> None:
        program = Path(__file__).with_name("member_process.py")
        self.name = name
        self.log = group.folder / f"{name}.log"
        arguments = [group.bootstrap, group.id, name, str(stall_s), *group.topics]
        with self.log.open("ab") as out, self.log.with_suffix(".err").open("ab") as err:
            self.popen = subprocess.Popen([sys.executable, str(program), *arguments], stdout=out, stderr=err)

    def told(self, kind: str) -> list[dict[str, Any]]:
        lines = self.log.read_text().splitlines()
        return [found for line in lines if line.endswith("}") and (found := json.loads(line))["kind"] == kind]

    def places(self) -> list[tuple[str, int, int]]:
        """What it has done, in its order."""
        return [(d["topic"], d["partition"], offset) for d in self.told("done") for offset in d["offsets"]]

    def partitions(self) -> int:
        """How many it has now; -1 before its first assignment."""
        assigned = self.told("assigned")
        return len(assigned[-1]["committed"]) if assigned else -1

    def send(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def tail(self) -> str:
        return self.log.with_suffix(".err").read_text()[-3000:]

    def end(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()
