"""What a flow is made with: its settings, and what it asks of the catalog and of the book of commands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from penstock.processors.core.fleet.views import PlacementSettings
from penstock.processors.core.queue.lifetimes import LifetimeSettings
from penstock.processors.core.queue.slack import SlackSettings
from penstock.processors.core.requests.registry import OUTPUT_BYTES
from penstock.processors.core.work.retries import RetrySettings
from penstock.schemas.abilities import Need
from penstock.schemas.choosing import Choice
from penstock.schemas.records import ControlCommand


class Catalog(Protocol):
    """Which lane serves a request."""

    def resolve(self, task: str, model: str | None, need: Need | None = None) -> Choice:
        """The model, which is the lane's name, and why when none was named.

        Raises ModelNotFound, UnsupportedParameter when it lacks what the request needs.
        """
        ...


class Commands(Protocol):
    """The control topic as remembered."""

    def apply(self, command: ControlCommand, now_ms: int) -> bool: ...
    def cancelled(self, tenant: str, request_id: str) -> ControlCommand | None: ...
    def priority(self, tenant: str, request_id: str) -> int | None: ...
    def deleted_at(self, tenant: str, conversation_id: str) -> int | None: ...
    def erasure(self, tenant: str, request_id: str, append_time_ms: int) -> ControlCommand | None: ...
    def erasures(self) -> list[ControlCommand]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSettings:
    """Limits and lingers; seconds unless named otherwise."""

    worker_id: str | None = None
    """As histories of requests, and the reports of workers, name this worker."""
    pool: str | None = None
    model_absent_s: float = 60.0
    """A request fails if no live worker of the pool has reported its model for so long."""
    aging_s: float = 20.0
    aged_share: int = 8
    commit_span: int = 50_000
    intake_bytes: int = 256 << 20
    output_bytes: int = OUTPUT_BYTES
    """Of finished outputs in memory, at which nothing more starts."""
    chunk_linger_s: float = 0.03
    status_linger_s: float = 0.025
    max_execution_s: float = 900.0
    retries: RetrySettings = field(default_factory=RetrySettings)
    keep_least_s: float = 60.0
    """So long at least a store is asked to keep an output, also if the deadline is near or has passed."""
    affinity_s: float = 0.5
    """So long a conversation waits for the replica that has its beginning."""
    longest_reservation_s: float = 30.0
    """So long room is kept from small requests for one that needs much, at first."""
    placement: PlacementSettings = field(default_factory=PlacementSettings)
    slack: SlackSettings | None = None
    """None: low work is held back by nothing but the order."""
    lifetimes: LifetimeSettings | None = None
    """None: a request that names no deadline has the default one."""
