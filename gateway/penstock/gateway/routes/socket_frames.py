"""The frames of `WS /v1/ws` as models: for the fields that the socket takes, AsyncAPI, and tests of real frames.

Nothing is validated on the way out. Frames from the gateway may gain fields and types; clients ignore unknown ones.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Required, TypeAlias

from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from penstock.gateway.routes.answers import Answer, ErrorFacts, Logprob, MadeImage, Result, Timings, WaitingFor
from penstock.schemas.bodies import ConversationId

Traceparent: TypeAlias = Annotated[
    str | None, Field(description="W3C Trace Context of the caller; null: that of the handshake, if it has one.")
]
RequestId: TypeAlias = Annotated[str, Field(description="Id of a request of the caller's tenant.")]
STRICT = ConfigDict(extra="forbid")


class ClientFrame(TypedDict, total=False):
    """What all frames of clients have."""

    __pydantic_config__ = STRICT  # pyright: ignore[reportGeneralTypeIssues]

    id: Annotated[Any, Field(description="The client's own; echoed in `accepted`, `error` and `pong`.")]


class SubmitFrame(ClientFrame, total=False):
    """Submit a request; the socket then follows it. Names of other services are taken too, as over HTTP."""

    type: Required[Literal["submit"]]
    request: Required[Annotated[Any, Field(description="As the body of `POST /v1/requests`.")]]
    idempotency_key: Annotated[str | None, Field(description="A repeat with the same key means the same request.")]
    traceparent: Traceparent


class SubscribeFrame(ClientFrame, total=False):
    """Follow a request from a cursor on, or all requests of a conversation. One of the two ids is required."""

    type: Required[Literal["subscribe"]]
    request_id: RequestId
    conversation_id: ConversationId
    after: Annotated[str | None, Field(description="Cursor of the last frame seen. Null: from the beginning.")]
    traceparent: Traceparent


class UnsubscribeFrame(ClientFrame, total=False):
    """Follow a request or a conversation no longer. One of the two ids is required. There is no answer."""

    type: Required[Literal["unsubscribe"]]
    request_id: RequestId
    conversation_id: ConversationId


class CancelFrame(ClientFrame, total=False):
    """Cancel a request. Its `result` frame is the answer, if the socket follows it."""

    type: Required[Literal["cancel"]]
    request_id: Required[RequestId]


class PingFrame(ClientFrame, total=False):
    """Ask for a `pong`."""

    type: Required[Literal["ping"]]


CLIENT_FRAMES: dict[str, Any] = {
    "submit": SubmitFrame,
    "subscribe": SubscribeFrame,
    "unsubscribe": UnsubscribeFrame,
    "cancel": CancelFrame,
    "ping": PingFrame,
}
"""By type. A field that a frame does not have is refused: it would be ignored otherwise."""
FIELDS: dict[str, frozenset[str]] = {
    kind: frozenset(frame.__required_keys__ | frame.__optional_keys__) for kind, frame in CLIENT_FRAMES.items()
}


class RequestFrame(Answer):
    """What frames about a request have."""

    request_id: str
    cursor: Annotated[str | None, Field(description="Opaque, behind this frame: `after` of `subscribe`.")]


class AcceptedFrame(Answer):
    """A request is on its topic, acknowledged by all in-sync replicas."""

    type: Literal["accepted"]
    request_id: str
    replayed: Annotated[bool, Field(description="Whether the idempotency key was used before.")] = False
    id: Any = None


class StatusFrame(RequestFrame):
    """The status of a request; the latest counts. A status that you do not know is one that is not done."""

    type: Literal["status"]
    status: str
    done: bool
    detail: str | None
    position: Annotated[int | None, Field(description="Place in its worker's queue, 0 the next.")]
    waiting_for: WaitingFor | None
    ttl_ms: int | None
    model: str | None
    model_reason: str | None


class ToolCallPiece(Answer):
    """A piece of a call of a tool; the first piece of a call has its id and name."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str
    offset: Annotated[int, Field(description="Characters of the arguments before this piece.")]


class ChunkFrame(RequestFrame):
    """New text."""

    type: Literal["chunk"]
    text: str
    offset: Annotated[int, Field(description="Characters of the text before this chunk.")]
    tool_calls: list[ToolCallPiece] | None = None
    logprobs: list[Logprob] | None = None
    logprobs_offset: Annotated[int | None, Field(description="Tokens before those of `logprobs`.")] = None


class RestartedFrame(RequestFrame):
    """The text that was sent is void: another attempt begins at offset 0."""

    type: Literal["restarted"]
    attempt: int


class SnapshotFrame(RequestFrame):
    """The text so far, in place of everything before: the cursor could not be continued from."""

    type: Literal["snapshot"]
    text: str


class ProgressFrame(RequestFrame):
    """Steps of the run that are done."""

    type: Literal["progress"]
    step: int
    steps: int


class PreviewFrame(ProgressFrame):
    """A small image of an unfinished run; the newest counts."""

    type: Literal["preview"]  # type: ignore[assignment]
    image: MadeImage


class ResultFrame(RequestFrame):
    """The one outcome, always the last frame of a request."""

    type: Literal["result"]
    status: str
    done: Literal[True]
    result: Result | None
    error: ErrorFacts | None
    attempt: int
    model: str | None
    timings: Timings | None


class ErrorFrame(Answer):
    """A frame of the client failed, or the outcome of a request that it follows cannot be read."""

    type: Literal["error"]
    request_id: Annotated[str | None, Field(description="Null where the frame named none.")]
    error: ErrorFacts
    cursor: None = None
    id: Any = None


class PongFrame(Answer):
    """The answer to `ping`."""

    type: Literal["pong"]
    id: Any = None


SERVER_FRAMES: dict[str, type[Answer]] = {
    "accepted": AcceptedFrame,
    "status": StatusFrame,
    "chunk": ChunkFrame,
    "restarted": RestartedFrame,
    "snapshot": SnapshotFrame,
    "progress": ProgressFrame,
    "preview": PreviewFrame,
    "result": ResultFrame,
    "error": ErrorFrame,
    "pong": PongFrame,
}
"""By type."""
