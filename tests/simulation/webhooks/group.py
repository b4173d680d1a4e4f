"""Processes of `penstock webhooks`, each with the product's own dispatcher, in one consumer group."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Any

from penstock.common.group_consumer import REVOKE_S, Listener
from penstock.common.reader import RawMessage
from penstock.common.settings import KafkaSettings
from penstock.gateway.callbacks import Callbacks, WebhooksSection
from penstock.gateway.webhooks.deliveries import Room
from penstock.gateway.webhooks.dispatcher import Dispatcher, Tools
from penstock.gateway.webhooks.metrics import WebhookMetrics
from penstock.gateway.webhooks.policy import Answer
from penstock.schemas.errors import BrokerUnavailable
from penstock.schemas.records import WebhookDelivery
from penstock.schemas.topics import TP
from simulation.webhooks.checks import Checks
from simulation.webhooks.plan import Plan
from simulation.webhooks.world import CODEC, Key, Topics

SECRET = "whsec_" + "A" * 32
SESSION_S = 10.0
READ_S = 0.1
BATCH = 20
DELIVERY_S = 10.0


class Process:
    """What its dispatcher works with: the broker's side, the log's records, the calls. `cut`: not of the receivers."""

    def __init__(self, name: str, group: Group, plan: Plan, topics: Topics, checks: Checks) -> None:
        self.name, self.group, self.topics = name, group, topics
        self._plan, self._checks = plan, checks
        self._rng = Random(f"{plan.seed}/{name}")
        self.gone = self.cut = False
        self.cut_at_s = -1.0
        self.owned: set[TP] = set()
        self.positions: dict[TP, int] = {}
        self.loaded: dict[int, dict[Key, str]] = {}
        self.heard_erased: set[Key] = set()
        self._due: dict[TP, int] = {}
        self._held = self._stopping = False
        self.waits_for = None
        section = WebhooksSection.model_validate(
            {"secret": SECRET, "max_in_flight": plan.in_flight, "give_up_s": plan.give_up_s}
        )
        any_self: Any = self
        tools = Tools(
            kafka=KafkaSettings(),
            codec=CODEC,
            prompt=CODEC,
            transport=any_self,
            records=any_self,
            sender=any_self,
            callbacks=Callbacks(section),
            metrics=WebhookMetrics(),
            consumer=self._consumer,
            load=self._load,
            now_ms=topics.now_ms,
            chance=self._rng.random,
        )
        self.dispatcher = Dispatcher(tools, section, Room(in_flight=plan.in_flight, held_per_group=plan.held_per_group))
        for key, at_ms in topics.erased:
            self.erased(key, at_ms)
        self.dispatcher.work.start()

    def erased(self, key: Key, at_ms: int) -> None:
        if not self.gone:
            self.heard_erased.add(key)
            self.dispatcher.erased(key, at_ms)

    def is_well_since(self, at_s: float) -> bool:
        """Whether what it did then is known to all: it lives, and was not cut off since."""
        return not self.gone and not self.cut and self.cut_at_s < at_s

    def behind(self, key: Key) -> bool:
        """Whether it may not know yet how the webhook ended: it was cut off when another ended it."""
        return self.cut or self.cut_at_s >= 0

    async def kill(self) -> None:
        """Nothing of it runs any more."""
        self.gone = True
        for task in [*self.dispatcher.work._background._tasks, *self.dispatcher._calls]:
            task.cancel()
        await asyncio.sleep(0)

    async def end(self) -> None:
        """As the process does on SIGTERM."""
        await self.dispatcher.cancel()
        await self.dispatcher.work.leave()
        self.gone = True

    # -- the consumer

    def _consumer(self, listener: Listener) -> Any:
        self.listener = listener
        return self

    def start(self) -> None:
        asyncio.get_running_loop().call_later(self._rng.uniform(0.0, READ_S), self._read)

    def commit(self, offsets: Mapping[TP, int]) -> None:
        self._due.update(offsets)

    def hold(self, topics: Iterable[str]) -> None:
        self._held = bool(list(topics))

    async def stop(self) -> None:
        self.commit_due()
        self._stopping = True
        await self.group.leave(self)

    def commit_due(self) -> None:
        if self.cut or self.gone:
            return
        for tp, offset in self._due.items():
            if tp in self.owned and self.group.owners.get(tp) is self:
                self.topics.committed[tp] = offset
                self._checks.committed(tp, offset)
        self._due.clear()

    def _read(self) -> None:
        if self.gone or self._stopping:
            return
        if not self.cut:
            passed: dict[TP, int] = {}
            for tp in sorted(self.owned) if not self._held else ():
                at = self.positions[tp]
                batch = self.topics.results[tp][at : at + BATCH]
                if batch:
                    self.positions[tp] = passed[tp] = at + len(batch)
                    wanted = [
                        read for read in batch if self.listener.wants is None or self.listener.wants(read.headers)
                    ]
                    if wanted:
                        self.listener.on_batch(wanted)
            if passed:
                self.listener.on_passed(passed)
            self.commit_due()
        asyncio.get_running_loop().call_later(self._pause_s(), self._read)

    def _pause_s(self) -> float:
        """Between two reads: short while there are events."""
        now = asyncio.get_running_loop().time()
        return (
            self._rng.uniform(READ_S / 2, READ_S) if now < self._plan.span_s + 120.0 else self._plan.give_up_s / 2_000
        )

    # -- the broker's other sides

    def _load(self, partitions: Sequence[int]) -> list[WebhookDelivery]:
        if self.cut or self.group.broker_away:
            raise BrokerUnavailable("away")
        return self.topics.load(list(partitions))

    async def produce(self, topic: str, value: bytes, *, key: bytes | None, partition: int | None) -> None:
        give_up = asyncio.get_running_loop().time() + DELIVERY_S
        await asyncio.sleep(self._rng.uniform(0.001, 0.01))
        while self.cut or self.group.broker_away:
            if asyncio.get_running_loop().time() > give_up:
                raise BrokerUnavailable("away")
            await asyncio.sleep(0.2)
        self.topics.append(topic, partition, key, value, self.name)
        await asyncio.sleep(self._rng.uniform(0.001, 0.01))

    async def read(self, tp: TP, offset: int) -> RawMessage | None:
        await asyncio.sleep(self._rng.uniform(0.001, 0.01))
        while self.cut or self.group.broker_away:
            await asyncio.sleep(0.5)
        return self.topics.read(tp, offset)

    # -- receivers

    async def post(self, tenant: str, url: str, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> Answer:
        loop, host = asyncio.get_running_loop(), url.split("/")[2]
        key, number = (tenant, f"r{url.rsplit('/', 1)[1]}"), dict(headers)[b"webhook-id"].decode()
        self._checks.call_begins(self, key, number, host)
        began, kind = loop.time(), self._plan.receivers[host].at(loop.time())
        took_s, answer = {
            "well": (0.05, Answer(status_code=204)),
            "late": (self._rng.uniform(1.0, 14.0), Answer(status_code=204)),
            "slow": (self._plan.timeout_s, Answer(error="no answer")),
            "down": (0.01, Answer(error="not reached")),
            "gone": (0.05, Answer(status_code=410)),
            "busy": (0.05, Answer(status_code=503, retry_after_s=self._rng.choice([None, 30.0, 1e6]))),
        }[kind]
        try:
            await asyncio.sleep(took_s)
        except asyncio.CancelledError:
            kind = "broken off"
            raise
        finally:
            self._checks.call_ends(self, key, host, began, "well" if kind == "late" else kind)
        return answer


class Group:
    """Its coordinator. Partitions go to another once their owner has ended its work for them, or is taken for gone."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self.members: list[Process] = []
        self.owners: dict[TP, Process] = {}
        self.broker_away = False
        self._lock = asyncio.Lock()

    async def join(self, process: Process) -> None:
        self.members.append(process)
        await self.balance()

    async def leave(self, process: Process) -> None:
        """Or its session ran out."""
        if process in self.members:
            self.members.remove(process)
        await self.balance()

    async def balance(self) -> None:
        async with self._lock:
            await self._balance()

    async def _balance(self) -> None:
        members = sorted(self.members, key=lambda one: one.name)
        targets = {tp: members[at % len(members)] for at, tp in enumerate(self._topics.results)} if members else {}
        for owner in {one.name: one for one in self.owners.values()}.values():
            lost = [tp for tp, one in self.owners.items() if one is owner and targets.get(tp) is not owner]
            if lost and not owner.gone and not owner.cut:
                finishing = asyncio.shield(owner.listener.on_revoked(lost))  # it goes on, as under `GroupConsumer`
                try:
                    await asyncio.wait_for(finishing, REVOKE_S)
                except TimeoutError:
                    pass
                owner.commit_due()
                owner.owned.difference_update(lost)
            for tp in lost:
                del self.owners[tp]
        for member in members:
            new = [tp for tp, one in targets.items() if one is member and self.owners.get(tp) is not member]
            if new and not member.gone:
                for tp in new:
                    self.owners[tp] = member
                    member.positions[tp] = self._topics.committed[tp]
                member.owned.update(new)
                member.listener.on_assigned(new)

    async def heal(self, process: Process) -> None:
        """It hears that it was thrown out, if it was, and joins again."""
        lost = [tp for tp in sorted(process.owned) if self.owners.get(tp) is not process]
        if lost:
            await process.listener.on_revoked(lost)
            process.owned.difference_update(lost)
        if process not in self.members and not process.gone:
            await self.join(process)
