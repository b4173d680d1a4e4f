"""What this gateway reads and writes of orders is told to its fleet, which declares models by it."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

from kit.records import CODEC
from penstock.common.desired import Desired
from penstock.common.settings import KafkaSettings
from penstock.gateway.service.model_orders import ModelOrders
from penstock.schemas.desired import key_of
from penstock.schemas.records import DesiredState


async def test_orders_are_followed_when_they_are_read_and_when_one_is_given_here() -> None:
    removed = DesiredState(kind="model", name="m", action="remove", created_at=1, removed=True)
    transport, threads, follow = AsyncMock(), Mock(), Mock()
    threads.metadata.run = AsyncMock(return_value={key_of(removed): Desired(removed, 3)})
    transport.produce.return_value = SimpleNamespace(offset=4)
    orders = ModelOrders(transport, Mock(), KafkaSettings(), CODEC, threads, follow)

    assert [one.state for one in await orders.ordered()] == [removed]
    follow.assert_called_once_with([removed])

    await orders.order_class("low", "pause", pool="gpu", by="k")
    ((known,), _) = follow.call_args
    found = [(one.kind, one.name, one.pool, one.paused) for one in known]
    assert found == [("model", "m", None, False), ("class", "low", "gpu", True)]
