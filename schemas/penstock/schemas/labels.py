"""What callers know a request by, beside its id. Its events echo it, and lists are filtered by it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from penstock.schemas.records import InferenceRequest, ResultEvent, StatusEvent
from penstock.schemas.topics import HEADER_KEY_ID

CORRELATION_ID = "correlation_id"
LABEL_CHARS = 200


class Labels(NamedTuple):
    """Each as the caller gave it, else None. A request has its correlation id in its metadata."""

    user_id: str | None = None
    session_id: str | None = None
    correlation_id: str | None = None
    key_id: str | None = None
    """Of the API key that submitted it. Only the outcome echoes it, for usage."""

    def with_key(self, headers: Iterable[tuple[str, bytes | None]]) -> Labels:
        """The same with the key that a request's headers name, if they do."""
        for name, value in headers:
            if name == HEADER_KEY_ID and value is not None:
                return self._replace(key_id=label(value.decode(errors="replace")))
        return self

    def of_events(self) -> dict[str, str | None]:
        """What every event echoes."""
        return {"user_id": self.user_id, "session_id": self.session_id, "correlation_id": self.correlation_id}


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
    return Labels(label(user_id), label(session_id), label(correlation_id))


def label(value: Any) -> str | None:
    """A label as it may be in every event: short text that can be written, else None. Metadata may be longer."""
    if not isinstance(value, str) or not 0 < len(value) <= LABEL_CHARS:
        return None
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return None
    return value
