"""`WS /v1/ws`: submit, subscribe, unsubscribe, cancel, ping over one socket, with one bounded queue for its frames."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, WebSocket
from starlette.websockets import WebSocketDisconnect, WebSocketState

from penstock.common.tasks import end_all
from penstock.gateway.context import context_of, service_of
from penstock.gateway.edge.errors import CLOSE_INTERNAL, CLOSE_UNAUTHENTICATED, log_unexpected
from penstock.gateway.edge.protocols import SEND_NOW, SharedText
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.limits.callers import Caller, caller_of
from penstock.gateway.routes.native import submission
from penstock.gateway.routes.socket_frames import FIELDS
from penstock.gateway.routes.socket_spans import SocketSpans
from penstock.gateway.routes.submit_ordering import AcceptedMarker, Reply, SubmitOrdering
from penstock.gateway.service.brought_images import with_inputs
from penstock.gateway.service.service import GatewayService
from penstock.gateway.service.subscriptions import SlowConsumer, Stopping
from penstock.gateway.view.frames import Frame, ResultFrame
from penstock.gateway.view.hub import Gone
from penstock.schemas.aliases import naming
from penstock.schemas.cursor import decode_cursor
from penstock.schemas.errors import InternalError, InvalidRequest, PenstockError, UnsupportedParameter, error_body
from penstock.schemas.finite_json import flaw_of, loads_any, read_body
from penstock.schemas.ids import check_conversation_id, idempotent_request_id
from penstock.schemas.topics import HEADER_TRACEPARENT

logger = logging.getLogger(__name__)

router = APIRouter()

SUBPROTOCOL = "penstock.v1"
CLOSE_SLOW, CLOSE_RESTART, CLOSE_TOO_BIG, CLOSE_UNSUPPORTED = 4408, 1012, 1009, 1003
MAX_FRAME_BYTES = 2_000_000
MAX_SUBSCRIPTIONS = 1_000
MAX_RUNNING = 64
"""Frames of one socket that are worked on at once; further ones wait unread."""
CLOSE_TIMEOUT_S = 5.0
_EXPECTED = (WebSocketDisconnect, SlowConsumer, Stopping, OSError, RuntimeError)
"""How the parts of a session end when its client or the gateway goes; a send on what is closed is a RuntimeError."""


@router.websocket("/v1/ws")
async def websocket(socket: WebSocket) -> None:
    """One session. Auth and Origin were checked by the middleware, before the handshake is answered."""
    offered = socket.scope.get("subprotocols") or []
    service = service_of(socket)
    await socket.accept(SUBPROTOCOL if SUBPROTOCOL in offered else None)
    session = Session(socket, service, context_of(socket).allowances)
    service.facts.sockets += 1
    try:
        await session.run()
    finally:
        service.facts.sockets -= 1


class Session:
    """One client's socket: a reader of its frames, and a writer of ours. Whatever ends first ends both."""

    def __init__(self, socket: WebSocket, service: GatewayService, allowances: Allowances) -> None:
        self._socket = socket
        self._service = service
        self._tenant = caller_of(socket).tenant
        self._allowances = allowances
        self._subscription = service.subscriptions.open()
        self._followed: set[str] = set()
        self._running: set[asyncio.Task[None]] = set()
        self._sent = asyncio.Event()
        self._close_code = 1000
        self._news = SubmitOrdering()
        self._spans = SocketSpans(self._tenant, socket.headers.get(HEADER_TRACEPARENT))
        self._send_now: Callable[[SharedText], bool] | None = socket.scope.get("extensions", {}).get(SEND_NOW)

    @property
    def _caller(self) -> Caller:
        """With the rights of now: each frame looks again. Raises Unauthenticated."""
        return caller_of(self._socket)

    async def run(self) -> None:
        # A send that does not end (nobody reads) must not hide that this client was let go: hence the third.
        parts = (self._read(), self._write(), self._subscription.gone(), self._revoked())
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(part) for part in parts]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for error in (task.exception() for task in done):
                if error is not None and not isinstance(error, _EXPECTED):
                    log_unexpected(error, "/v1/ws")
                    self._close_code = CLOSE_INTERNAL
        finally:
            await end_all((*tasks, *self._running))
            code = {Gone.SLOW: CLOSE_SLOW, Gone.STOPPING: CLOSE_RESTART}.get(
                self._subscription.client.gone or Gone.CLOSED
            )
            self._subscription.close()
            self._spans.close()
            await self._close(code or self._close_code)

    async def _revoked(self) -> None:
        """Until the key is taken back."""
        event = self._socket.scope.get("state", {}).get("revoked") or asyncio.Event()
        await event.wait()
        self._close_code = CLOSE_UNAUTHENTICATED

    async def _close(self, code: int) -> None:
        if self._socket.client_state is WebSocketState.CONNECTED:
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._socket.close(code)
            except (TimeoutError, RuntimeError, OSError, WebSocketDisconnect):
                logger.debug("socket.closed_uncleanly code=%d", code)

    # -- out

    async def _write(self) -> None:
        """Frames in their order. A client that does not read fills its queue and is let go."""
        while (news := await self._subscription.next_frame()) is not None:
            for frame in self._news.in_order(news):
                shared = _shared(frame)
                if self._send_now is None or not self._send_now(shared):
                    await self._socket.send_text(shared.text)
                self._sent.set()
                if isinstance(frame, ResultFrame):
                    self._unfollow(frame.request_id, frame.status)

    def _reply(self, body: dict[str, Any]) -> None:
        self._subscription.push([Reply(request_id="", cursor=None, content=body)])

    # -- in

    async def _read(self) -> None:
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                return
            text: str | None = message.get("text")
            if text is None or len(text) > MAX_FRAME_BYTES:
                self._close_code = CLOSE_TOO_BIG if text is not None else CLOSE_UNSUPPORTED
                return
            await self._room_for_replies()
            # Who sends faster than it may is read more slowly; nothing is refused.
            try:
                wait_s = self._allowances.frame_s(self._caller)
            except PenstockError:
                self._close_code = CLOSE_UNAUTHENTICATED
                return
            if wait_s:
                await asyncio.sleep(wait_s)
            await self._on_text(text)

    async def _room_for_replies(self) -> None:
        """Replies are not what makes a client slow: while its queue is half full its own frames wait unread."""
        client = self._subscription.client
        while client.gone is None and len(client.frames) + 2 * len(self._running) > client.limit // 2:
            self._sent.clear()
            sent = asyncio.create_task(self._sent.wait())
            await asyncio.wait([sent, *self._running], return_when=asyncio.FIRST_COMPLETED)
            sent.cancel()

    async def _on_text(self, text: str) -> None:
        try:
            frame = read_body(text, "a frame")
        except InvalidRequest as error:
            self._error(error, _id_of(text))
            return
        if not isinstance(frame, dict) or not isinstance(frame.get("type"), str):
            self._error(InvalidRequest("a frame is a JSON object with a type"), {})
            return
        handler = self._handlers().get(frame["type"])
        if handler is None:
            return  # unknown types are ignored, so that newer clients can talk to older gateways
        for name in frame.keys() - FIELDS[frame["type"]]:
            name = name[:100]
            self._error(UnsupportedParameter(f"{name} is not supported in this frame", param=name), frame)
            return
        while len(self._running) >= MAX_RUNNING:
            await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
        task = asyncio.create_task(self._handle(handler, frame))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def _handlers(self) -> dict[str, Callable[[dict[str, Any]], Awaitable[None]]]:
        return {
            "submit": self._submit,
            "subscribe": self._subscribe,
            "unsubscribe": self._unsubscribe,
            "cancel": self._cancel,
            "ping": self._ping,
        }

    async def _handle(self, handler: Callable[[dict[str, Any]], Awaitable[None]], frame: dict[str, Any]) -> None:
        try:
            await handler(frame)
        except PenstockError as error:
            self._error(error, frame)
        except Exception:
            logger.exception("socket.handler_failed type=%s", frame["type"])
            self._error(InternalError("internal error"), frame)

    def _error(self, error: PenstockError, frame: dict[str, Any]) -> None:
        request_id = frame.get("request_id")
        known = request_id if isinstance(request_id, str) else None
        body: dict[str, Any] = {"type": "error", "request_id": known, **error_body(error, known)}
        if error.retry_after_s is not None:  # a socket has no header for it
            body["error"]["details"] = {**(body["error"]["details"] or {}), "retry_after_s": error.retry_after_s}
        if "id" in frame:
            body["id"] = frame["id"]
        self._reply(body)

    async def _submit(self, frame: dict[str, Any]) -> None:
        with self._spans.begun(frame) as span:
            request_id = await self._submitted(frame, span.traceparent)
            self._service.subscriptions.follow_new(self._subscription, self._tenant, request_id)
        self._followed.add(request_id)
        self._spans.follow(request_id, span)

    async def _submitted(self, frame: dict[str, Any], traceparent: str | None) -> str:
        """The id of the request, for which `accepted` is on its way."""
        caller = self._caller
        caller.require("submit")
        self._allowances.submission(caller)
        asked, images, given = submission(frame.get("request"), caller)
        self._room_for_one_more()
        key = frame.get("idempotency_key")
        if key is not None and not isinstance(key, str):
            raise InvalidRequest("idempotency_key must be text", param="idempotency_key")
        held: list[str] = []

        def hold(request_id: str) -> None:
            held.append(request_id)
            self._news.hold(request_id)

        if key is not None:
            hold(idempotent_request_id(caller.tenant, key))
        try:
            with naming(given):
                checked = await self._service.submitting.check(caller, asked)
            checked, keep = with_inputs(checked, images, self._allowances, self._service)
            accepted = await self._service.submitting.submit(
                checked, idempotency_key=key, traceparent=traceparent, on_id=hold, keep=keep
            )
            reply: dict[str, Any] = {"type": "accepted", "request_id": accepted.request_id}
            if accepted.replayed:
                reply["replayed"] = True
            if "id" in frame:
                reply["id"] = frame["id"]
            self._reply(reply)
        finally:
            self._subscription.push([AcceptedMarker(request_id=one, cursor=None) for one in held])
        return accepted.request_id

    async def _subscribe(self, frame: dict[str, Any]) -> None:
        caller = self._caller
        caller.require("read")
        self._room_for_one_more()
        tenant = caller.tenant
        if frame.get("conversation_id") is not None:
            conversation = check_conversation_id(frame["conversation_id"])
            caller.check_conversation(conversation)
            await self._service.subscriptions.follow_conversation(self._subscription, tenant, conversation)
            return
        request_id = _request_id(frame)
        after = frame.get("after")
        if after is not None and not isinstance(after, str):
            raise InvalidRequest("after must be a cursor", param="after")
        cursor = decode_cursor(after) if after else None
        with self._spans.begun(frame) as span:
            caller.check_reaches(await self._service.lookups.find_whole(tenant, request_id))
            await self._service.subscriptions.reach(cursor)
            self._caller.require("read")
            self._unfollow(request_id)
            self._service.subscriptions.follow(self._subscription, tenant, request_id, cursor)
        self._followed.add(request_id)
        self._spans.follow(request_id, span)

    def _room_for_one_more(self) -> None:
        if max(len(self._followed), len(self._subscription.client.subjects)) >= MAX_SUBSCRIPTIONS:
            raise InvalidRequest(f"a socket can follow {MAX_SUBSCRIPTIONS} requests and conversations at once")

    async def _unsubscribe(self, frame: dict[str, Any]) -> None:
        if frame.get("conversation_id") is not None:
            conversation = check_conversation_id(frame["conversation_id"])
            self._service.subscriptions.unfollow_conversation(self._subscription, self._tenant, conversation)
            return
        self._unfollow(_request_id(frame))

    def _unfollow(self, request_id: str, status: str | None = None) -> None:
        """`status`: of its result, if that was sent."""
        self._followed.discard(request_id)
        self._spans.ended(request_id, status)
        self._service.subscriptions.unfollow(self._subscription, self._tenant, request_id)

    async def _cancel(self, frame: dict[str, Any]) -> None:
        caller = self._caller
        caller.require("cancel")
        await self._service.control.cancel(caller, _request_id(frame))

    async def _ping(self, frame: dict[str, Any]) -> None:
        self._reply({"type": "pong", **({"id": frame["id"]} if "id" in frame else {})})


def _shared(frame: Frame) -> SharedText:
    """The frame for the wire, made for its first reader."""
    if not isinstance(frame.for_sockets, SharedText):
        frame.for_sockets = SharedText(frame.encoded())
    return frame.for_sockets


def _id_of(text: str) -> dict[str, Any]:
    """The `id` of a frame of which another part cannot be read, so that its sender knows which one it was."""
    try:
        frame = loads_any(text)
    except ValueError:
        return {}
    known = isinstance(frame, dict) and "id" in frame and flaw_of(frame["id"]) is None
    return {"id": frame["id"]} if known else {}


def _request_id(frame: dict[str, Any]) -> str:
    request_id = frame.get("request_id")
    if not isinstance(request_id, str):
        raise InvalidRequest("request_id must be text", param="request_id")
    return request_id
