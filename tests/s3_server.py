"""A server of the S3 protocol for tests, in a thread: moto's, which keeps its buckets in memory."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

import httpx
from moto.server import ThreadedMotoServer


@dataclass(frozen=True, slots=True)
class Bucket:
    """An empty bucket, and how to reach it."""

    location: str
    options: dict[str, str]


class S3Server:
    """Started on a free port of loopback; `stop` ends it."""

    def __init__(self) -> None:
        self._server: Any = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.url = f"http://{host}:{port}"

    def bucket(self) -> Bucket:
        name = f"bucket{uuid.uuid4().hex[:12]}"  # the client for GCS writes a dash as %2D, which moto does not read
        httpx.put(f"{self.url}/{name}", trust_env=False).raise_for_status()
        return Bucket(
            location=f"s3://{name}/penstock",
            options={
                "aws_endpoint": self.url,
                "aws_region": "us-east-1",
                "aws_access_key_id": "KEYIDTHATNOBODYMAYSEE",
                "aws_secret_access_key": "SECRETTHATNOBODYMAYSEE",
                "allow_http": "true",
            },
        )

    def stop(self) -> None:
        self._server.stop()
