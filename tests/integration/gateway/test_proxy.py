"""Gateways behind TLS and a proxy, as the how-to has it: its part for a real nginx, and stock clients."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from kit.http_server import Answer, Call, serving_http
from kit.nginx import documented, running_nginx, without_tls
from penstock.cli.paths import free_port
from penstock.gateway import app as gateway_app
from penstock.gateway.edge.keys import create_key
from penstock.gateway.limits import allowances
from penstock.gateway.view.follower import Follower
from stock_clients import tool
from support import wait_until

NAME = "penstock.example"


@dataclass
class Proxy:
    port: int
    certificate: Path
    key: str
    gateways: list[Any]
    start: Callable[..., Any]

    def client(self, address: str = "127.0.0.1") -> httpx.Client:
        """One whose connections come from this address of the machine."""
        verify = ssl.create_default_context(cafile=str(self.certificate))
        verify.check_hostname = False
        transport = httpx.HTTPTransport(verify=verify, local_address=address)
        headers = {"host": NAME, "x-api-key": self.key}
        return httpx.Client(transport=transport, base_url=f"https://127.0.0.1:{self.port}", headers=headers, timeout=20)


@pytest.fixture
def proxy(own_place: Any, tmp_path: Path) -> Iterator[Proxy]:
    openssl = tool("openssl")
    keys = tmp_path / "keys.json"
    key = create_key(keys, tenant="acme")
    auth = {"keys_file": keys, "ticket_key": "shared"}
    start = partial(own_place.gateway, auth=auth, trusted_proxies=["127.0.0.0/8"])
    gateways = [start(name) for name in ("a", "b")]
    certificate = tmp_path / "penstock.pem"
    words = f"req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN={NAME} -keyout penstock.key -out penstock.pem".split()
    subprocess.run([openssl, *words], check=True, capture_output=True, cwd=tmp_path)
    port = free_port()
    text = documented(port, [one.port for one in gateways]).replace("/etc/ssl/penstock", f"{tmp_path}/penstock")
    with running_nginx(tmp_path, text):
        yield Proxy(port, certificate, key, gateways, start)


def test_what_the_how_to_says_of_tls_and_a_proxy_works(proxy: Proxy, own_place: Any) -> None:
    with proxy.client() as client:
        led = client.get("/v1/requests/")
        assert led.headers["location"] == f"https://{NAME}/v1/requests", "URLs are those that clients use"
        kept = client.post("/v1/artifacts", content=bytes(3_000_000))
        assert kept.status_code == 201, kept.text
        body = {"task": "text_generation", "stream": True, "payload": {"prompt": "p"}}
        request_id = client.post("/v1/requests", json=body).json()["request_id"]
        job = own_place.scribe.job(request_id, "acme")
        job.chunk("one", 0)
        with client.stream("GET", f"/v1/requests/{request_id}/events") as stream:
            types = (json.loads(line[6:])["type"] for line in stream.iter_lines() if line.startswith("data: "))
            assert "chunk" in (next(types), next(types)), "it comes before the end is there"
            verify = ssl.create_default_context(cafile=str(proxy.certificate))
            verify.check_hostname = False
            headers = {"x-api-key": proxy.key}
            with connect(
                f"wss://{NAME}/v1/ws",
                sock=socket.create_connection(("127.0.0.1", proxy.port)),
                ssl=verify,
                additional_headers=headers,
                proxy=None,
            ) as followed:
                followed.send(json.dumps({"type": "subscribe", "request_id": request_id}))
                while json.loads(followed.recv(10))["type"] != "chunk":
                    pass
                job.end("one")
                while json.loads(followed.recv(10))["type"] != "result":
                    pass
            assert list(types)[-1] == "result"
        proxy.gateways[0].stop()
        for _ in range(4):
            assert client.get(f"/v1/requests/{request_id}").json()["status"] == "completed"


def test_each_client_behind_a_proxy_has_its_own_limit_of_public_calls(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allowances, "PUBLIC_PER_S", 5.0)  # one client of a slow machine exceeds it at both gateways
    with proxy.client("127.0.0.2") as busy, proxy.client("127.0.0.3") as other:
        give_up = time.monotonic() + 60
        while busy.get("/registry/subjects").status_code != 429:
            assert time.monotonic() < give_up, "this address was never held back"
        assert other.get("/registry/subjects").status_code == 200


def test_nginx_passes_posts_to_the_others_until_a_gateway_that_starts_takes_requests(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    begins, go_on, catch_up = threading.Event(), threading.Event(), Follower._first_catch_up

    async def held(self: Follower) -> None:
        begins.set()
        while not go_on.is_set():
            await asyncio.sleep(0.01)
        await catch_up(self)

    def statuses() -> list[int]:
        body = {"task": "text_generation", "payload": {"prompt": "p"}}
        with proxy.client() as client:
            return [client.post("/v1/requests", json=body).status_code for _ in range(30)]

    monkeypatch.setattr(Follower, "_first_catch_up", held)
    port = proxy.gateways[1].port
    for first_s in (60.0, 0.1):
        monkeypatch.setattr(gateway_app, "CATCH_UP_FIRST_S", first_s)
        proxy.gateways[1].stop()
        begins.clear()
        go_on.clear()
        with ThreadPoolExecutor(1) as threads:
            starting = threads.submit(proxy.start, "b", ready=False, port=port)
            assert begins.wait(30)
            if first_s == 0.1:  # it has waited long enough: it serves operators, and says what it waits for
                proxy.gateways[1] = starting.result(30)
                assert 503 in statuses()
            else:
                assert statuses() == [202] * 30
            go_on.set()
            proxy.gateways[1] = starting.result(30)
        wait_until(lambda: httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200, 30, "it is ready")


def test_a_gateway_that_refuses_stays_in_use_and_one_that_is_gone_is_a_503(tmp_path: Path) -> None:
    """As while Kafka is away: each client gets the gateway's own answer, not one of nginx."""

    def refuse(call: Call) -> Answer:
        return 503, b"of a gateway", {"retry-after": "7"}

    port = free_port()
    with ExitStack() as stack:
        with serving_http(refuse) as one, serving_http(refuse) as other:
            ports = [one.server_port, other.server_port]
            stack.enter_context(running_nginx(tmp_path, without_tls(documented(port, ports))))
            client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}"))
            answers = [client.get("/v1/models") for _ in range(6)]
            assert [(one.headers["retry-after"], one.content) for one in answers] == [("7", b"of a gateway")] * 6
        lost = client.post("/v1/requests", json={})
        assert (lost.status_code, lost.headers["retry-after"]) == (503, "1")
        assert lost.json()["error"]["code"] == "overloaded"
