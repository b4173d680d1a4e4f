"""A model comes from the hub: the hub's own client against a small server that speaks the hub's protocol."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from penstock.processors.models.sizing import fetch
from penstock.schemas.errors import EngineFailed, InvalidRequest, PenstockError

pytest.importorskip("huggingface_hub")
COMMIT = "c" * 40
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"w" * (40 << 20),
    "code.py": b"print()",
    "weights.bin": b"a pickle",
}


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
        if send_body:
            self.wfile.write(body)


class HubServer(ThreadingHTTPServer):
    ill: Callable[[Hub], None] | None = None
    """What it does in place of answering."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    server = HubServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "1")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for proxy in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(proxy, raising=False)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.usefixtures("hub")
async def test_a_revision_is_fetched_and_tells_how_far_it_is() -> None:
    told: list[float] = []
    folder = await fetch("owner/name", "v1", on_progress=told.append)
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors"}, "no code and no pickle"
    assert (folder / "model.safetensors").stat().st_size == len(FILES["model.safetensors"])
    assert told == sorted(told)
    assert told[-1] == pytest.approx(1, abs=0.02)
    assert any(0 < part < 0.9 for part in told), told
    again: list[float] = []
    assert await fetch("owner/name", "v1", on_progress=again.append) == folder
    assert again == [], "what is there is not fetched again"
    assert (await fetch("owner/name", "v1", code=True) / "code.py").read_bytes() == FILES["code.py"]


def silent(hub: Hub) -> None:
    threading.Event().wait()


@pytest.mark.parametrize(
    ("ill", "kind", "why"),
    [
        (None, InvalidRequest, "RevisionNotFoundError: 404"),
        (lambda hub: hub.refuse(401, "GatedRepo"), InvalidRequest, "GatedRepoError: 401"),
        (lambda hub: hub.refuse(404, "RepoNotFound"), InvalidRequest, "RepositoryNotFoundError: 404"),
        (lambda hub: hub.refuse(503), EngineFailed, "503"),
        (lambda hub: hub.refuse(429), EngineFailed, "429"),
        (lambda hub: hub.connection.close(), EngineFailed, "RemoteProtocolError"),
        (silent, EngineFailed, "ReadTimeout"),
    ],
    ids=["no-revision", "gated", "no-model", "unavailable", "too-many", "closes", "silent"],
)
async def test_why_a_model_cannot_be_fetched(
    hub: HubServer, ill: Callable[[Hub], None] | None, kind: type[PenstockError], why: str
) -> None:
    """What may pass by itself is tried again (EngineFailed), what a configuration must mend is not."""
    hub.ill = ill
    with pytest.raises(PenstockError, match=f"owner/name could not be fetched from the hub: .*{why}") as raised:
        await asyncio.wait_for(fetch("owner/name", "v2"), 60)
    assert type(raised.value) is kind
    assert "\n" not in str(raised.value)


async def test_a_hub_that_does_not_answer_is_passed_over_when_the_model_is_there(hub: HubServer) -> None:
    folder = await fetch("owner/name", "v1")
    hub.ill = silent
    assert await asyncio.wait_for(fetch("owner/name", "v1"), 60) == folder
