"""What operators order of models and classes: written as desired state, which every worker of the pool obeys."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.common.clock import now_ms
from penstock.common.desired import Wishes, read_wishes
from penstock.common.model_entry import ModelEntry, parse_entry
from penstock.common.outgoing import Outgoing, desired_record
from penstock.common.settings import KafkaSettings
from penstock.common.transport import AsyncTransport
from penstock.gateway.service.facts import Facts
from penstock.gateway.service.model_states import Json, admin_models, desired_json, find_one
from penstock.gateway.service.submitting import SOURCE
from penstock.gateway.threads import Threads
from penstock.schemas.codec import Codec
from penstock.schemas.desired import CLASS, MODEL, desired_key, model_key, ordered
from penstock.schemas.errors import BrokerUnavailable, Conflict, NotFound
from penstock.schemas.records import DesiredState
from penstock.schemas.topics import CLASSES


class ModelOrders:
    """Reads what is wanted, adds one order to it, writes it. One order at a time in this process.

    Two gateways that change one model at the same moment may both begin from the same wish: the later record counts.
    """

    def __init__(
        self, transport: AsyncTransport, facts: Facts, kafka: KafkaSettings, codec: Codec, threads: Threads
    ) -> None:
        self._transport = transport
        self._facts = facts
        self._kafka = kafka
        self._codec = codec
        self._threads = threads
        self._one_at_a_time = asyncio.Lock()

    async def models(self) -> list[Json]:
        """Every model with its engines and what is wanted of it. Raises BrokerUnavailable."""
        return self._models(await self._wishes())

    async def model(self, name: str, pool: str | None) -> Json:
        """One of them, by id or alias. Raises ModelNotFound, InvalidRequest, BrokerUnavailable."""
        return find_one(await self.models(), name, pool)

    async def order(self, name: str, action: str, *, pool: str | None, by: str | None) -> Json:
        """Load, unload, pin, unpin, pause, resume or remove a model; the wish as it is then. Raises as `model`."""
        async with self._one_at_a_time:
            wishes = await self._wishes()
            model = find_one(self._models(wishes), name, pool)
            wish = await self._order(wishes, MODEL, model["id"], action, pool=model["pool"], by=by)
            if action == "remove":  # should no worker be there to say so
                key = model_key(model["id"], model["pool"])
                await self._produce(Outgoing(topic=self._kafka.names.model, key=key.encode(), value=b"", headers=[]))
            return desired_json(wish)

    async def add(self, body: Any, *, replace: bool, by: str | None) -> Json:
        """Serve one more model, or with `replace` change one. The wish, and the model as its workers will tell of it.

        Raises InvalidRequest for an entry that is wrong, Conflict when a name is taken, BrokerUnavailable.
        """
        entry = parse_entry(body)
        async with self._one_at_a_time:
            wishes = await self._wishes()
            _check_free(self._models(wishes), entry, replace=replace)
            text = entry.model_dump_json(exclude_defaults=True)
            wish = await self._order(wishes, MODEL, entry.id, "add", pool=entry.pool, by=by, entry=text)
            return desired_json(wish)

    async def order_class(self, name: str, action: str, *, pool: str | None, by: str | None) -> Json:
        """Pause or resume a class of priority. Raises NotFound for one that there is not, BrokerUnavailable."""
        if name not in CLASSES:
            raise NotFound(f"the class {name} does not exist; there are {', '.join(CLASSES)}", param="class")
        async with self._one_at_a_time:
            return desired_json(await self._order(await self._wishes(), CLASS, name, action, pool=pool, by=by))

    # -- inside

    def _models(self, wishes: Wishes) -> list[Json]:
        facts = self._facts
        return admin_models(facts.models(), facts.live_workers(), wishes, facts.liveness().without_worker)

    async def _wishes(self) -> Wishes:
        try:
            return await self._threads.metadata.run(read_wishes, self._kafka, self._codec)
        except NotFound as error:
            raise BrokerUnavailable(f"{error}; `penstock topics create` makes it", retry_after_s=5) from error

    async def _order(
        self,
        wishes: Wishes,
        kind: str,
        name: str,
        action: str,
        *,
        pool: str | None,
        by: str | None,
        entry: str | None = None,
    ) -> DesiredState:
        former = wishes.get(desired_key(kind, name, pool))
        wish = ordered(former, kind=kind, name=name, pool=pool, action=action, now_ms=now_ms(), entry=entry, by=by)
        await self._produce(desired_record(wish, self._kafka.names, self._codec, source=SOURCE))
        return wish

    async def _produce(self, record: Outgoing) -> None:
        try:
            await self._transport.produce(
                record.topic, record.value or None, key=record.key, headers=record.headers or None
            )
        except NotFound as error:
            raise BrokerUnavailable(f"the broker does not know {record.topic} now", retry_after_s=1) from error


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
