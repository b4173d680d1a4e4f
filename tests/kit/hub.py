"""A small server that speaks the protocol of the hub of models, with one model."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c" * 40
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"w" * (40 << 20),
    "code.py": b"print()",
    "weights.bin": b"a pickle",
}


PIECE_BYTES = 4 << 20


class Hub(BaseHTTPRequestHandler):
    """One model, `owner/name`, at one revision."""

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(send_body=False)

    def do_GET(self) -> None:
        self._answer(send_body=True)

    def _answer(self, *, send_body: bool) -> None:
        kind, _, rest = self.path.strip("/").partition("/")
        assert isinstance(self.server, HubServer)
        if self.server.ill is not None:
            self.server.ill(self)
        elif self.path == "/api/models/owner/name/revision/v1":
            files = [{"rfilename": name} for name in FILES]
            self._send(json.dumps({"id": "owner/name", "sha": COMMIT, "siblings": files}).encode(), send_body)
        elif self.path.startswith(f"/owner/name/resolve/{COMMIT}/") and kind == "owner":
            self._send(FILES[rest.rpartition("/")[2]], send_body)
        else:
            self.refuse(404, "RevisionNotFound")

    def refuse(self, status: int, code: str = "") -> None:
        self.send_response(status)
        self.send_header("x-error-code", code)
        self.send_header("content-length", "0")
        self.end_headers()

    def _send(self, body: bytes, send_body: bool) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.send_header("etag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("x-repo-commit", COMMIT)
        self.end_headers()
        assert isinstance(self.server, HubServer)
        for begin in range(0, len(body) if send_body else 0, PIECE_BYTES):
            self.wfile.write(body[begin : begin + PIECE_BYTES])
            time.sleep(self.server.pause_s)


class HubServer(ThreadingHTTPServer):
    ill: Callable[[Hub], None] | None = None
    """What it does in place of answering."""
    pause_s = 0.0
    """So long it waits after each piece of a file."""


@contextmanager
def serving_hub(folder: str) -> Iterator[tuple[HubServer, dict[str, str]]]:
    """The server, and the environment of a process that uses it with its cache in a folder."""
    server = HubServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    proxies = dict.fromkeys(("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"), "")
    yield (
        server,
        {
            **proxies,
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}",
            "HF_HOME": folder,
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DOWNLOAD_TIMEOUT": "1",
            "HF_HUB_OFFLINE": "0",
        },
    )
    server.shutdown()
    thread.join()
    server.server_close()
