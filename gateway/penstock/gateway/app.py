"""The gateway's composition root: makes the parts, serves until told to stop, and stops in order."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from fastapi import FastAPI
from starlette.responses import RedirectResponse

from penstock.gateway import (
    artifacts,
    conversations,
    health,
    native,
    openai_routes,
    registry_routes,
    sockets,
    tickets,
)
from penstock.gateway.auth import AuthPolicy, UnsafeBind, check_bind
from penstock.gateway.edge import EdgeLimits, install_edge
from penstock.gateway.follower import Follower, missing_topics
from penstock.gateway.hub import Hub
from penstock.gateway.keys import KeysFileError
from penstock.gateway.limits import BodyLimits
from penstock.gateway.metrics import GatewayMetrics, Gauges
from penstock.gateway.service import GatewayService
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.store import Store
from penstock.gateway.view import View
from penstock.producers import admin
from penstock.producers.artifacts import ArtifactStore
from penstock.producers.transport import AsyncTransport, Transport
from penstock.schemas.errors import PenstockError
from penstock.schemas.registry import registry_codec

logger = logging.getLogger(__name__)

EXIT_OK, EXIT_FAILED, EXIT_UNREACHABLE = 0, 1, 3
ARTIFACT_BYTES = 64 * 2**20


def create_app(settings: GatewaySettings) -> FastAPI:
    """The ASGI application. Its lifespan connects to Kafka. Raises KeysFileError for a missing or broken keys file."""
    app = FastAPI(
        title="Penstock",
        summary="Durable, prioritised inference on Apache Kafka",
        lifespan=lambda app: _lifespan(app, settings),
    )
    for part in (native, conversations, artifacts, openai_routes, registry_routes, tickets, health, sockets):
        app.include_router(part.router)

    @app.get("/", include_in_schema=False)
    async def root() -> RedirectResponse:  # pyright: ignore[reportUnusedFunction]
        return RedirectResponse("/docs")

    policy = AuthPolicy.build(
        keys_file=settings.auth.keys_file,
        ticket_key=settings.auth.ticket_key,
        allowed_origins=settings.auth.allowed_origins,
        allowed_hosts=settings.auth.allowed_hosts,
    )
    conf = settings.gateway
    body = BodyLimits(max_bytes=conf.max_body_bytes, by_prefix={"/v1/artifacts": ARTIFACT_BYTES})
    install_edge(app, policy, EdgeLimits(body=body, max_http=conf.max_http, max_sockets=conf.max_sockets))
    app.state.on_failure = lambda reason: logger.critical("gateway.failed reason=%s", reason)  # pyright: ignore[reportUnknownLambdaType]
    return app


def prepare_stop(app: FastAPI) -> None:
    """Let go who waits or follows, so that nothing keeps the server from stopping."""
    if hasattr(app.state, "service"):
        app.state.service.stop()


@asynccontextmanager
async def _lifespan(app: FastAPI, settings: GatewaySettings) -> AsyncGenerator[None]:
    kafka, conf = settings.kafka_settings(), settings.gateway
    names = kafka.names
    counts = await asyncio.to_thread(admin.partition_counts, kafka, [names.result], 30)
    identity = f"{kafka.topic_prefix} {await asyncio.to_thread(_result_topic_id, settings)}"
    store = await asyncio.to_thread(Store, conf.view_path, identity)
    registry = settings.schema_registry
    codec = await asyncio.to_thread(registry_codec, registry.url, write=registry.write)
    hub = Hub(client_frames=conf.client_queue_frames)
    transport = Transport(kafka, delivery_timeout_s=10)
    service: GatewayService

    def gauges() -> Gauges:
        return service.gauges()

    metrics = GatewayMetrics(gauges)
    view = View(
        store,
        hub,
        names,
        counts.get(names.result, 1),
        on_outcome=metrics.on_outcome,
        on_status=metrics.on_status,
        codec=codec,
    )
    follower = Follower(
        kafka,
        view,
        store,
        horizon_ms=int(conf.horizon_h * 3_600_000),
        rediscover_s=conf.rediscover_s,
        on_failure=lambda reason: app.state.on_failure(reason),
    )
    kept = await asyncio.to_thread(ArtifactStore, conf.artifacts_dir, max_bytes=ARTIFACT_BYTES)
    service = GatewayService(
        settings,
        AsyncTransport(transport, asyncio.get_running_loop()),
        view,
        follower,
        hub,
        codec,
        artifacts=kept,
    )
    app.state.service, app.state.metrics, app.state.artifacts = service, metrics, kept
    await follower.start()
    # What has been made so far lives as long as the process: the collector need not look at it for every few requests.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    try:
        yield
    finally:
        # Who is left is told to come again; then nothing new is read, and what was read is written.
        prepare_stop(app)
        await follower.stop()
        await asyncio.to_thread(transport.close, 5)
        await asyncio.to_thread(store.close)


def _result_topic_id(settings: GatewaySettings) -> str:
    """Kafka's id of the result topic: a view of another one (deleted and made anew, another cluster) says nothing."""
    kafka = settings.kafka_settings()
    return admin.topic_id(kafka, kafka.names.result) or "none"


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: `run_gateway` says when to stop, so that clients are told first."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def server_config(app: FastAPI, host: str, port: int, *, drain_s: float, access_log: bool = False) -> uvicorn.Config:
    """How uvicorn serves the app."""
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,
        access_log=access_log,
        http="httptools",
        ws="websockets-sansio",
        ws_max_size=sockets.MAX_FRAME_BYTES + 1024,
        ws_max_queue=16,
        ws_per_message_deflate=False,
        timeout_graceful_shutdown=max(1, round(drain_s)),
        timeout_keep_alive=75,
        lifespan="on",
    )


async def run_gateway(settings: GatewaySettings) -> int:
    """Serve until SIGTERM or SIGINT; the process's exit code. What a user can mend is told in one line."""
    conf = settings.gateway
    try:
        check_bind(conf.host, keys_file=settings.auth.keys_file)
        app = create_app(settings)
    except (UnsafeBind, KeysFileError) as error:
        logger.error("gateway.cannot_start %s", error)
        return EXIT_FAILED
    kafka = settings.kafka_settings()
    try:
        await asyncio.to_thread(admin.broker_count, kafka, 30)
        topics = await asyncio.to_thread(admin.partition_counts, kafka)
    except PenstockError as error:
        logger.error("gateway.cannot_start %s", error)
        return EXIT_UNREACHABLE
    if missing := missing_topics(kafka.names, topics):
        logger.error("gateway.cannot_start missing topics: %s; `penstock topics create` makes them", ", ".join(missing))
        return EXIT_FAILED
    server = _Server(server_config(app, conf.host, conf.port, drain_s=conf.drain_s, access_log=conf.access_log))
    loop = asyncio.get_running_loop()
    failures: list[str] = []

    def stop() -> None:
        server.should_exit = True
        prepare_stop(app)

    def fail(reason: str) -> None:
        logger.critical("gateway.failed reason=%s", reason)
        failures.append(reason)
        stop()

    app.state.on_failure = fail
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    await server.serve()
    return EXIT_OK if server.started and not failures else EXIT_FAILED
