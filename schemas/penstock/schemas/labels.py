"""What callers know a request by, beside its id. Its events echo it, and lists are filtered by it. Pure."""

from __future__ import annotations

from typing import NamedTuple

from penstock.schemas.records import InferenceRequest, ResultEvent, StatusEvent

CORRELATION_ID = "correlation_id"


class Labels(NamedTuple):
    """Each as the caller gave it, else None. A request has its correlation id in its metadata."""

    user_id: str | None = None
    session_id: str | None = None
    correlation_id: str | None = None


NO_LABELS = Labels()


def labels_of(record: InferenceRequest | ResultEvent | StatusEvent) -> Labels:
    """The labels of a request, or those that an event of it echoes."""
    user_id, session_id = record.user_id, record.session_id
    if isinstance(record, InferenceRequest):
        correlation_id = record.metadata.get(CORRELATION_ID) if record.metadata else None
    else:
        correlation_id = record.correlation_id
    if user_id is None and session_id is None and correlation_id is None:
        return NO_LABELS
    return Labels(user_id, session_id, correlation_id)
