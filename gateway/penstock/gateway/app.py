"""The gateway's composition root: makes the parts, serves until a signal to stop, and stops in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI
from fastapi.concurrency import run_in_threadpool
from starlette.routing import NoMatchFound
from starlette.types import ASGIApp
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from penstock.common.background import FAULT, on_faults
from penstock.common.own_path import claim_file
from penstock.common.stop_bound import StopBound
from penstock.common.tasks import end_all
from penstock.common.telemetry import active, register, tracing
from penstock.common.threads import in_daemon_thread
from penstock.gateway.batches import batch_routes, file_routes
from penstock.gateway.connecting import Connecting
from penstock.gateway.console import page as console_page
from penstock.gateway.context import GatewayContext, context_of_app, put_context
from penstock.gateway.document import docs_page
from penstock.gateway.document.described_routes import ROUTES, TABLE
from penstock.gateway.document.openapi import polish_openapi
from penstock.gateway.document.unknown_paths import not_found
from penstock.gateway.edge.auth import AuthPolicy, UnsafeBind, check_bind
from penstock.gateway.edge.bodies import BodyLimits
from penstock.gateway.edge.edge import EdgeParts, install_edge
from penstock.gateway.edge.identity import IdentityProxies, KeepsPeer
from penstock.gateway.edge.key_book import KeyBook
from penstock.gateway.edge.keys import KeysFileError
from penstock.gateway.edge.open_files import raise_open_files
from penstock.gateway.edge.protocols import Timeouts, protocols
from penstock.gateway.edge.queries import refuse_unknown_query
from penstock.gateway.edge.rules import check_declared
from penstock.gateway.edge.traced_http import TracedHttp
from penstock.gateway.hot_routes import HotRoutes
from penstock.gateway.openai import conversation_items, image_routes, item_events, response_routes, text_routes
from penstock.gateway.openai import routes as openai_routes
from penstock.gateway.openai.reached import reach_check
from penstock.gateway.process import freeze_startup_objects
from penstock.gateway.routes import admin as admin_routes
from penstock.gateway.routes import (
    admin_audit,
    admin_keys,
    admin_models,
    admin_requests,
    artifacts,
    bulk,
    commands,
    conversation_export,
    conversations,
    dead_letters,
    forks,
    health,
    native,
    request_results,
    sockets,
    summaries,
    usage,
)
from penstock.gateway.routes import registry as registry_routes
from penstock.gateway.routes import tickets as ticket_routes
from penstock.gateway.server import Server
from penstock.gateway.settings import GatewaySettings, allowances_of
from penstock.schemas.requests import prepare_validation

logger = logging.getLogger(__name__)

EXIT_OK, EXIT_FAILED = 0, 1
CONNECT_FIRST_S, CATCH_UP_FIRST_S = 5.0, 10.0
"""So long the port stays closed until this gateway can take requests: a proxy asks another one meanwhile, POST too."""
STOP_S = 14.0
"""So long a stop may take, besides the drain."""
STOP_NOTICE_S = 0.5
"""Before the end of a drain: clients that are left get the reason why their exchange ends."""
FORM_BYTES = 64 * 1024
"""What a multipart body has beside its file."""
ROUTERS = tuple(
    part.router
    for part in (
        console_page,
        docs_page,
        bulk,
        native,
        request_results,
        commands,
        conversations,
        conversation_export,
        conversation_items,
        item_events,
        summaries,
        forks,
        artifacts,
        text_routes,
        openai_routes,
        response_routes,
        image_routes,
        file_routes,
        batch_routes,
        registry_routes,
        ticket_routes,
        admin_routes,
        admin_models,
        admin_requests,
        admin_keys,
        admin_audit,
        usage,
        dead_letters,
        health,
        sockets,
    )
)


def create_app(settings: GatewaySettings) -> FastAPI:
    """The ASGI application. Its lifespan connects to Kafka. Raises KeysFileError for a missing or broken keys file."""
    prepare_validation()
    app = FastAPI(
        title="Penstock",
        summary="Durable, prioritised inference on Apache Kafka",
        lifespan=_lifespan,
        openapi_url=None,  # `docs_page` has both, made beside the loop
        docs_url=None,  # the framework's page loads its scripts from another host
        redoc_url=None,
    )
    check_declared((route for router in ROUTERS for route in router.routes), ROUTES)
    for router in ROUTERS:
        app.include_router(router, dependencies=[Depends(refuse_unknown_query)])
    book = KeyBook(unread="this gateway has not read its keys yet")
    policy = AuthPolicy.build(
        keys_file=settings.auth.keys_file,
        book=book,
        ticket_key=settings.auth.ticket_key,
        allowed_origins=settings.auth.allowed_origins,
        allowed_hosts=settings.auth.allowed_hosts,
        proxies=IdentityProxies(settings.gateway.user_header, settings.gateway.user_proxies),
    )
    conf = settings.gateway
    allowances = allowances_of(settings, policy.current)
    context = GatewayContext(settings=settings, policy=policy, key_book=book, allowances=allowances)
    put_context(app, context)
    register(context.metrics.registry)
    polish_openapi(app)
    bodies = BodyLimits(
        max_bytes=conf.max_body_bytes,
        max_large_bytes=conf.max_large_body_bytes,
        max_file_bytes=settings.artifacts.max_bytes,
        max_lines_bytes=conf.max_batch_bytes + FORM_BYTES,
        timeout_s=conf.body_timeout_s,
    )
    install_edge(
        app,
        EdgeParts(
            routes=TABLE,
            not_found=not_found,
            policy=policy,
            allowances=context.allowances,
            connections=context.connections,
            bodies=bodies,
            awaited=context.awaited,
            read_headers=context.read_headers,
            check_reached=reach_check(context),
            metrics=context.metrics.http,
            audit=context.audit,
        ),
        first=HotRoutes,
        outermost=_traced,
    )
    return app


def _traced(app: ASGIApp) -> ASGIApp:
    return app if (telemetry := active()) is None else TracedHttp(app, telemetry)


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncGenerator[None]:
    """Connect and catch up before the first client is taken, if that is soon; else serve, and say what is missing."""
    await prepare_to_serve(app)
    context = context_of_app(app)
    connecting = Connecting(context)
    task = asyncio.create_task(connecting.until_connected(), name="connect")
    keys = asyncio.create_task(context.connections.watch(), name="keys")
    await asyncio.wait([task], timeout=CONNECT_FIRST_S)
    if context.connected is not None:
        with suppress(TimeoutError):
            async with asyncio.timeout(CATCH_UP_FIRST_S):
                await _until_caught_up(context)
                if context.problems is not None:  # the first client is told all that is known, and nothing of before
                    await context.problems.read()
                    context.problems.look()
    try:
        yield
    finally:
        # Clients that are left are asked to retry; then nothing new is read, and what was read is written.
        await end_all((task, keys))
        context.prepare_stop()
        await connecting.close()


async def _until_caught_up(context: GatewayContext) -> None:
    while context.awaited() is not None and not (context.draining or context.failed):
        await asyncio.sleep(0.02)


async def prepare_to_serve(app: FastAPI) -> None:
    """Do what the framework puts off to the first requests, which would hold the loop for a tenth of a second."""
    with suppress(NoMatchFound):
        app.url_path_for("no route has this name")  # looks at all routes, which are built by that
    await run_in_threadpool(int)  # anyio imports what it needs on asyncio
    freeze_startup_objects()


def server_config(app: FastAPI, host: str, port: int, *, drain_s: float) -> uvicorn.Config:
    conf = context_of_app(app).settings.gateway
    proxied: Any = ProxyHeadersMiddleware(app, conf.trusted_proxies)  # type: ignore[arg-type]
    http, ws = protocols(Timeouts(head_s=conf.head_timeout_s, write_s=conf.write_timeout_s))
    return uvicorn.Config(
        KeepsPeer(proxied),
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        http=http,
        ws=ws,
        ws_max_size=sockets.MAX_FRAME_BYTES + 1024,
        ws_max_queue=16,
        ws_per_message_deflate=False,
        timeout_graceful_shutdown=max(1, round(drain_s)),
        timeout_keep_alive=75,
        proxy_headers=False,
        lifespan="on",
    )


def with_own_view(settings: GatewaySettings) -> GatewaySettings:
    """Settings with a view's file that no other gateway writes, held until this process ends. Raises OSError.

    Two gateways that write one file undo each other's transitions.
    """
    view = claim_file(settings.gateway.view_path)
    return settings.model_copy(update={"gateway": settings.gateway.model_copy(update={"view_path": view.path})})


async def run_gateway(settings: GatewaySettings) -> int:
    """Serve until SIGTERM or SIGINT; the process's exit code. What a user can mend is printed in one line."""
    with tracing(settings.telemetry, "gateway"):
        return await _run_gateway(settings)


