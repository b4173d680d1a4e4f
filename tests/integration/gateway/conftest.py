"""Gateways on a real uvicorn and a real broker, and a scribe who writes to the topics what workers would."""

from __future__ import annotations

import dataclasses
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from penstock.cli.paths import free_port
from penstock.common.configuration import KafkaSection, RegistrySection
from penstock.common.settings import KafkaSettings
from penstock.common.transport import Delivery, Transport
from penstock.gateway import app as gateway_app
from penstock.gateway.context import context_of_app
from penstock.gateway.settings import AuthSection, GatewaySection, GatewaySettings
from penstock.schemas.codec import default_codec
from penstock.schemas.ids import new_request_id
from penstock.schemas.records import (
    STATUS_RANKS,
    ControlCommand,
    InferenceRequest,
    Origin,
    Preview,
    Record,
    ResultEvent,
    StatusEvent,
)
from penstock.schemas.requests import parse_request
from penstock.schemas.topics import request_key
from support import create_topics, wait_until

PAYLOAD = {"messages": [{"role": "user", "content": "p"}]}


class Scribe:
    """Writes records; each call returns when the broker has acknowledged, so that calls are in order."""

    def __init__(self, settings: KafkaSettings) -> None:
        self.settings = settings
        self.names = settings.names
        self.transport = Transport(settings)

    def put(self, topic: str, record: Record | bytes | None, key: bytes | None, **options: Any) -> Delivery:
        done: list[Delivery] = []
        value = record if isinstance(record, bytes) or record is None else default_codec().encode(record)
        self.transport.send(topic, value, key=key, on_delivery=done.append, **options)
        wait_until(lambda: done, describe=f"{topic} acknowledges", poll_s=0.002)
        assert done[0].error is None, done[0].error
        return done[0]

    def request(self, *, stream: bool = True, pool: str | None = None, **fields: Any) -> Job:
        """Put a request on its topic, as a service without gateway does."""
        body = {"task": "text_generation", "payload": PAYLOAD, "stream": stream, **fields}
        body |= {} if pool is None else {"pool": pool}
        tenant = body.pop("tenant", "default")
        request = parse_request(body, tenant=tenant, request_id=new_request_id(), now_ms=1)
        topic = self.names.request(request.task, request.priority, request.pool)
        delivery = self.put(topic, request, request_key(request))
        origin = Origin(
            topic=topic,
            partition=delivery.partition,
            offset=delivery.offset,
            append_time_ms=delivery.timestamp_ms,
        )
        return Job(self, request, origin)

    def job(self, request_id: str, tenant: str = "default") -> Job:
        """A request that a gateway has accepted."""
        request = InferenceRequest(
            request_id=request_id, tenant=tenant, task="text_generation", text_generation={}, created_at=1
        )
        topic = self.names.request(request.task, request.priority)
        return Job(self, request, Origin(topic=topic, partition=0, offset=0, append_time_ms=1))

    def control(self, kind: str, job: Job) -> Delivery:
        command = ControlCommand(kind=kind, request_id=job.id, tenant=job.request.tenant, created_at=1)
        return self.put(self.names.control, command, f"{job.id}/{kind}".encode())


@dataclasses.dataclass
class Job:
    """One request as its worker sees it."""

    scribe: Scribe
    request: InferenceRequest
    origin: Origin

    @property
    def id(self) -> str:
        return self.request.request_id

    def status(self, status: str, *, attempt: int = 1, epoch: int = 1, **values: Any) -> Job:
        event = StatusEvent(
            request_id=self.id,
            tenant=self.request.tenant,
            status=status,
            done=STATUS_RANKS[status] == 100,
            rank=STATUS_RANKS[status],
            attempt=attempt,
            epoch=epoch,
            origin=self.origin,
            worker_id="scribe",
            created_at=1,
            **values,
        )
        self.scribe.put(self.scribe.names.status, event, self.id.encode())
        return self

    def chunk(self, text: str, at: int, *, attempt: int = 1, epoch: int = 1) -> Job:
        return self._result(kind="chunk", text=text, text_offset=at, attempt=attempt, epoch=epoch)

    def show(self, preview: Preview) -> Job:
        return self._result(kind="preview", preview=preview, attempt=1, epoch=1)

    def result_event(self, text: str) -> ResultEvent:
        """The event that `end` writes."""
        return self._event(kind="terminal", status="completed", text_generation={"text": text}, attempt=1, epoch=1)

    def end(self, text: str, *, attempt: int = 1, epoch: int = 1, status: str = "completed", **values: Any) -> Job:
        output = {"text": text} if status == "completed" else None
        values = {"text_generation": output, **values}
        return self._result(kind="terminal", status=status, attempt=attempt, epoch=epoch, **values)

    def _event(self, **values: Any) -> ResultEvent:
        return ResultEvent(
            request_id=self.id,
            tenant=self.request.tenant,
            origin=self.origin,
            task=self.request.task,
            created_at=2,
            worker_id="scribe",
            **values,
        )

    def _result(self, **values: Any) -> Job:
        self.scribe.put(self.scribe.names.result, self._event(**values), self.id.encode())
        return self


