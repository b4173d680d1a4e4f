"""Orders of operators about models and classes: written as desired state, which every worker of the pool follows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Any

from penstock.common import admin
from penstock.common.clock import now_ms
from penstock.common.desired import Desired, read_desired
from penstock.common.kafka_errors import missing_topic, unavailable
from penstock.common.model_entry import ModelEntry, parse_entry
from penstock.common.orders import in_force
from penstock.common.outgoing import Outgoing, desired_record
from penstock.common.settings import KafkaSettings
from penstock.common.transport import AsyncTransport
from penstock.gateway.service.dependencies import Probe, Problem
from penstock.gateway.service.facts import Facts
from penstock.gateway.service.model_states import (
    Json,
    admin_models,
    desired_json,
    find_one,
    not_following,
    observing_topic,
    order_in_force_json,
    order_json,
)
from penstock.gateway.service.submitting import SOURCE
from penstock.gateway.threads import Threads
from penstock.gateway.view.liveness import ModelId
from penstock.schemas.codec import Codec
from penstock.schemas.desired import CLASS, MODEL, desired_key, key_of, model_key, ordered
from penstock.schemas.errors import Conflict, InvalidRequest, NotFound, PenstockError
from penstock.schemas.records import DesiredState, WorkerState
from penstock.schemas.topics import CLASSES


class ModelOrders:
    """Reads the desired state, merges one order into it, writes it. One order at a time in this process.

    Two gateways that change one model at the same moment may both begin from the same state: the later record counts.
    """

    def __init__(
        self,
        transport: AsyncTransport,
        facts: Facts,
        kafka: KafkaSettings,
        codec: Codec,
        threads: Threads,
        follow: Callable[[Sequence[DesiredState]], None],
    ) -> None:
        """`follow` gets all desired state, whenever it was read or changed here."""
        self._transport = transport
        self._facts = facts
        self._kafka = kafka
        self._codec = codec
        self._threads = threads
        self._follow = follow
        self._one_at_a_time = asyncio.Lock()

    async def models(self) -> list[Json]:
        """Every model with its engines and its desired state, which is unknown while its topic is missing.

        Raises BrokerUnavailable.
        """
        try:
            desired = await self._read_desired()
        except NotFound:
            desired = None
        return self._models(desired, observing_topic(self._facts.live_workers(), await self._topic_id()))

    async def model(self, name: str, pool: str | None) -> Json:
        """One of them, by id or alias. Raises ModelNotFound, InvalidRequest, BrokerUnavailable."""
        return find_one(await self.models(), name, pool)

    async def observed(self, revision: int, pool: str | None) -> Json:
        """Which live workers of the pool have observed the order of this revision. Raises BrokerUnavailable."""
        topic_id = await self._topic_id()
        if topic_id is None:
            raise unavailable(missing_topic(self._kafka.names.desired))
        return order_json(observing_topic(self._facts.live_workers(), topic_id), pool, revision)

    async def not_followed_by(self) -> list[str]:
        """The live workers that are late in observing orders. Raises NotFound when the topic is missing,
        BrokerUnavailable.
        """
        desired, topic_id = await self._read_desired(), await self._topic_id()
        return not_following(
            self._facts.live_workers(), desired.values(), topic_id, now_ms(), self._facts.worker_late_ms
        )

    async def ordered(self) -> list[Desired]:
        """The orders that make models and classes other than they are configured. Raises BrokerUnavailable."""
        return in_force(await self._desired())

    async def in_force(self) -> list[Json]:
        """The same as callers see them."""
        return [order_in_force_json(one) for one in await self.ordered()]

    async def order(self, name: str, action: str, *, pool: str | None, by: str | None) -> Json:
        """Load, unload, pin, unpin, pause, resume or remove a model; its desired state after that.

        Raises as `model`, and Conflict when a pinned model is to be unloaded.
        """
        async with self._one_at_a_time:
            desired = await self._desired()
            model = find_one(self._models(desired, self._facts.live_workers()), name, pool)
            if action == "unload" and model["pinned"]:
                raise Conflict(
                    f"the model {model['id']} is pinned, which keeps it loaded: unpin it first", param="action"
                )
            answer = await self._order(desired, MODEL, model["id"], action, pool=model["pool"], by=by)
            if action == "remove":  # should no worker be there to say so
                await self._withdraw(model["id"], model["pool"])
            return answer

    async def add(self, body: Any, *, replace: bool, by: str | None) -> Json:
        """Serve one more model, or with `replace` change one. Its desired state after that.

        Raises InvalidRequest (wrong, or of no pool), Conflict when a name is taken, BrokerUnavailable.
        """
        entry = parse_entry(body)
        await self._check_pool(entry.pool)
        async with self._one_at_a_time:
            desired = await self._desired()
            _check_free(self._models(desired, self._facts.live_workers()), entry, replace=replace)
            text = entry.model_dump_json(exclude_defaults=True)
            return await self._order(desired, MODEL, entry.id, "add", pool=entry.pool, by=by, entry=text)

    async def order_class(self, name: str, action: str, *, pool: str | None, by: str | None) -> Json:
        """Pause or resume a class of priority. Raises NotFound for one that there is not, BrokerUnavailable."""
        if name not in CLASSES:
            raise NotFound(f"the class {name} does not exist; there are {', '.join(CLASSES)}", param="class")
        async with self._one_at_a_time:
            return await self._order(await self._desired(), CLASS, name, action, pool=pool, by=by)

    async def withdraw_removed(self, models: Collection[ModelId]) -> list[ModelId]:
        """Withdraw the records of those that were removed, and return these. Raises BrokerUnavailable."""
        async with self._one_at_a_time:
            try:
                desired = await self._read_desired()
            except NotFound:
                return []
            removed = [
                model
                for model in models
                if (found := desired.get(desired_key(MODEL, *model))) is not None and found.state.removed
            ]
            for model in removed:
                await self._withdraw(*model)
        return removed

    # -- inside

    async def _check_pool(self, pool: str | None) -> None:
        """Raises InvalidRequest for a pool without topics: no worker reads it, and no request could name it."""
        wanted = set(self._kafka.names.request_topics(pool))
        missing = wanted - (await self._threads.metadata.run(admin.partition_counts, self._kafka)).keys()
        if missing:
            raise InvalidRequest(
                f"there is no pool {pool}: `penstock topics create --pool {pool}` makes its topics", param="pool"
            )

    async def _withdraw(self, name: str, pool: str | None) -> None:
        """Write that no worker reports the model."""
        key = model_key(name, pool).encode()
        await self._produce(Outgoing(topic=self._kafka.names.model, key=key, value=b"", headers=[]))

    def _models(self, desired: dict[str, Desired] | None, workers: list[WorkerState]) -> list[Json]:
        return admin_models(self._facts.models(), workers, desired, self._facts.liveness().without_worker)

    async def _topic_id(self) -> str | None:
        return await self._threads.metadata.run(admin.topic_id, self._kafka, self._kafka.names.desired)

    async def _read_desired(self) -> dict[str, Desired]:
        """Raises NotFound when the topic is missing, BrokerUnavailable."""
        desired = await self._threads.metadata.run(read_desired, self._kafka, self._codec)
        self._follow([one.state for one in desired.values()])
        return desired

    async def _desired(self) -> dict[str, Desired]:
        """What an order begins from. Raises BrokerUnavailable, also when the topic is missing."""
        try:
            return await self._read_desired()
        except NotFound as error:
            raise unavailable(error) from error

    async def _order(
        self,
        desired: dict[str, Desired],
        kind: str,
        name: str,
        action: str,
        *,
        pool: str | None,
        by: str | None,
        entry: str | None = None,
    ) -> Json:
        """Write the desired state after the order; with the revision under which the broker acknowledged it."""
        former = desired.get(desired_key(kind, name, pool))
        state = None if former is None else former.state
        state = ordered(state, kind=kind, name=name, pool=pool, action=action, now_ms=now_ms(), entry=entry, by=by)
        revision = await self._produce(desired_record(state, self._kafka.names, self._codec, source=SOURCE))
        self._follow([one.state for one in {**desired, key_of(state): Desired(state, revision)}.values()])
        return desired_json(state, revision)

    async def _produce(self, record: Outgoing) -> int:
        """The offset of the record, once the broker has acknowledged it."""
        try:
            delivery = await self._transport.produce(
                record.topic, record.value or None, key=record.key, headers=record.headers or None
            )
        except NotFound as error:
            raise unavailable(error) from error
        return delivery.offset


def _check_free(models: list[Json], entry: ModelEntry, *, replace: bool) -> None:
    """Raises Conflict when another model of the pool has one of the entry's names."""
    for model in models:
        if model["pool"] != entry.pool:
            continue
        if model["id"] == entry.id:
            if replace:
                continue
            raise Conflict(f"the model {entry.id} exists; remove it first, or replace it", param="id")
        taken = {model["id"], *model["aliases"]} & {entry.id, *entry.aliases}
        if taken:
            raise Conflict(f"the name {min(taken)} is taken by the model {model['id']}", param="aliases")


def orders_probe(orders: ModelOrders) -> Probe:
    """Checks that the topic of orders exists and that the live workers follow it."""

    async def probe() -> Problem | None:
        try:
            late = await orders.not_followed_by()
        except NotFound as error:
            return Problem(error.message)
        except PenstockError as error:
            return Problem("the orders about models and classes cannot be read", error.message)
        return Problem(f"{', '.join(late)} do not follow the orders about models and classes") if late else None

    return probe
