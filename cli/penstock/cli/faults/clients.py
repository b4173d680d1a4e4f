"""The clients of a row: streams over SSE and over WebSocket, polls, and requests put on their topic as Avro.

Each sends its request once, with an idempotency key, and then hears of it to its outcome, over lost connections. They
note what they are told, piece by piece, and judge nothing.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from penstock.cli.faults.histories import History, text_or_digest
from penstock.common.settings import KafkaSettings
from penstock.producers import Client
from penstock.schemas.errors import PenstockError
from penstock.schemas.sse import SseLines, field_value

KINDS = ("sse", "ws", "poll", "avro")
AGAIN_S = 0.2
"""After so long a client tries again that found nobody."""
A_SOCKET = 50
"""Requests that share one WebSocket."""
_SILENCE_S = 30.0
_LOST = (httpx.HTTPError, WebSocketException, OSError, TimeoutError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """One request of the row, and the text that must come of it."""

    number: int
    body: Mapping[str, Any]
    text: str

    @property
    def client(self) -> str:
        return KINDS[self.number % len(KINDS)]

    @property
    def streams(self) -> bool:
        return self.client in ("sse", "ws")

    def fields(self) -> dict[str, Any]:
        return {**self.body, "stream": self.streams}


class Clients:
    """All clients of one row."""

    def __init__(self, history: History, url: str, kafka: KafkaSettings, asked: Sequence[Asked], *, key: str) -> None:
        """`key` begins all idempotency keys."""
        self._history, self._url, self._key = history, url, key
        self._asked = asked
        self._kafka = kafka
        self.tasks: list[asyncio.Task[None]] = []
        self._polled: list[str] = []
        self._fetched: set[str] = set()
        self._over = threading.Event()

    def start(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        timeout = httpx.Timeout(_SILENCE_S, pool=None)
        self._http = httpx.AsyncClient(base_url=self._url, timeout=timeout, limits=limits, trust_env=False)
        sockets = [one for one in self._asked if one.client == "ws"]
        shared = [sockets[at : at + A_SOCKET] for at in range(0, len(sockets), A_SOCKET)]
        runs = [self._stream(one) for one in self._asked if one.client == "sse"]
        runs += [self._poll(one) for one in self._asked if one.client == "poll"]
        runs += [self._socket(share) for share in shared]
        runs += [self._produce([one for one in self._asked if one.client == "avro"])]
        self.tasks = [asyncio.create_task(run) for run in runs]

    def waiting(self) -> list[str]:
        return sorted({task.get_coro().__qualname__ for task in self.tasks if not task.done()})  # pyright: ignore

    async def ask_again(self) -> None:
        """Ask once more for each outcome that was polled: a second one would be seen here."""
        give_up, known = time.monotonic() + _SILENCE_S, len(self.tasks)
        for request_id in self._polled:
            while (frame := await self._outcome_of(request_id)) is None:
                if time.monotonic() > give_up:
                    self._history.note("not_settled", how=f"no second answer about {request_id}")
                    return
                await asyncio.sleep(AGAIN_S)
            self._outcome("outcome_again", frame, request_id)
        if fetches := self.tasks[known:]:
            await asyncio.wait(fetches, timeout=_SILENCE_S)

    async def stop(self) -> None:
        self._over.set()
        for task in self.tasks:
            task.cancel()
        for ended in await asyncio.gather(*self.tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                self._history.note("not_settled", how=f"a client failed: {ended!r}")
        await self._http.aclose()

    def _accepted(self, one: Asked, request_id: str) -> None:
        known = {"text": text_or_digest(one.text), "streams": one.streams, "client": one.client}
        webhook = "callback_url" in one.body
        if webhook:
            self._history.named["expects_webhook"].add(request_id)
        if one.client != "avro":
            self._history.named["heard_by_client"].add(request_id)
        self._history.note("expected", request_id, **known, webhook=webhook)
        self._history.note("acknowledged", request_id)

    def _told(self, frame: Mapping[str, Any], request_id: str) -> None:
        match frame["type"]:
            case "chunk":
                self._history.note("piece", request_id, text=frame["text"], offset=frame["offset"])
            case "restarted":
                self._history.note("restarted", request_id)
            case "snapshot":
                self._history.note("snapshot", request_id, text=frame["text"])
            case "result":
                self._outcome("outcome", frame, request_id)
            case _:
                pass

    def _outcome(self, what: str, frame: Mapping[str, Any], request_id: str) -> None:
        """Note it at once. The text of a large one is fetched beside, so that no other request has to wait."""
        result = frame["result"] or {}
        facts = {"status": frame["status"], "error": frame["error"]}
        if (artifact := result.get("artifact")) is None:
            self._history.note(what, request_id, text=text_or_digest(result.get("text") or ""), **facts)
            return
        name = str(artifact["artifact_id"])
        self._history.note(what, request_id, artifact=name, **facts)
        if name not in self._fetched:
            self._fetched.add(name)
            self.tasks.append(asyncio.create_task(self._fetch(request_id, name, artifact["url"])))

    async def _fetch(self, request_id: str, name: str, url: str) -> None:
        while True:
            with suppress(*_LOST):
                answer = await self._http.get(url)
                if answer.status_code == 200:
                    text = text_or_digest(answer.json()["text"])
                    self._history.note("fetched", request_id, artifact=name, text=text)
                    return
            await asyncio.sleep(AGAIN_S)

    async def _submit(self, one: Asked) -> str:
        while True:
            with suppress(*_LOST):
                headers = {"idempotency-key": f"{self._key}-{one.number}"}
                answer = await self._http.post("/v1/requests", json=one.fields(), headers=headers)
                if answer.status_code == 202:
                    request_id = str(answer.json()["request_id"])
                    self._accepted(one, request_id)
                    return request_id
                if answer.status_code < 500 and answer.status_code != 429:
                    raise RuntimeError(f"the gateway refused a request of the row: {answer.text}")
            await asyncio.sleep(AGAIN_S)

    async def _poll(self, one: Asked) -> None:
        request_id = await self._submit(one)
        while (frame := await self._outcome_of(request_id)) is None:
            await asyncio.sleep(AGAIN_S)
        self._outcome("outcome", frame, request_id)
        self._polled.append(request_id)

    async def _outcome_of(self, request_id: str) -> dict[str, Any] | None:
        with suppress(*_LOST):
            answer = await self._http.get(f"/v1/requests/{request_id}", params={"wait": 20})
            if answer.status_code == 200 and answer.json()["done"]:
                return answer.json()
        return None

    async def _stream(self, one: Asked) -> None:
        request_id = await self._submit(one)
        cursor: str | None = None
        ended = False
        while True:
            with suppress(*_LOST):
                headers = {} if cursor is None else {"last-event-id": cursor}
                url = f"/v1/requests/{request_id}/events"
                async with self._http.stream("GET", url, headers=headers) as answer:
                    if ended and answer.status_code == 204:
                        return  # asked once more behind its outcome, it hears nothing: so it must be
                    if answer.status_code == 200:
                        async for frame in _frames(answer):
                            self._told(frame, request_id)
                            cursor = frame.get("cursor") or cursor
                            ended = ended or frame["type"] == "result"
            await asyncio.sleep(AGAIN_S)

    async def _socket(self, share: Sequence[Asked]) -> None:
        """One socket for all of them, opened again where it is lost."""
        accepted: dict[int, str] = {}
        cursors: dict[str, str] = {}
        ended: set[str] = set()
        while len(ended) < len(share):
            with suppress(*_LOST):
                url = f"{self._url.replace('http', 'ws', 1)}/v1/ws"
                async with connect(url, max_size=None, proxy=None) as socket:
                    for one in share:
                        frame = self._opening(one, accepted.get(one.number), cursors)
                        if accepted.get(one.number) not in ended:
                            await socket.send(json.dumps(frame))
                    by_number = {one.number: one for one in share}
                    async for text in socket:
                        frame = json.loads(text)
                        if frame["type"] == "accepted" and frame["id"] not in accepted:
                            accepted[frame["id"]] = frame["request_id"]
                            self._accepted(by_number[frame["id"]], frame["request_id"])
                        elif frame["type"] == "error":
                            break  # as of a broker that is away: all is asked again
                        elif (request_id := frame.get("request_id")) is not None:
                            self._told(frame, request_id)
                            cursors[request_id] = frame.get("cursor") or cursors.get(request_id, "")
                            if frame["type"] == "result":
                                ended.add(request_id)
                        if len(ended) == len(share):
                            break
            await asyncio.sleep(AGAIN_S)

    def _opening(self, one: Asked, request_id: str | None, cursors: Mapping[str, str]) -> dict[str, Any]:
        if request_id is None:
            key = f"{self._key}-{one.number}"
            return {"type": "submit", "request": one.fields(), "idempotency_key": key, "id": one.number}
        after = {"after": cursors[request_id]} if cursors.get(request_id) else {}
        return {"type": "subscribe", "request_id": request_id, **after}

    async def _produce(self, asked: Sequence[Asked]) -> None:
        await asyncio.to_thread(self._produce_all, asked)

    def _produce_all(self, asked: Sequence[Asked]) -> None:
        with Client(self._kafka) as client:
            for one in asked:
                self._produce_one(client, one)

    def _produce_one(self, client: Client, one: Asked) -> None:
        """Send it with the same id until the broker has acknowledged it: the client gives up after some seconds."""
        request_id, reason = f"{self._key}-{one.number}", "it was not sent"
        while not self._over.is_set():
            try:
                client.submit(**one.fields(), request_id=request_id)
            except PenstockError as error:
                reason = str(error)
                self._over.wait(AGAIN_S)
            else:
                self._accepted(one, request_id)
                return
        self._history.note("not_settled", how=f"{request_id} was not acknowledged: {reason}")


async def _frames(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    lines = SseLines()
    async for piece in answer.aiter_bytes():
        for line in lines.feed(piece):
            if (data := field_value(line, b"data")) is not None:
                yield json.loads(data)
