"""Frames of a real socket are as the AsyncAPI document of its gateway says: each kind, with no field that it lacks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from jsonschema import Draft7Validator
from websockets.sync.client import ClientConnection, connect

from penstock.schemas.cursor import decode_cursor, encode_cursor
from penstock.schemas.errors import ExecutionTimeout, to_error_record
from penstock.schemas.records import Preview, Usage, WaitingFor

Json = dict[str, Any]
REQUEST = {
    "task": "text_generation",
    "stream": True,
    "payload": {"messages": [{"role": "user", "content": "p"}]},
    "metadata": {"a": "b"},
}
IMAGE = {
    "artifact_id": "a",
    "url": "file:///a/data",
    "media_type": "image/png",
    "width": 64,
    "height": 32,
    "sha256": "0" * 64,
    "bytes": 9,
    "expires_at": 1_700_000_000_000,
}


class Checked:
    """A socket that holds each frame of both sides against the document, and adds the kinds that came to `kinds`."""

    def __init__(self, socket: ClientConnection, document: Json, kinds: set[str]) -> None:
        self._socket, self._document, self._kinds = socket, document, kinds

    def send(self, **frame: Any) -> None:
        assert self._problems(frame) == [], frame
        self._socket.send(json.dumps(frame))

    def send_wrong(self, **frame: Any) -> None:
        """A frame that the document does not allow either."""
        assert self._problems(frame), f"the document allows {frame}"
        self._socket.send(json.dumps(frame))

    def until(self, kind: str) -> Json:
        while True:
            frame: Json = json.loads(self._socket.recv(timeout=20))
            assert self._problems(frame) == [], frame
            self._kinds.add(frame["type"])
            if frame["type"] == kind:
                return frame
            assert frame["type"] != "error", frame

    def _problems(self, frame: Json) -> list[str]:
        """Fields beside those of the document are problems too, though clients ignore them."""
        name = f"{frame['type']}Frame"
        assert name in self._document["channels"]["socket"]["messages"]
        components = self._document["components"]
        payload = components["messages"][name]["payload"]["$ref"].rpartition("/")[2]
        schema = {**components["schemas"][payload], "additionalProperties": False, "components": components}
        return [f"{error.json_path}: {error.message}" for error in Draft7Validator(schema).iter_errors(frame)]


@pytest.fixture
def session(gateway: Any) -> Iterator[Callable[[], AbstractContextManager[Checked]]]:
    document = gateway.get("/asyncapi.json").json()
    seen: set[str] = set()

    @contextmanager
    def opened() -> Iterator[Checked]:
        with connect(gateway.ws) as socket:
            yield Checked(socket, document, seen)

    yield opened
    news = {one["$ref"].rpartition("/")[2] for one in document["operations"]["follow"]["messages"]}
    assert {f"{kind}Frame" for kind in seen} == {*news, "acceptedFrame", "pongFrame"}


def test_every_kind_of_frame_is_as_the_document_says(session: Any, gateway: Any, scribe: Any) -> None:
    with session() as socket:
        socket.send(type="ping", id={"n": 1})
        assert socket.until("pong")["id"] == {"n": 1}
        socket.send(type="submit", request=REQUEST, idempotency_key="twice", id=1)
        job = scribe.job(socket.until("accepted")["request_id"])
        socket.send(type="submit", request=REQUEST, idempotency_key="twice")
        assert socket.until("accepted")["replayed"] is True
        socket.until("status")
        waiting = WaitingFor(reason="memory", position=1, need_bytes=5, free_bytes=4, estimated_start_at=5_000)
        job.status("waiting_for_memory", waiting_for=waiting)
        while socket.until("status")["waiting_for"] is None:
            pass
        job.status("running", step=1, steps=4)
        socket.until("progress")
        job.show(Preview(step=2, steps=4, image=IMAGE))
        socket.until("preview")
        job.chunk("ab", 0)
        cursor = socket.until("chunk")["cursor"]
    with session() as socket:  # at a later time, from a cursor that is beyond what this gateway knows
        beyond = encode_cursor(dataclasses.replace(decode_cursor(cursor), text_length=9))
        socket.send(type="subscribe", request_id=job.id, after=beyond)
        socket.until("snapshot")
        job.chunk("x", 0, attempt=2)
        socket.until("restarted")
        job.end(
            "xy", attempt=2, finish_reason="stop", usage=Usage(prompt_tokens=1, completion_tokens=1, total_tokens=2)
        )
        assert socket.until("result")["result"]["text"] == "xy"
        failed = scribe.request(conversation_id="c")
        socket.send(type="subscribe", conversation_id="c")
        socket.send(type="ping")
        socket.until("pong")  # it follows the conversation now: what ends before is not news
        failed.end("", status="failed", error=to_error_record(ExecutionTimeout("too slow")))
        assert socket.until("result")["error"]["code"] == "execution_timeout"
        socket.send(type="unsubscribe", conversation_id="c")
        socket.send(type="cancel", request_id="none-of-them")
        assert socket.until("error")["request_id"] == "none-of-them"


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (
            {"type": "submit", "request": {**REQUEST, "colour": 1}},
            "unsupported_parameter",
        ),
        ({"type": "submit", "request": {**REQUEST, "priority": 2_000}}, "invalid"),
        ({"type": "subscribe", "request_id": 5}, "invalid"),
        ({"type": "cancel"}, "invalid"),
        ({"type": "ping", "colour": 1}, "unsupported_parameter"),
    ],
)
def test_frames_that_the_document_does_not_allow_are_refused(gateway: Any, frame: Json, code: str) -> None:
    with connect(gateway.ws) as opened:
        socket = Checked(opened, gateway.get("/asyncapi.json").json(), set())
        socket.send_wrong(**frame)
        assert socket.until("error")["error"]["code"] == code
