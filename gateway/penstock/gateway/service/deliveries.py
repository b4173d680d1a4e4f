"""The webhook of a request, as callers see what became of it: read from its topic when somebody asks."""

from __future__ import annotations

from typing import Any

from penstock.common.deliveries import delivery_key, read_delivery
from penstock.common.settings import KafkaSettings
from penstock.gateway.service.lookups import Lookups
from penstock.gateway.threads import Threads
from penstock.gateway.view.outcomes import Outcomes
from penstock.schemas.codec import Codec
from penstock.schemas.records import WebhookDelivery
from penstock.schemas.times import rfc3339
from penstock.schemas.topics import HEADER_CALLBACK

READ_S = 5.0


class DeliveryLookups:
    """Every gateway answers for every webhook, whichever process sends it."""

    def __init__(
        self, lookups: Lookups, outcomes: Outcomes, kafka: KafkaSettings, codec: Codec, threads: Threads
    ) -> None:
        self._lookups = lookups
        self._outcomes = outcomes
        self._kafka = kafka
        self._codec = codec
        self._threads = threads

    async def of_request(self, tenant: str, request_id: str) -> list[dict[str, Any]]:
        """Empty for a request without callback_url, and until the request has ended and was called for once.

        Raises NotFound, Gone for an erased one, BrokerUnavailable, Overloaded.
        """
        entry = await self._lookups.find(tenant, request_id)
        outcome = await self._outcomes.message(entry)
        if outcome is None or all(name != HEADER_CALLBACK for name, _ in outcome.headers):
            return []
        key = delivery_key(tenant, request_id)
        found = await self._threads.deliveries.run_for(
            tenant, read_delivery, self._kafka, self._codec, key, outcome.partition, outcome.timestamp_ms, READ_S
        )
        return [] if found is None else [delivery_json(found)]


def delivery_json(delivery: WebhookDelivery) -> dict[str, Any]:
    """A delivery as callers see it."""
    return {
        "object": "delivery",
        "webhook_id": delivery.webhook_id,
        "request_id": delivery.request_id,
        "type": delivery.type,
        "url": delivery.url,
        "state": delivery.state,
        "created_at": rfc3339(delivery.created_at),
        "updated_at": rfc3339(delivery.updated_at),
        "next_at": None if delivery.next_at is None else rfc3339(delivery.next_at),
        "attempts": [{**attempt.to_dict(), "at": rfc3339(attempt.at)} for attempt in delivery.attempts],
    }
