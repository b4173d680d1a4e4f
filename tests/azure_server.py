"""A server of Azure's blob protocol for tests: Azurite, a program from npm, installed when it is first wanted."""

from __future__ import annotations

import base64
import hashlib
import hmac
import subprocess
import uuid
from email.utils import formatdate
from pathlib import Path

import httpx

from s3_server import Bucket
from stock_clients import installed_by_npm, tool
from support import wait_until
from system import free_port

AZURITE = "azurite@3.37.0"
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's own, the same for everybody."""


class AzureServer:
    """In memory, on a free port of loopback, its log in a folder; `stop` ends it."""

    def __init__(self, folder: Path) -> None:
        port = free_port()
        installed = installed_by_npm(AZURITE)
        program = installed / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
        options = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence", "--skipApiVersionCheck"]
        self.url = f"http://127.0.0.1:{port}/{ACCOUNT}"
        command = [tool("node"), str(program), *options, "--disableTelemetry"]
        self._process = _started(command, self.url, folder / "azurite.log")

    def bucket(self) -> Bucket:
        """An empty container."""
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        where = f"{self.url}/{name}?restype=container"
        httpx.put(where, headers=_signed(name), content=b"", trust_env=False).raise_for_status()
        return Bucket(
            location=f"az://{name}/penstock",
            options={
                "azure_storage_account_name": ACCOUNT,
                "azure_storage_account_key": ACCOUNT_KEY,
                "azure_storage_endpoint": self.url,
                "allow_http": "true",
            },
        )

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def _started(command: list[str], url: str, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)

    def answers() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            httpx.get(url, trust_env=False, timeout=5)
        except httpx.TransportError:
            return False
        return True

    wait_until(answers, 60, lambda: log.read_text()[-500:])
    return process


def _signed(container: str) -> dict[str, str]:
    """Headers of the request that makes a container, signed with the account's key (Shared Key authorization)."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
    canonical = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
    resource = f"/{ACCOUNT}/{ACCOUNT}/{container}\nrestype:container"
    text = "PUT" + "\n" * 12 + canonical + resource
    digest = hmac.new(base64.b64decode(ACCOUNT_KEY), text.encode(), hashlib.sha256).digest()
    return {**headers, "authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"}
