"""What a record that was delivered turns out to be: a request, or a reason why it is none."""

from __future__ import annotations

from typing import Literal

from penstock.schemas.errors import PenstockError
from penstock.schemas.labels import NO_LABELS, Labels
from penstock.schemas.records import InferenceRequest, Origin, record


@record
class Taken:
    """A readable request. `error` is set when it can only fail at once (a task or field that is not built)."""

    request: InferenceRequest
    origin: Origin
    klass: str
    conversation: str | None
    attempt: int
    deadline_ms: int | None
    error: PenstockError | None
    belongs_on: int | None
    """The partition where a conversation's record belongs, when that is another one."""
    cost: int
    """Estimated tokens, at least 1."""
    size_bytes: int
    """Of key, value and headers."""
    pool: str | None = None
    """The other pool whose workers it is for; None when it is for this worker's own."""
    names_deadline: bool = True
    """False: nobody named one, nor a time to start, and `deadline_ms` is the default."""
    start_after_ms: int | None = None

    @property
    def name(self) -> str:
        """The request within all tenants."""
        return f"{self.request.tenant}/{self.request.request_id}"

    @property
    def moves(self) -> bool:
        """Whether its record belongs elsewhere."""
        return self.belongs_on is not None or self.pool is not None


@record
class Poison:
    """A record that no worker can run. `request_id` is known when the record was a readable object at least."""

    reason: PenstockError
    request_id: str | None
    tenant: str | None
    origin: Origin
    attempt: int
    callback_url: str | None = None
    labels: Labels = NO_LABELS
    fault: Exception | None = None
    """What reading it raised, if that is a fault of ours."""
    name: None = None
    moves: Literal[False] = False

    @property
    def request(self) -> InferenceRequest:
        return InferenceRequest(
            request_id=self.request_id or "",
            tenant=self.tenant or "default",
            task="text_generation",
            created_at=self.origin.append_time_ms,
            callback_url=self.callback_url,
        )