async def _run_gateway(settings: GatewaySettings) -> int:
    try:
        check_bind(settings.gateway.host, keys_file=settings.auth.keys_file)
        settings = await in_daemon_thread(with_own_view, settings)
        app = create_app(settings)
    except (UnsafeBind, KeysFileError, OSError) as error:
        logger.error("gateway.cannot_start %s", error)
        return EXIT_FAILED
    conf = settings.gateway
    context = context_of_app(app)
    raise_open_files(conf.max_http + conf.max_sockets)
    server = Server(server_config(app, conf.host, conf.port, drain_s=conf.drain_s))
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if server.should_exit:  # a second signal
            context.prepare_stop()
            return
        server.should_exit = True
        bound.begin()
        waits_for = context.waits_for.text if context.connected is None else context.connected.facts.catching_up()
        logger.info("gateway.stopping waits_for=%s", waits_for or "nothing")
        context.prepare_drain()
        loop.call_later(max(0.0, conf.drain_s - STOP_NOTICE_S), context.prepare_stop)

    def announce_restart() -> float:
        context.draining = True
        return conf.restart_notice_s

    def fail(reason: str) -> None:
        logger.critical("gateway.failed reason=%s", reason)
        context.failed = True
        stop()
        context.prepare_stop()  # nothing comes any more that a call could wait for

    def fault() -> None:
        """What it serves can mostly end in order, within the drain."""
        if not context.failed:
            logger.critical("gateway.failed reason=%s", FAULT)
            context.failed = True
            if not server.should_exit:
                stop()

    context.on_failure = fail
    on_faults(loop, fault)
    with StopBound("gateway", conf.drain_s + STOP_S, stop, announce_restart) as bound:
        await server.serve()
    return EXIT_OK if server.started and not context.failed else EXIT_FAILED