@dataclasses.dataclass
class Gateway:
    """A gateway in this process, on a thread of its own."""

    app: FastAPI
    server: uvicorn.Server
    thread: threading.Thread
    port: int
    http: httpx.Client

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def ws(self) -> str:
        return f"ws://127.0.0.1:{self.port}/v1/ws"

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(path, **options)

    def submit(self, headers: dict[str, str] | None = None, **fields: Any) -> str:
        body = {"task": "text_generation", "stream": True, "payload": PAYLOAD, **fields}
        answer = self.http.post("/v1/requests", json=body, headers=headers)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["request_id"])

    def wait_for(self, request_id: str, status: str) -> None:
        def found() -> bool:
            return self.get(f"/v1/requests/{request_id}").json().get("status") == status

        wait_until(found, describe=f"{request_id} is {status}")

    def stop(self) -> None:
        context_of_app(self.app).prepare_stop()
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive(), "the gateway did not stop"
        self.http.close()


class Place:
    """Topics of their own, a scribe, and any number of gateways on them."""

    def __init__(self, kafka: Any, folder: Path) -> None:
        self.prefix = f"g{uuid.uuid4().hex[:6]}-"
        self.bootstrap: str = kafka.bootstrap_servers
        self.folder = folder
        create_topics(self.bootstrap, self.prefix, partitions=2)
        self.kafka = KafkaSettings(bootstrap_servers=self.bootstrap, topic_prefix=self.prefix)
        self.scribe = Scribe(self.kafka)
        self._stack = ExitStack()

    def settings(
        self,
        name: str,
        auth: dict[str, Any] | None = None,
        schema_registry: dict[str, Any] | None = None,
        **options: Any,
    ) -> GatewaySettings:
        conf = {"view_path": self.folder / f"{name}.sqlite", "artifacts_dir": str(self.folder / "artifacts"), **options}
        return GatewaySettings(
            kafka=KafkaSection(bootstrap_servers=self.bootstrap, topic_prefix=self.prefix),
            gateway=GatewaySection(**conf),
            auth=AuthSection(**(auth or {})),
            schema_registry=RegistrySection(**(schema_registry or {})),
        )

    def gateway(self, name: str = "g1", *, ready: bool = True, port: int | None = None, **options: Any) -> Gateway:
        app = gateway_app.create_app(self.settings(name, **options))
        port = port or free_port()
        server = uvicorn.Server(gateway_app.server_config(app, "127.0.0.1", port, drain_s=2))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        gateway = Gateway(app, server, thread, port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30))
        wait_until(lambda: server.started or not thread.is_alive(), 30, "uvicorn is up")
        assert server.started, "the gateway did not start"
        self._stack.callback(lambda: gateway.stop() if thread.is_alive() else None)
        if ready:
            wait_until(lambda: gateway.get("/readyz").status_code == 200, 30, lambda: gateway.get("/readyz").text)
        return gateway

    def close(self) -> None:
        self._stack.close()
        self.scribe.transport.close()


@pytest.fixture(scope="module")
def place(kafka: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    made = Place(kafka, tmp_path_factory.mktemp("gateway"))
    yield made
    made.close()


@pytest.fixture
def own_place(kafka: Any, tmp_path: Path) -> Iterator[Place]:
    """For tests that want topics without others' requests."""
    made = Place(kafka, tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def gateway(place: Place) -> Gateway:
    return place.gateway()


@pytest.fixture
def scribe(place: Place) -> Scribe:
    return place.scribe


@pytest.fixture
def sse() -> Callable[..., list[tuple[str, dict[str, Any]]]]:
    return read_events


def read_events(
    gateway: Gateway,
    request_id: str,
    after: str | None = None,
    *,
    until: Callable[[list[tuple[str, dict[str, Any]]]], bool] | None = None,
    timeout_s: float = 15,
) -> list[tuple[str, dict[str, Any]]]:
    """(event id, frame) of the stream until it ends, or until what has come is enough."""
    import json

    headers = {"Last-Event-ID": after} if after else {}
    found: list[tuple[str, dict[str, Any]]] = []
    path = f"/v1/requests/{request_id}/events"
    with gateway.http.stream("GET", path, headers=headers, timeout=timeout_s) as stream:
        assert stream.status_code == 200, stream.read()
        identity = ""
        for line in stream.iter_lines():
            assert line != ": waiting", "nothing came for ten seconds"
            if line.startswith("id: "):
                identity = line[4:]
            elif line.startswith("data: "):
                found.append((identity, json.loads(line[6:])))
                if until is not None and until(found):
                    return found
    return found
