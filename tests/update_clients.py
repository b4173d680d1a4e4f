"""Clients of each kind behind a proxy while parts are replaced: they continue as the docs say, and note what they saw.

A client may see a 503 with `Retry-After`, and repeats the call then. A stream, a socket or a long poll may end early:
it continues by its cursor, or by a repeat with its `Idempotency-Key`. Everything else is a fault.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import httpx
import openai
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from conversing import questions
from penstock.common.settings import KafkaSettings
from penstock.producers import Client
from stream_clients import COME_AGAIN

T = TypeVar("T")
WORDS = 20
WHOLE = "".join(f"word{number} " for number in range(WORDS))
PATIENCE_S = 60.0
TURNS = 6
"""Of a conversation."""


@dataclass
class Seen:
    """What clients saw, each with its time by the monotonic clock."""

    marks: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    """`503`; `continued`: a gateway ended the stream in order; `cut`: a connection broke."""
    chats: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """When an answer of a chat was whole, and how long that took."""
    gaps: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """When a piece of a stream came, and the seconds since the one before."""
    faults: list[str] = field(default_factory=list[str])

    def mark(self, what: str) -> None:
        self.marks.append((time.monotonic(), what))

    def answered(self, what: str, status: int, headers: Any) -> None:
        """An answer that is not the one asked for."""
        if status == 503 and "retry-after" in headers:
            self.mark("503")
        else:
            self.faults.append(f"{status} {what}")


class Noting(httpx.BaseTransport):
    def __init__(self, seen: Seen) -> None:
        self._seen, self._inner = seen, httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = self._inner.handle_request(request)
        if answer.status_code >= 400:
            self._seen.answered(f"{request.method} {request.url.path}: {answer.read()[:300]!r}", *_of(answer))
        return answer


def _of(answer: httpx.Response) -> tuple[int, httpx.Headers]:
    return answer.status_code, answer.headers


class Text:
    """A text that comes in pieces, possibly over several connections."""

    def __init__(self, seen: Seen) -> None:
        self._seen, self._last = seen, 0.0
        self.text = ""

    def has(self, text: str) -> None:
        """All that has come of it over this connection."""
        assert WHOLE.startswith(text), text
        if len(text) > len(self.text):
            now = time.monotonic()
            if self.text:
                self._seen.gaps.append((now, now - self._last))
            self.text, self._last = text, now

    def ended(self, text: str) -> None:
        assert text == WHOLE, text


class Clients:
    """The calls of each kind, from a request to the whole answer. `models` may be changed at any time."""

    def __init__(self, url: str, seen: Seen, callback_url: str) -> None:
        self._url, self._seen, self._callback_url = url, seen, callback_url
        self.models = ["chat"]
        self.called_back: list[str] = []
        """Requests that are to be called back."""
        self.conversations: dict[str, list[str]] = {}
        """What was asked in each."""
        self._http = httpx.Client(base_url=url, transport=Noting(seen), timeout=PATIENCE_S)
        self._openai = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=self._http)

    @property
    def kinds(self) -> tuple[Callable[[int], None], ...]:
        return (self.chat, self.chat_stream, self.native_stream, self.socket, self.plain, self.turns, self.batch)

    def model(self, number: int) -> str:
        return self.models[number % len(self.models)]

    def _again(self, call: Callable[[], T]) -> T:
        """Repeat a call until it is answered: after a 503 when the answer says, after a broken connection soon."""
        while True:
            wait_s = 0.1
            try:
                return call()
            except (openai.APIStatusError, httpx.HTTPStatusError) as refused:
                if refused.response.status_code < 500:
                    raise
                wait_s = float(refused.response.headers.get("retry-after", 1))
            except (httpx.TransportError, openai.APIConnectionError):
                self._seen.mark("cut")
            time.sleep(wait_s)

    def _call(self, method: str, path: str, **options: Any) -> Any:
        return self._again(lambda: self._http.request(method, path, **options).raise_for_status().json())

    # -- the stock client of OpenAI

    def chat(self, number: int) -> None:
        began = time.monotonic()
        answer = self._again(partial(self._openai.chat.completions.create, **self._chat(number)))
        assert answer.choices[0].message.content == WHOLE, answer
        now = time.monotonic()
        self._seen.chats.append((now, now - began))

    def _chat(self, number: int) -> Any:
        messages = [{"role": "user", "content": f"go {number}"}]
        key = {"idempotency-key": uuid.uuid4().hex}
        return {"model": self.model(number), "messages": messages, "max_tokens": WORDS, "extra_headers": key}

    def chat_stream(self, number: int) -> None:
        asked, text = self._chat(number), Text(self._seen)

        def stream() -> None:
            got = ""
            for chunk in self._openai.chat.completions.create(**asked, stream=True):
                got += (chunk.choices[0].delta.content or "") if chunk.choices else ""
                text.has(got)
            text.ended(got)

        self._again(stream)

    def batch(self, number: int) -> None:
        body = {"model": "chat", "max_tokens": WORDS, "messages": [{"role": "user", "content": f"batch {number}"}]}
        lines = [{"custom_id": str(n), "method": "POST", "url": "/v1/chat/completions", "body": body} for n in range(4)]
        content = "\n".join(map(json.dumps, lines)).encode()
        given = self._again(lambda: self._openai.files.create(file=("in.jsonl", content), purpose="batch"))
        made = self._again(
            partial(
                self._openai.batches.create,
                input_file_id=given.id,
                endpoint="/v1/chat/completions",
                completion_window="24h",
                extra_headers={"idempotency-key": uuid.uuid4().hex},
            )
        )
        while made.status not in ("completed", "failed", "expired", "cancelled"):
            time.sleep(0.5)
            made = self._again(partial(self._openai.batches.retrieve, made.id))
        assert made.status == "completed", made
        assert made.output_file_id is not None
        output = self._again(partial(self._openai.files.content, made.output_file_id)).text.splitlines()
        texts = [json.loads(one)["response"]["body"]["choices"][0]["message"]["content"] for one in output]
        assert texts == [WHOLE] * len(lines), output

    # -- native

    def _request(self, number: int, **fields: Any) -> dict[str, Any]:
        payload = {"prompt": f"go {number}", "max_tokens": WORDS}
        return {"task": "text_generation", "model": self.model(number), "payload": payload, **fields}

    def _ended(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """A plain POST that waits; then GET, until the request has ended."""
        said = self._call("POST", path, json=body, headers={"idempotency-key": uuid.uuid4().hex})
        while not said["done"]:
            said = self._call("GET", f"/v1/requests/{said['request_id']}", params={"wait": 30})
        assert said["status"] == "completed", said
        return said

    def plain(self, number: int) -> None:
        said = self._ended("/v1/requests?wait=30", self._request(number, callback_url=self._callback_url))
        assert said["result"]["text"] == WHOLE, said
        self.called_back.append(said["request_id"])

    def turns(self, number: int) -> None:
        """One turn of a conversation, which is answered with all that it holds; every few turns a new one begins."""
        kept = f"talk-{threading.get_ident()}-{number // TURNS}"
        asked = self.conversations.setdefault(kept, [])
        if not asked:
            self._call("POST", "/v1/conversations", json={"id": kept, "summarize": {"every_turns": 2, "model": "sum"}})
        asked.append(f"turn {number}")
        payload = {"messages": [{"role": "user", "content": asked[-1]}]}
        turn = {"model": "echo", "conversation_id": kept, "payload": payload, "context": {"summary": "never"}}
        assert questions(self._ended("/v1/requests?wait=30", self._request(number, **turn))) == asked

    def summaries(self, conversation: str) -> list[int]:
        """Of each that stands there, through which offset it covers."""
        records = self._call("GET", f"/v1/conversations/{conversation}/replay", params={"limit": 100})["data"]
        messages = [one["message"] for one in records if one["message"]]
        return [one["covers_through"] for one in messages if one["direction"] == "summary"]

    def native_stream(self, number: int) -> None:
        body, key = self._request(number, stream=True), {"idempotency-key": uuid.uuid4().hex}
        url = self._call("POST", "/v1/requests", json=body, headers=key)["events_url"]
        frames = Frames(Text(self._seen))

        def follow() -> bool:
            headers = {"last-event-id": frames.cursor} if frames.cursor else {}
            with self._http.stream("GET", url, headers=headers) as stream:
                stream.raise_for_status()
                return any(frames.take(json.loads(line[5:])) for line in stream.iter_lines() if line[:5] == "data:")

        while not self._again(follow):
            self._seen.mark("continued")

    def socket(self, number: int) -> None:
        submit = {"type": "submit", "request": self._request(number, stream=True), "idempotency_key": uuid.uuid4().hex}
        frames = Frames(Text(self._seen))
        while True:
            try:
                with connect(self._url.replace("http", "ws") + "/v1/ws") as connection:
                    return self._follow(connection, submit, frames)
            except InvalidStatus as refused:
                self._seen.answered("of a handshake", refused.response.status_code, refused.response.headers)
            except ConnectionClosed as closed:
                in_order = closed.rcvd is not None and closed.rcvd.code in COME_AGAIN
                self._seen.mark("continued" if in_order else "cut")
            time.sleep(0.1)

    def _follow(self, connection: ClientConnection, submit: dict[str, Any], frames: Frames) -> None:
        subscribe = {"type": "subscribe", "request_id": frames.request_id, "after": frames.cursor}
        connection.send(json.dumps(subscribe if frames.request_id else submit))
        while not frames.take(json.loads(connection.recv(PATIENCE_S))):
            pass


class Frames:
    """The frames of one request, over several connections."""

    def __init__(self, text: Text) -> None:
        self._text, self._got = text, ""
        self.request_id: str | None = None
        self.cursor: str | None = None

    def take(self, frame: dict[str, Any]) -> bool:
        """Whether this was the last one."""
        self.request_id, self.cursor = frame.get("request_id") or self.request_id, frame.get("cursor") or self.cursor
        assert frame["type"] not in ("restarted", "snapshot", "error"), frame
        if frame["type"] == "chunk":
            self._got += frame["text"]
            self._text.has(self._got)
        if frame["type"] != "result":
            return False
        assert frame["status"] == "completed", frame
        self._text.ended(self._got)
        return True


def producing(settings: KafkaSettings, model: Callable[[int], str]) -> Callable[[int], None]:
    """A client without a gateway: Avro onto the topics. It names the pool of a model that common workers lack."""
    client = Client(settings)

    def avro(number: int) -> None:
        payload, name = {"prompt": f"go {number}", "max_tokens": WORDS}, model(number)
        pool = name if name == "late" else None
        submitted = client.submit(task="text_generation", model=name, pool=pool, payload=payload)
        assert client.result(submitted, PATIENCE_S).output_text == WHOLE

    return avro


class Load:
    """Each kind of call, repeated on a thread of its own. A client whose call raised has ended."""

    def __init__(self, kinds: Sequence[Callable[[int], None]]) -> None:
        self._over = threading.Event()
        self.ended: dict[str, str] = {}
        self.done = {f"{kind.__name__} {number}": 0 for number, kind in enumerate(kinds)}
        """By client, how many of its calls have been answered."""
        clients = zip(self.done, kinds, strict=True)
        self._threads = [threading.Thread(target=self._repeat, args=one, daemon=True) for one in clients]
        for thread in self._threads:
            thread.start()

    def _repeat(self, name: str, call: Callable[[int], None]) -> None:
        while not self._over.is_set():
            try:
                call(self.done[name])
            except Exception as error:
                self.ended[name] = repr(error)
                return
            self.done[name] += 1

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(2 * PATIENCE_S)
            assert not thread.is_alive(), f"a client did not end: {self.done}"
