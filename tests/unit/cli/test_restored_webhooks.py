"""Which outcome a waiting webhook reports after its topics were restored."""

from __future__ import annotations

import pytest

from kit.records import delivery, outcome
from penstock.cli.restored.webhooks import WaitingWebhooks
from penstock.common.deliveries import CLOCKS_DIFFER_MS
from penstock.schemas.records import Place

MADE_MS = 1_000_000
AFTER_MS = MADE_MS + CLOCKS_DIFFER_MS


@pytest.mark.parametrize(
    ("outcomes", "moved_to"),
    [
        ([], None),
        ([(3, MADE_MS)], 3),
        ([(3, AFTER_MS + 1)], None),
        ([(3, MADE_MS - 9), (5, AFTER_MS), (9, AFTER_MS + 1)], 5),
        ([(5, MADE_MS), (3, MADE_MS - 9)], 5),
        ([(3, MADE_MS - 9), (7, MADE_MS)], None),
        ([(7, MADE_MS - 9), (8, MADE_MS)], None),
    ],
    ids=["none", "one", "later", "newest before", "in any order", "its own", "its own is older"],
)
def test_a_webhook_reports_its_own_outcome_or_the_newest_of_before(
    outcomes: list[tuple[int, int]], moved_to: int | None
) -> None:
    """An id that was used again has several."""
    webhook = delivery("r", 7, created_at=MADE_MS)
    webhooks = WaitingWebhooks([webhook, delivery("sent", state="delivered", created_at=MADE_MS)])
    for request_id in ("r", "sent", "other"):
        for offset, at_ms in outcomes:
            event = outcome(request_id, tenant="t", created_at=at_ms)
            webhooks.on_outcome(event, Place(topic=webhook.place.topic, partition=0, offset=offset))
    assert [(one.request_id, one.place.offset) for one in webhooks.moved()] == ([("r", moved_to)] if moved_to else [])
