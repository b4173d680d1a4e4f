"""Why a request does not run yet: one reason of the few that callers see, the one that must end first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.schemas.records import TIMELESS_REASONS, WaitingFor

Reason = Literal["class", "tenant_share", "model_loading", "memory", "conversation", "slack", "paused", "no_worker"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingFacts:
    """What is known of a waiting request. Bytes are of the device with the most room; None where nothing is known."""

    position: int | None = None
    """Requests that start before it, all models of its worker together."""
    paused: bool = False
    """Its model or its class was paused."""
    line_is_held: bool = False
    """Another turn of its conversation stands before it."""
    memory_short: bool = False
    """Its model waits for memory, or the request does not fit into what its engines have free."""
    model_ready: bool = True
    held_by_slack: bool = False
    others_tenant_next: bool = False
    """Of its class and model another tenant's request is next."""
    need_bytes: int | None = None
    free_bytes: int | None = None
    starts_in_s: float | None = None


def waiting_for(facts: WaitingFacts, now_ms: int) -> WaitingFor:
    """The public answer. `now_ms`: milliseconds since the epoch."""
    reason = _reason(facts)
    memory = reason == "memory"
    # What stands before a turn may be of another model, and wait for anything.
    told = facts.starts_in_s is not None and reason != "conversation" and reason not in TIMELESS_REASONS
    return WaitingFor(
        reason=reason,
        position=facts.position,
        need_bytes=facts.need_bytes if memory else None,
        free_bytes=facts.free_bytes if memory else None,
        estimated_start_at=now_ms + round(1000 * (facts.starts_in_s or 0)) if told else None,
    )


def _reason(facts: WaitingFacts) -> Reason:
    """In the order in which they must end: with a slot free only the order matters."""
    if facts.paused:
        return "paused"
    if facts.line_is_held:
        return "conversation"
    if facts.memory_short:
        return "memory"
    if not facts.model_ready:
        return "model_loading"
    if facts.held_by_slack:
        return "slack"
    return "tenant_share" if facts.others_tenant_next else "class"
