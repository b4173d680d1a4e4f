"""The places of artifacts that every store must serve alike: a folder, and servers of S3, Azure Blob and GCS."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from azure_server import AzureServer
from gcs_server import GcsServer
from penstock.common.artifacts import ArtifactStore, StorePlace
from s3_server import Bucket, S3Server


@dataclass
class Clock:
    """Seconds since the epoch, moved by the test."""

    now_s: float = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class World:
    """Makes stores on one place, which a second process would see too; `cold` is a store beside it."""

    kind: str
    location: str
    cold: StorePlace
    options: dict[str, str] = field(default_factory=dict[str, str])
    clock: Clock = field(default_factory=Clock)

    def store(self, **settings: Any) -> ArtifactStore:
        values: dict[str, Any] = {"options": self.options, "stores": {"cold": self.cold}, "clock": self.clock}
        return ArtifactStore(self.location, **{**values, **settings})

    def paths(self) -> list[str]:
        """Of all objects that lie in the default place."""
        return sorted(item["path"] for items in self.client().list() for item in items)

    def write(self, path: str, data: bytes) -> None:
        """Behind the store's back."""
        self.client().put(path, data)

    def client(self) -> Any:
        from obstore.store import LocalStore, from_url

        if self.kind == "folder":
            return LocalStore(self.location, mkdir=True)
        config: Any = {name: value for name, value in self.options.items() if name != "allow_http"}
        make: Any = from_url
        return make(self.location, config=config, client_options={"allow_http": True})


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    server = S3Server()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def bucket(s3_server: S3Server) -> Bucket:
    return s3_server.bucket()


@pytest.fixture(scope="session")
def azure_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureServer]:
    server = AzureServer(tmp_path_factory.mktemp("azure"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def gcs_server(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> GcsServer:
    return GcsServer(s3_server, tmp_path_factory.mktemp("gcs"))


@pytest.fixture(params=["folder", "s3", "azure", "gcs"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    if request.param == "folder":
        return World("folder", str(tmp_path / "artifacts"), StorePlace(location=str(tmp_path / "cold"), options={}))
    make: Callable[[], Bucket] = request.getfixturevalue(f"{request.param}_server").bucket
    first, second = make(), make()
    return World(
        request.param, first.location, StorePlace(location=second.location, options=second.options), first.options
    )
