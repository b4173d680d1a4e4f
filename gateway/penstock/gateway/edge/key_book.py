"""The API keys and the limits of tenants that `inference.key` holds, folded record by record. No I/O."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.gateway.edge.key_records import KeyRecord
from penstock.schemas.errors import BrokerUnavailable
from penstock.schemas.records import KeyState

logger = logging.getLogger(__name__)

KEY, REVOKED, TENANT = "key", "revoked", "tenant"


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantOrder:
    """An operator's order about the limits of a tenant."""

    limits: Mapping[str, Any]
    """By name what replaces the configured limits; None: no limit."""
    updated_at: int
    """Milliseconds since the epoch."""
    updated_by: str | None


class KeyBook:
    """Belongs to the event loop. A revoked id stays revoked, whatever a gateway that had not read of it writes later.
    Of two changes of one version of a key, written by two gateways, the first counts.

    `unread`: why the topic is not known yet; None if it is. `on_limits` gets a tenant whose ordered limits change, and
    these limits, or None when the configured ones hold again.
    """

    def __init__(self, unread: str | None = None) -> None:
        self.unread = unread
        self.on_limits: Callable[[str, Mapping[str, Any] | None], None] = lambda tenant, limits: None
        self.keys: dict[str, KeyRecord] = {}
        self.limits: dict[str, TenantOrder] = {}
        self._revoked: set[str] = set()

    def replace(self, other: KeyBook) -> None:
        """Hold what `other` holds, which has read all of the topic, and nothing else."""
        for tenant in self.limits.keys() - other.limits.keys():
            self.on_limits(tenant, None)
        for tenant, order in other.limits.items():
            self.on_limits(tenant, order.limits)
        self.keys, self.limits, self._revoked, self.unread = other.keys, other.limits, other._revoked, None

    def get(self, key_id: str) -> KeyRecord | None:
        """Raises BrokerUnavailable while the topic has not been read: the key may be there."""
        if self.unread is not None:
            raise BrokerUnavailable(self.unread, retry_after_s=1)
        return self.keys.get(key_id)

    def is_revoked(self, key_id: str) -> bool:
        return key_id in self._revoked

    def apply(self, key: str, state: KeyState | None) -> None:
        """One record, by its Kafka key; None: a tombstone. One that cannot be read, as of a newer release, counts as
        none: admitting a key with fewer limits would be wrong.
        """
        kind, _, subject = key.partition("/")
        if kind == REVOKED:
            self._revoke(subject, revoked=state is not None)
        elif kind in (KEY, TENANT):
            try:
                entry = None if state is None else _entry(state)
                self._keep_key(subject, entry) if kind == KEY else self._keep_limits(subject, state, entry)
            except Exception as error:
                logger.warning("keys.unreadable key=%s error=%s", key, type(error).__name__)
                self.apply(key, None)

    def _revoke(self, key_id: str, *, revoked: bool) -> None:
        if revoked:
            self._revoked.add(key_id)
            self.keys.pop(key_id, None)
        else:
            self._revoked.discard(key_id)

    def _keep_key(self, key_id: str, entry: Mapping[str, Any] | None) -> None:
        if entry is None:
            self.keys.pop(key_id, None)
        elif key_id not in self._revoked:
            record, former = KeyRecord.from_dict({**entry, "id": key_id}), self.keys.get(key_id)
            if former is None or record.version > former.version:
                self.keys[key_id] = record

    def _keep_limits(self, tenant: str, state: KeyState | None, entry: Mapping[str, Any] | None) -> None:
        if state is None or entry is None:
            self.limits.pop(tenant, None)
        else:
            self.limits[tenant] = TenantOrder(limits=entry, updated_at=state.updated_at, updated_by=state.updated_by)
        self.on_limits(tenant, entry)


def _entry(state: KeyState) -> dict[str, Any]:
    """Raises ValueError."""
    entry = json.loads(state.entry or "{}")
    if not isinstance(entry, dict):
        raise ValueError("the entry is not an object")
    return entry
