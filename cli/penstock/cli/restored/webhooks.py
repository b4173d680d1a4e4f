"""Webhooks that wait, and where the outcomes that they report are in the restored result topic. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from penstock.common.deliveries import CLOCKS_DIFFER_MS
from penstock.schemas.records import Place, ResultEvent, WebhookDelivery


class WaitingWebhooks:
    """Takes the outcomes of the result topic. An id may have several: ids are used again.

    A webhook keeps its place where an outcome of its request is there. Else it reports the newest outcome that was
    published before it was made.
    """

    def __init__(self, deliveries: Iterable[WebhookDelivery]) -> None:
        self._waiting = {(one.tenant, one.request_id): one for one in deliveries if one.state == "waiting"}
        self._kept = set[tuple[str, str]]()
        self._found: dict[tuple[str, str], tuple[int, Place]] = {}

    def on_outcome(self, event: ResultEvent, place: Place) -> None:
        """Take an outcome; `place` is where it is now."""
        key = event.tenant, event.request_id
        if (webhook := self._waiting.get(key)) is None:
            return
        if place == webhook.place:
            self._kept.add(key)
        newest_ms, _ = self._found.get(key, (-1, place))
        if newest_ms < event.created_at <= webhook.created_at + CLOCKS_DIFFER_MS:
            self._found[key] = event.created_at, place

    def moved(self) -> list[WebhookDelivery]:
        """Those whose outcome is at another place, with that place."""
        found = ((key, place) for key, (_, place) in self._found.items() if key not in self._kept)
        return [replace(self._waiting[key], place=place) for key, place in found]
