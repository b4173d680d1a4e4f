"""What a gateway says while it starts: whom it serves before it has seen what stood in the topics."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gateway_parts import service_with
from penstock.gateway.context import GatewayContext
from penstock.gateway.edge.auth import AuthPolicy
from penstock.gateway.settings import GatewaySettings
from penstock.schemas.errors import BrokerUnavailable, Overloaded

PROGRESS = "catching up with the topics: 5 of 9 records"


@pytest.mark.parametrize("scope", ["read", "submit", "cancel", None])
def test_callers_wait_until_it_has_caught_up_and_operators_do_not(scope: str | None) -> None:
    """A chat was accepted meanwhile and hung: its own record was far behind those that were read."""
    context = GatewayContext(settings=GatewaySettings(), policy=AuthPolicy.build())
    assert isinstance(context.awaited(scope), BrokerUnavailable)
    facts = SimpleNamespace(catching_up=lambda: PROGRESS)
    context.connected = service_with(facts)
    refused = context.awaited(scope)
    assert isinstance(refused, Overloaded)
    assert PROGRESS in refused.message
    assert refused.retry_after_s == 1
    assert context.awaited("admin") is None
    facts.catching_up = lambda: None
    assert context.awaited(scope) is None
