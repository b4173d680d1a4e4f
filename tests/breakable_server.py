"""An OpenAI-compatible server that tests break and mend, and the model that is served by it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kit.http_server import Answer, Call, HttpServer
from support import in_background
from system import NOOP


class Breakable(HttpServer):
    """An OpenAI-compatible server that answers with `status` until a test says 200. It counts what it was asked."""

    def __init__(self, status: int, port: int = 0) -> None:
        self.status = status
        self.asked: Counter[str] = Counter()
        super().__init__(self._answer, port)

    def _answer(self, call: Call) -> Answer:
        self.asked[call.json["prompt"]] += 1
        fine = {"choices": [{"index": 0, "text": "ok", "finish_reason": "stop"}]}
        return self.status, fine if self.status == 200 else {"error": {"message": "broken"}}


@contextmanager
def serving(status: int, port: int = 0) -> Iterator[Breakable]:
    with in_background(server := Breakable(status, port)):
        yield server


def remote(port: int, **options: Any) -> dict[str, Any]:
    url = f"http://127.0.0.1:{port}"
    return {**NOOP, "engine": "remote", "source": url, "options": {"slots": 4, **options}}
