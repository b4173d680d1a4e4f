"""Which requests that have not ended a command for many is about. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.gateway.view.request_state import RequestState
from penstock.schemas.topics import priority_class

ALL_TENANTS = "*"


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestFilter:
    """What is None is any."""

    tenant: str | None = None
    """None: the caller's own; `ALL_TENANTS`: of all."""
    status: str | None = None
    conversation_id: str | None = None
    task: str | None = None
    model: str | None = None
    """That was asked for, or chosen."""
    klass: str | None = None
    older_than_ms: int | None = None

    def meets(self, entry: RequestState, now_ms: int) -> bool:
        """Whether it is one of them."""
        return (
            not entry.done
            and not entry.erased
            and self.conversation_id in (None, entry.conversation_id)
            and self.status in (None, entry.status_name)
            and self.task in (None, entry.task)
            and self.model in (None, entry.model)
            and self.klass in (None, priority_class(entry.priority))
            and (self.older_than_ms is None or entry.accepted_ms <= now_ms - self.older_than_ms)
        )
