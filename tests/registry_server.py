"""A schema registry over HTTP that knows our schemas under ids of its own."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

from penstock.schemas.codec import SCHEMA_IDS, Codec, schema_text

FIRST_ID = 100


class Registry(ThreadingHTTPServer):
    """`asked` are the paths of the look-ups."""

    asked: list[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @classmethod
    @contextmanager
    def running(cls) -> Generator[Registry]:
        server = cls(("127.0.0.1", 0), Handler)
        server.asked = []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


class Handler(BaseHTTPRequestHandler):
    server: Registry
    names: ClassVar[list[str]] = list(SCHEMA_IDS)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        name = self.path.split("/")[2].removeprefix("penstock.v1.")
        self.answer(200, {"id": FIRST_ID + self.names.index(name)})

    def do_GET(self) -> None:
        number = int(self.path.rsplit("/", 1)[1]) - FIRST_ID
        self.server.asked.append(self.path)
        known = 0 <= number < len(self.names)
        self.answer(200 if known else 404, {"schema": schema_text(self.names[number])} if known else {})

    def answer(self, status: int, body: dict[str, Any]) -> None:
        encoded = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def foreign(name: str) -> Callable[[Any], bytes]:
    """What encodes records of this name with the registry's id."""
    return Codec(writer_ids={name: FIRST_ID + list(SCHEMA_IDS).index(name)}).encode
