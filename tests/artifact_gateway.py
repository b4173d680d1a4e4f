"""The edge and the routes of artifacts on a real server, without a broker."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from kit.gateway_http import artifact_app
from penstock.cli.paths import free_port
from penstock.common.artifacts import ArtifactStore
from penstock.gateway.app import server_config
from penstock.gateway.edge.auth import AuthPolicy
from penstock.gateway.edge.keys import create_key
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.limits.limits import Limits
from support import wait_until


class ArtifactGateway:
    """A gateway's edge and artifact routes on a port, with keys of two tenants."""

    def __init__(self, store: ArtifactStore, folder: Path) -> None:
        keys = folder / "keys.json"
        self.secrets = secrets = {tenant: create_key(keys, tenant=tenant) for tenant in ("acme", "globex")}
        secrets["reader"] = create_key(keys, tenant="acme", scopes=["read"])
        policy = AuthPolicy.build(keys_file=keys, ticket_key="shared")
        limits = Allowances(defaults=Limits(artifact_bytes=20_000_000))
        port = free_port()
        config = server_config(artifact_app(store, limits, policy), "127.0.0.1", port, drain_s=1)
        config.lifespan = "off"
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        wait_until(lambda: self.server.started, describe="the server listens")
        self.url = f"http://127.0.0.1:{port}"
        self.clients = {
            name: httpx.Client(
                base_url=self.url,
                headers={"authorization": f"Bearer {secret}"},
                trust_env=False,
                timeout=30,
            )
            for name, secret in secrets.items()
        }

    def anybody(self, path: str, **options: Any) -> httpx.Response:
        """Without a key."""
        return httpx.get(f"{self.url}{path}", trust_env=False, timeout=30, **options)

    def __enter__(self) -> ArtifactGateway:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self.clients.values():
            client.close()
        self.server.should_exit = True
        self.thread.join(10)
