"""Conversations with a topic each, as a broker tells them that may have started a moment ago."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.common import admin
from penstock.gateway.conversations.topics import OwnTopics
from penstock.gateway.settings import GatewaySettings
from penstock.schemas.errors import BrokerUnavailable


def test_a_broker_that_knows_no_topics_yet_does_not_say_that_there_are_no_conversations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sweep of artifacts at that moment took all that was made in conversations for left over."""
    known: dict[str, int] = {}

    def partition_counts(*_: Any, **__: Any) -> dict[str, int]:
        return known

    monkeypatch.setattr(admin, "partition_counts", partition_counts)
    layout = OwnTopics(GatewaySettings())
    with pytest.raises(BrokerUnavailable):
        layout.everyone()
    known |= {"inference.result": 1, "conversation.trip": 1, "conversations.acme.plan": 1}
    assert layout.everyone() == [("default", "trip"), ("acme", "plan")]
    assert layout.ids("acme") == ["plan"]
