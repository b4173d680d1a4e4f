"""One member as a process, to be killed and stopped: commits what it has done, writes what it saw as JSON lines.

    python member_process.py BOOTSTRAP GROUP FOLDER NAME STALL_S TOPIC...

It "does" each batch after a moment: the offsets are committed only then, with metadata, as the gate would.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import deque
from typing import Any

from penstock.common.settings import KafkaSettings
from penstock.processors.kafka.membership import TP, Assignment, Batch, GroupSettings, Membership
from penstock.processors.kafka.watchdog import StallWatch

WORK_S = 0.05
COMMIT_S = 0.1


def tell(**words: Any) -> None:
    print(json.dumps(words), flush=True)


class Member:
    def __init__(self, bootstrap: str, group: str, name: str, stall_s: float, topics: list[str]) -> None:
        settings = GroupSettings(group_id=group, client_id=name, session_timeout_s=6, heartbeat_s=0.5)
        self.membership = Membership(
            KafkaSettings(bootstrap_servers=bootstrap),
            settings,
            topics,
            on_batch=self.on_batch,
            on_assigned=self.on_assigned,
            on_revoking=lambda: {tp: (end, "revoked") for tp, end in self.done.items()},
        )
        self.work: deque[tuple[float, Batch]] = deque()
        self.done: dict[TP, int] = {}
        self.ends: dict[TP, int] = {}
        self.watch = StallWatch(stall_s)

    def on_assigned(self, assignment: Assignment) -> None:
        committed = {f"{topic}/{number}": offset for (topic, number), (offset, _) in assignment.committed.items()}
        tell(kind="assigned", generation=assignment.generation, fenced=assignment.fenced, committed=committed)
        self.work.clear()
        self.done = {}
        self.ends = {tp: offset for tp, (offset, _) in assignment.committed.items()}

    def on_batch(self, batch: Batch) -> None:
        if batch.start != self.ends[batch.tp]:
            tell(kind="fault", text=f"{batch} does not join to {self.ends[batch.tp]}")
        self.ends[batch.tp] = batch.end
        self.work.append((time.monotonic() + WORK_S, batch))

    def finish_due(self) -> None:
        while self.work and self.work[0][0] <= time.monotonic():
            _, batch = self.work.popleft()
            batch.taken()
            tell(kind="done", topic=batch.topic, partition=batch.partition, offsets=[r.offset for r in batch.records])
            self.done[batch.tp] = batch.end

    async def run(self) -> None:
        self.membership.start()
        committing: asyncio.Future[dict[TP, bool]] | None = None
        last_commit = last_look = 0.0
        while not self.membership.crashed:
            await asyncio.sleep(0.01)
            now = time.monotonic()
            self.finish_due()
            if now - last_commit > COMMIT_S and (committing is None or committing.done()) and self.done:
                last_commit = now
                committing = self.membership.commit({tp: (end, str(now)) for tp, end in self.done.items()})
            if now - last_look > 1:
                last_look = now
                stalled = self.watch.look(await self.membership.progress(), room=True, now=time.monotonic())
                if stalled:
                    tell(kind="fault", text=f"stalled {sorted(stalled)}")
        tell(kind="fault", text="crashed")


if __name__ == "__main__":
    _, bootstrap_, group_, name_, stall_, *topics_ = sys.argv
    asyncio.run(Member(bootstrap_, group_, name_, float(stall_), topics_).run())
