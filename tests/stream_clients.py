"""Clients of streams as the documents tell people to write them: they lose nothing when a gateway or the broker goes.

Native ones come again with their cursor; the stock OpenAI client stands behind a proxy that passes over a gateway that
refuses the connection.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import httpx
import openai
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

COME_AGAIN = (1012, 1013)
"""The gateway stops, or is behind the topics because it has just started or lacks its broker."""


class Proxy(httpx.BaseTransport):
    """Stands for a load balancer: who refuses a connection is passed over."""

    def __init__(self, urls: list[str]) -> None:
        self._urls = [httpx.URL(url) for url in urls]
        self._next = 0
        self._inner = httpx.HTTPTransport(limits=httpx.Limits(max_keepalive_connections=0))

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        last: httpx.ConnectError | None = None
        for _ in self._urls:
            self._next += 1
            url = self._urls[self._next % len(self._urls)]
            request.url = request.url.copy_with(host=url.host, port=url.port)
            try:
                return self._inner.handle_request(request)
            except httpx.ConnectError as refused:
                last = refused
        raise last or httpx.ConnectError("there is no gateway")


class Callers:
    """Each kind of call, from its request to the text that its client has at the end. A call that fails raises."""

    def __init__(self, urls: list[str], model: str, tokens: int, patience_s: float) -> None:
        """Raises in a call when nothing is heard for `patience_s`."""
        self._urls = urls
        self._model, self._tokens = model, tokens
        self._patience_s = patience_s
        self._native = {
            "task": "text_generation",
            "stream": True,
            "model": model,
            "payload": {"prompt": "go", "max_tokens": tokens},
        }
        self.reconnects = 0
        self.begun = 0
        """Streams that have had their first piece."""

    @property
    def kinds(self) -> tuple[Callable[[int], str], ...]:
        return (self.native_stream, self.socket, self.chat_stream, self.chat)

    def _text(self, before: str, piece: str) -> str:
        self.begun += bool(piece and not before)
        return before + piece

    def _come_again(self) -> None:
        self.reconnects += 1
        time.sleep(0.1)

    def _openai(self) -> openai.OpenAI:
        http = httpx.Client(transport=Proxy(self._urls), timeout=self._patience_s)
        return openai.OpenAI(base_url="http://127.0.0.1/v1", api_key="none", http_client=http)

    def chat(self, number: int) -> str:
        with self._openai() as client:
            messages: Any = [{"role": "user", "content": f"go {number}"}]
            answer = client.chat.completions.create(model=self._model, messages=messages, max_tokens=self._tokens)
            return answer.choices[0].message.content or ""

    def chat_stream(self, number: int) -> str:
        with self._openai() as client:
            messages: Any = [{"role": "user", "content": f"go {number}"}]
            stream = client.chat.completions.create(
                model=self._model, messages=messages, max_tokens=self._tokens, stream=True
            )
            pieces = (chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
            return reduce(self._text, pieces, "")

    def native_stream(self, number: int) -> str:
        with httpx.Client(transport=Proxy(self._urls), base_url="http://127.0.0.1", timeout=self._patience_s) as http:
            key = {"idempotency-key": uuid.uuid4().hex}
            while (accepted := http.post("/v1/requests", json=self._native, headers=key)).status_code == 503:
                self._come_again()
            text, cursor = "", None
            while True:
                for frame in self._events(http, accepted.raise_for_status().json()["events_url"], cursor):
                    cursor = frame["cursor"] or cursor
                    if frame["type"] == "chunk":
                        text = self._text(text, frame["text"])
                    elif frame["type"] == "result":
                        assert frame["status"] == "completed", frame
                        return text
                    assert frame["type"] not in ("restarted", "snapshot"), frame
                self._come_again()

    def _events(self, http: httpx.Client, url: str, cursor: str | None) -> Iterator[dict[str, Any]]:
        headers = {"last-event-id": cursor} if cursor else {}
        try:
            with http.stream("GET", url, headers=headers) as stream:
                if stream.status_code == 503:
                    return
                stream.raise_for_status()
                for line in stream.iter_lines():
                    if line.startswith("data:"):
                        yield json.loads(line[5:])
        except httpx.RemoteProtocolError:
            return

    def socket(self, number: int) -> str:
        text, request_id, cursor = "", None, None
        while True:
            try:
                url = self._urls[number % len(self._urls)].replace("http", "ws") + "/v1/ws"
                number += 1
                with connect(url) as connection:
                    if request_id is None:
                        connection.send(json.dumps({"type": "submit", "request": self._native}))
                    else:
                        connection.send(json.dumps({"type": "subscribe", "request_id": request_id, "after": cursor}))
                    while True:
                        frame = json.loads(connection.recv(self._patience_s))
                        request_id, cursor = frame.get("request_id") or request_id, frame.get("cursor") or cursor
                        assert frame["type"] not in ("restarted", "snapshot", "error"), frame
                        if frame["type"] == "chunk":
                            text = self._text(text, frame["text"])
                        elif frame["type"] == "result":
                            assert frame["status"] == "completed", frame
                            return text
            except ConnectionClosed as closed:
                if closed.rcvd is None or closed.rcvd.code not in COME_AGAIN:
                    raise
            except ConnectionRefusedError:
                pass
            self._come_again()
