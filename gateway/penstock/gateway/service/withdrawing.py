"""Withdrawing the records of models that were removed and that no live worker withdraws itself."""

from __future__ import annotations

import asyncio
import logging
import random

from penstock.gateway.service.facts import Facts
from penstock.gateway.service.model_orders import ModelOrders
from penstock.gateway.view.liveness import ModelId
from penstock.schemas.errors import PenstockError

logger = logging.getLogger(__name__)

LOOK_S = 2.0


class Withdrawing:
    """A worker may report a model once more before it observes that the model was removed, and be killed then.

    The record would stand for a day as that of a model that waits for a worker.
    """

    def __init__(self, facts: Facts, orders: ModelOrders) -> None:
        self._facts = facts
        self._orders = orders
        self._looked_at = frozenset[tuple[ModelId, int]]()
        """The records of models without a live worker for which the orders were read: each model and its time."""

    async def run(self) -> None:
        """Look every few seconds, until it is cancelled. Several gateways do not look at the same moment."""
        while True:
            await asyncio.sleep(LOOK_S * random.uniform(0.7, 1.3))
            try:
                await self.look()
            except PenstockError as error:
                logger.info("models.not_withdrawn reason=%s", error)
            except Exception:
                logger.exception("models.not_withdrawn")

    async def look(self) -> None:
        """Read the orders when there is another record of a model without a live worker. Raises BrokerUnavailable."""
        if not self._facts.readiness().ready:
            return
        liveness = self._facts.liveness()
        records = {(one.model, one.pool): one.updated_at for one in liveness.models}
        without = frozenset((model, records[model]) for model in liveness.without_worker)
        if without - self._looked_at:
            for model, pool in await self._orders.withdraw_removed(liveness.without_worker):
                logger.info("models.withdrawn model=%s pool=%s", model, pool)
        self._looked_at = without
