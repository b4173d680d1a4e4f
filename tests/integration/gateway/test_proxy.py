"""Gateways behind TLS and a proxy, as docs/how-to.md has it: its part for a real nginx, and stock clients."""

from __future__ import annotations

import json
import re
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from penstock.cli.paths import free_port
from penstock.gateway.edge.keys import create_key
from penstock.gateway.limits import allowances
from stock_clients import tool
from support import wait_until

ROOT = Path(__file__).parents[3]
NAME = "penstock.example"


@dataclass
class Proxy:
    port: int
    certificate: Path
    key: str
    gateways: list[Any]

    def client(self, address: str = "127.0.0.1") -> httpx.Client:
        """One whose connections come from this address of the machine."""
        verify = ssl.create_default_context(cafile=str(self.certificate))
        verify.check_hostname = False
        transport = httpx.HTTPTransport(verify=verify, local_address=address)
        headers = {"host": NAME, "x-api-key": self.key}
        return httpx.Client(transport=transport, base_url=f"https://127.0.0.1:{self.port}", headers=headers, timeout=20)


def documented(port: int, gateways: list[Any], folder: Path) -> str:
    """The part of the how-to, for this machine: an upstream and a server."""
    (text,) = re.findall(r"```nginx\n(.*?)```", (ROOT / "docs/how-to.md").read_text(), re.S)
    places = iter(f"server 127.0.0.1:{one.port};" for one in gateways)
    text = re.sub(r"server 10[.\d:]+;", lambda _: next(places), text)
    text = text.replace("include /etc/nginx", f"include {ROOT}/deploy/nginx")
    return text.replace("listen 443", f"listen 127.0.0.1:{port}").replace("/etc/ssl/penstock", f"{folder}/penstock")


@pytest.fixture
def proxy(own_place: Any, tmp_path: Path) -> Iterator[Proxy]:
    nginx, openssl = tool("nginx"), tool("openssl")
    keys = tmp_path / "keys.json"
    key = create_key(keys, tenant="acme")
    auth = {"keys_file": keys, "ticket_key": "shared"}
    gateways = [own_place.gateway(name, auth=auth, trusted_proxies=["127.0.0.0/8"]) for name in ("a", "b")]
    certificate = tmp_path / "penstock.pem"
    words = f"req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN={NAME} -keyout penstock.key -out penstock.pem".split()
    subprocess.run([openssl, *words], check=True, capture_output=True, cwd=tmp_path)
    port = free_port()
    places = "\n".join(
        f"{name}_temp_path {tmp_path}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    conf = tmp_path / "nginx.conf"
    conf.write_text(
        f"daemon off; pid {tmp_path}/pid; error_log {tmp_path}/error.log; worker_processes 1;\n"
        f"events {{}} http {{ access_log off; {places}\n{documented(port, gateways, tmp_path)} }}"
    )
    running = subprocess.Popen([nginx, "-e", str(tmp_path / "error.log"), "-p", str(tmp_path), "-c", str(conf)])
    made = Proxy(port, certificate, key, gateways)
    try:

        def serves() -> bool:
            try:
                with made.client() as client:
                    return client.get("/readyz").status_code == 200
            except httpx.TransportError:
                return False

        wait_until(serves, 20, lambda: (tmp_path / "error.log").read_text())
        yield made
    finally:
        running.terminate()
        assert running.wait(20) is not None


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
