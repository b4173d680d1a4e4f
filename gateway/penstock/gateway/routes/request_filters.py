"""Which requests a call means, by the values that callers give."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request

from penstock.common.clock import now_ms
from penstock.gateway.context import service_of
from penstock.gateway.view.filters import STATUS_GROUPS, RequestFilter
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.records import PAYLOAD_FIELDS, STATUS_RANKS, WAITING_REASONS
from penstock.schemas.topics import CLASSES

MOST_AGE_S = 10 * 24 * 3_600


def checked(where: RequestFilter) -> RequestFilter:
    """The filter itself. Raises InvalidRequest for a status, task, class or reason that no request ever has."""
    for name, value, known in (
        ("status", where.status, (*STATUS_RANKS, *STATUS_GROUPS)),
        ("task", where.task, PAYLOAD_FIELDS),
        ("class", where.klass, CLASSES),
        ("waiting_for", None if where.waits_for is None else where.waits_for.reason, WAITING_REASONS),
    ):
        if value is not None and value not in known:
            raise InvalidRequest(f"{name} must be one of {', '.join(known)}", param=name)
    return where


def queried(
    request: Request,
    status: Annotated[
        str | None,
        Query(
            description="`waiting`: any of a request that has not ended and does not run. "
            "`unsuccessful`: failed, dead_lettered or expired."
        ),
    ] = None,
    conversation_id: str | None = None,
    user_id: str | None = None,
    session_id: str | None = None,
    correlation_id: Annotated[str | None, Query(description="That of the requests' metadata.")] = None,
    task: str | None = None,
    model: Annotated[str | None, Query(description="As the requests show it.")] = None,
    klass: Annotated[str | None, Query(alias="class", description="high, medium or low, by priority.")] = None,
    id_contains: Annotated[str | None, Query(min_length=1, description="A part of the id.")] = None,
    older_than_s: Annotated[
        float | None, Query(ge=0, le=MOST_AGE_S, description="Accepted at least so many seconds ago.")
    ] = None,
    waiting_for: Annotated[str | None, Query(description="Those that wait for this reason.")] = None,
) -> RequestFilter:
    """Of a query string. Raises as `checked`."""
    return checked(
        RequestFilter(
            status=status,
            conversation_id=conversation_id,
            user_id=user_id,
            session_id=session_id,
            correlation_id=correlation_id,
            task=task,
            model=model,
            klass=klass,
            id_contains=id_contains,
            accepted_until_ms=None if older_than_s is None else now_ms() - round(older_than_s * 1000),
            waits_for=None if waiting_for is None else service_of(request).facts.waits_for(waiting_for),
        )
    )
