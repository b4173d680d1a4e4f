"""One subscriber's frames."""

from __future__ import annotations

import asyncio

import pytest

from penstock.gateway.service.subscriptions import Stopping, Subscription
from penstock.gateway.view.hub import Gone, Hub


async def test_who_comes_while_the_gateway_stops_is_told_so() -> None:
    """The hub wakes such a client before it has handed it out: that raised, and callers heard 500."""
    hub = Hub()
    hub.drop_all(Gone.STOPPING)
    late = Subscription(hub, single=True)
    assert await asyncio.wait_for(late.gone(), 5) is Gone.STOPPING
    with pytest.raises(Stopping):
        await asyncio.wait_for(late.next_frame(), 5)
    late.close()
    assert hub.connected == 0
