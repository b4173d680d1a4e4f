"""Usage: whatever gateways do, each outcome counts once, at every gateway and on the topic."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kit.examples import examples
from kit.records import outcome
from penstock.gateway.view.usage import AMOUNTS, Usage, amounts_of, day_of
from penstock.schemas.codec import default_codec
from penstock.schemas.records import Origin, ResultEvent, Timings, UsageTotal
from penstock.schemas.records import Usage as Used

DAY_MS, PUBLISH_MS = 86_400_000, 60_000
NOW_MS = 1_900_000_000_000
PARTITIONS, GATEWAYS = 2, 3
ORIGIN = Origin(topic="t", partition=0, offset=0, append_time_ms=NOW_MS)
codec = default_codec()
Total = dict[tuple[str, ...], tuple[int, ...]]


def ended(number: int) -> ResultEvent:
    made = outcome(f"r{number}", status="completed" if number % 3 else "failed", origin=ORIGIN)
    used = Used(prompt_tokens=number + 1, completion_tokens=number % 5)
    key = f"k{number % 2}" if number % 4 else None
    return replace(made, tenant=f"t{number % 2}", usage=used, key_id=key, timings=Timings(run_ms=number))


def at_ms(number: int) -> int:
    """Some of the outcomes are of the day before."""
    return NOW_MS - DAY_MS * (number % 2)


def totals(usage: Usage) -> Total:
    return {tuple(key): tuple(amounts) for key, amounts in usage.rows("", "9")()}


@dataclass
class Gateway:
    """A gateway with its file. The file has rows and the offsets that they reflect."""

    usage: Usage
    offsets: list[int]
    read: int = 0
    """Records of the topic."""
    file: tuple[dict[tuple[str, ...], tuple[Any, ...]], list[int]] | None = None


@dataclass
class World:
    log: list[list[int]] = field(default_factory=lambda: [[] for _ in range(PARTITIONS)])
    begin: list[int] = field(default_factory=lambda: [0] * PARTITIONS)
    """Retention has deleted what lies before."""
    topic: list[UsageTotal] = field(default_factory=list[UsageTotal])
    gateways: list[Gateway] = field(default_factory=list[Gateway])
    now_ms: int = NOW_MS

    def started(self, file: Any = None) -> Gateway:
        """A gateway that has read the topic, and nothing of the log."""
        rows, offsets = ({}, self.begin) if file is None else file
        made = Gateway(Usage(rows.values()), [*map(max, offsets, self.begin)])
        made.usage.begin("one", PUBLISH_MS)
        made.file = None if file is None else file
        self.merge(made)
        return made

    def fold(self, gateway: Gateway, partition: int, most: int) -> None:
        at = gateway.offsets[partition]
        for offset in range(at, min(len(self.log[partition]), at + most)):
            self.count(gateway, partition, offset)
            gateway.offsets[partition] = offset + 1

    def count(self, gateway: Gateway, partition: int, offset: int) -> None:
        number = self.log[partition][offset]
        gateway.usage.count(ended(number), partition, offset, at_ms(number), self.now_ms)

    def merge(self, gateway: Gateway) -> None:
        for total in self.topic[gateway.read :]:
            gateway.usage.merge(codec.decode(codec.encode(total), UsageTotal), self.now_ms)
        gateway.read = len(self.topic)

    def publish(self, gateway: Gateway, most: int) -> None:
        self.now_ms += PUBLISH_MS
        self.topic += gateway.usage.due(self.now_ms, most)

    def write(self, gateway: Gateway) -> None:
        rows = {} if gateway.file is None else {**gateway.file[0]}
        rows.update({row[:4]: row for row in gateway.usage.drain().get("usage", ())})
        gateway.file = rows, [*gateway.offsets]

    def empty(self, draw: random.Random) -> Gateway:
        """A gateway without a file, which reads the past beside what comes, from a snapshot or from the log."""
        made = self.started()
        made.usage.begin_unordered()
        begin, ends = [*self.begin], [len(records) for records in self.log]
        files = [one.file for one in self.gateways if one.file is not None]
        snapshot = draw.choice(files) if files and draw.random() < 0.5 else None
        self.append(draw, 4)
        lanes: list[list[tuple[int, int]]] = [[], []]
        if snapshot is not None:
            begin = [max(one) for one in zip(snapshot[1], self.begin, strict=True)]
        for partition, records in enumerate(self.log):
            for offset in range(min(begin[partition], ends[partition]), len(records)):
                past = offset < ends[partition] or draw.random() < 0.3
                lanes[not past].append((partition, offset))
        lanes[0] = [one for one in lanes[0] if one[1] >= begin[one[0]]]
        imported = snapshot is None
        while lanes[0] or lanes[1]:
            lane = draw.choice([lane for lane in lanes if lane])
            if lane is lanes[0] and not imported and snapshot is not None:
                made.usage.take_rows(snapshot[0].values(), self.now_ms)
                imported = True
            self.count(made, *lane.pop(0))
            if draw.random() < 0.2:
                self.merge(made)
        if not imported and snapshot is not None:
            made.usage.take_rows(snapshot[0].values(), self.now_ms)
        made.offsets = [len(records) for records in self.log]
        while made.usage.end_unordered(self.now_ms, 1):
            self.append(draw, 1)
            self.fold(made, draw.randrange(PARTITIONS), 1)
        return made

    def append(self, draw: random.Random, most: int) -> None:
        for _ in range(draw.randint(0, most)):
            draw.choice(self.log).append(sum(map(len, self.log)))

    def retain(self, draw: random.Random) -> None:
        """Delete what the topic has of a partition. Retention takes days: all gateways have read the topic."""
        for gateway in self.gateways:
            self.merge(gateway)
        newest = {(one.day, one.tenant, one.model, one.key_id): one for one in self.topic}
        partition = draw.randrange(PARTITIONS)
        for offset in range(self.begin[partition], len(self.log[partition])):
            number = self.log[partition][offset]
            event = ended(number)
            total = newest.get((day_of(at_ms(number)), event.tenant, event.model, event.key_id))
            if not any(s.partition == partition and s.through > offset for s in (total.shares if total else ())):
                return
            self.begin[partition] = offset + 1

    def compact(self) -> None:
        """Keep the newest record of each key; all gateways have read the topic."""
        for gateway in self.gateways:
            self.merge(gateway)
        newest = {(one.day, one.tenant, one.model, one.key_id): one for one in self.topic}
        self.topic = [one for one in self.topic if newest[one.day, one.tenant, one.model, one.key_id] is one]
        for gateway in self.gateways:
            gateway.read = len(self.topic)

    def truth(self) -> Total:
        sums: dict[tuple[str, ...], Counter[str]] = {}
        for number in (number for records in self.log for number in records):
            event = ended(number)
            key = day_of(at_ms(number)), event.tenant, event.model or "", event.key_id or ""
            sums.setdefault(key, Counter()).update(dict(zip(AMOUNTS, amounts_of(event), strict=True)))
        return {key: tuple(one[name] for name in AMOUNTS) for key, one in sums.items()}


STEPS = ("append", "fold", "publish", "merge", "write", "kill", "empty", "retain", "compact")


@settings(max_examples=examples(400), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, GATEWAYS - 1), st.integers(0, 1_000)), max_size=60))
def test_each_outcome_counts_once(steps: Sequence[tuple[str, int, int]]) -> None:
    world = World()
    world.gateways = [world.started() for _ in range(GATEWAYS)]
    for step, at, number in steps:
        draw, gateway = random.Random(number), world.gateways[at]
        match step:
            case "append":
                world.append(draw, 6)
            case "fold":
                world.fold(gateway, draw.randrange(PARTITIONS), draw.randint(1, 4))
            case "publish":
                world.publish(gateway, draw.randint(1, 4))
            case "merge":
                world.merge(gateway)
            case "write":
                world.write(gateway)
            case "kill" if gateway.file is not None and all(map(int.__ge__, gateway.file[1], world.begin)):
                world.gateways[at] = world.started(gateway.file)
            case "empty" | "kill":
                world.gateways[at] = world.empty(draw)
            case "retain":
                world.retain(draw)
            case "compact":
                world.compact()
    for _ in range(2):
        for gateway in world.gateways:
            world.merge(gateway)
            for partition in range(PARTITIONS):
                world.fold(gateway, partition, 1_000)
            world.publish(gateway, 1_000)
    for gateway in world.gateways:
        world.merge(gateway)
        assert totals(gateway.usage) == world.truth()
        assert not gateway.usage.all_due(world.now_ms)
    world.begin = [len(records) for records in world.log]
    assert totals(world.started().usage) == world.truth()
