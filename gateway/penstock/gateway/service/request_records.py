"""The record of a request, read from its topic when somebody asks: the view keeps facts of it, not its content."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.gateway.threads import Threads
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.outcomes import Outcomes
from penstock.gateway.view.request_records import read_request
from penstock.schemas.codec import Codec
from penstock.schemas.errors import Gone
from penstock.schemas.records import InferenceRequest
from penstock.schemas.topics import HEADER_TRACEPARENT


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request as its first record has it, and the trace that it belongs to."""

    request: InferenceRequest
    traceparent: str | None


class RequestRecords:
    """Every gateway reads the record of every request, for as long as its topic keeps it."""

    def __init__(self, outcomes: Outcomes, codec: Codec, threads: Threads) -> None:
        self._outcomes = outcomes
        self._codec = codec
        self._threads = threads

    async def of(self, entry: Entry) -> InferenceRequest:
        """Raises as `read`."""
        return (await self.read(entry)).request

    async def read(self, entry: Entry) -> RequestRecord:
        """Raises Gone when the topic does not hold it any more; BrokerUnavailable, RegistryUnavailable, Overloaded."""
        message = await self._outcomes.request_message(entry)
        found = None
        if message is not None:
            found = await self._threads.deliveries.run_for(entry.tenant, read_request, message, self._codec)
        if message is None or found is None or (found.tenant, found.request_id) != entry.key:
            raise Gone("the record of this request is not on its topic any more")
        headers = dict(message.headers)
        traceparent = headers.get(HEADER_TRACEPARENT)
        return RequestRecord(found, None if traceparent is None else traceparent.decode(errors="replace"))
