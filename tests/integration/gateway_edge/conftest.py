"""The edge on a real uvicorn, in front of a service whose answers follow a script in the prompt."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, WebSocket

from gateway_parts import edge_of, service_with
from penstock.cli.paths import free_port
from penstock.gateway.app import server_config
from penstock.gateway.context import GatewayContext, context_of_app, put_context
from penstock.gateway.edge.auth import AuthPolicy
from penstock.gateway.edge.bodies import BodyLimits
from penstock.gateway.edge.edge import install_edge
from penstock.gateway.hot_routes import HotRoutes
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.limits.callers import Caller, caller_of
from penstock.gateway.metrics import Gauges
from penstock.gateway.openai import response_routes, text_routes
from penstock.gateway.openai import routes as openai_routes
from penstock.gateway.routes import health
from penstock.gateway.routes import registry as registry_routes
from penstock.gateway.routes import tickets as ticket_routes
from penstock.gateway.service.models import public_models
from penstock.gateway.service.service import GatewayService
from penstock.gateway.service.submitting import Accepted, Checked, Submitter
from penstock.gateway.settings import AuthSection, GatewaySection, GatewaySettings, allowances_of
from penstock.gateway.view.fleet import KnownModels
from penstock.gateway.view.frames import ChunkFrame, Frame, RestartedFrame, ResultFrame, StatusFrame
from penstock.gateway.view.liveness import Liveness, judge
from penstock.schemas.errors import ContextLengthExceeded, EngineFailed, Overloaded, PenstockError, error_body
from penstock.schemas.records import InferenceRequest, ModelInfo, WorkerState
from support import wait_until

MODELS = [
    ModelInfo(
        model="smol",
        tasks=["text_generation"],
        aliases=["default"],
        engine="text",
        context_window=2048,
        state="ready",
        updated_at=1_700_000_000_000,
        worker_id="w1",
    ),
    ModelInfo(
        model="org/minilm",
        tasks=["embedding"],
        engine="embedding",
        dimensions=3,
        state="ready",
        updated_at=1_700_000_000_000,
        worker_id="w1",
    ),
]
MODELS.append(
    ModelInfo(
        model="far",
        tasks=["text_generation", "embedding"],
        engine="remote",
        state="ready",
        updated_at=1_700_000_000_000,
        worker_id="w1",
    )
)
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Paris"}'}}
LOGPROBS = [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": None}]
USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}


@dataclass
class Readiness:
    ready: bool
    reason: str | None = None
    starting: bool = False
    lacks: str | None = None


class Script:
    """The frames of one request, one by one, in the place of a Subscription."""

    def __init__(self, frames: AsyncIterator[Frame], closed: Callable[[], None]) -> None:
        self._frames = frames
        self._coming: asyncio.Future[Frame | None] | None = None
        self._closed: Callable[[], None] | None = closed

    def __aiter__(self) -> Script:
        return self

    async def __anext__(self) -> Frame:
        frame = await self.next_frame()
        if frame is None:
            raise StopAsyncIteration
        return frame

    async def next_frame(self) -> Frame | None:
        if self._coming is None:
            self._coming = asyncio.ensure_future(anext(self._frames, None))
        await asyncio.wait({self._coming})  # who gives up leaves it to the next
        came, self._coming = self._coming, None
        return came.result()

    def take_nowait(self) -> list[Frame]:
        return []

    def close(self) -> None:
        if self._coming is not None:
            self._coming.cancel()
        closed, self._closed = self._closed, None
        if closed is not None:
            closed()


@dataclass
class FakeService:
    """Plays what the first word of the prompt says: see `_play`."""

    requests: list[InferenceRequest] = field(default_factory=list[InferenceRequest])
    cancelled: list[str] = field(default_factory=list[str])
    open_subscriptions: int = 0
    followed_elsewhere: bool = False
    ready: Readiness = field(default_factory=lambda: Readiness(True))
    workers: list[WorkerState] = field(default_factory=list[WorkerState])

    @property
    def parts(self) -> GatewayService:
        """Itself in the place of each part of the service."""
        return service_with(self)

    def gauges(self) -> Gauges:
        return Gauges(queue_depth={"high": 2}, oldest_age_s={"high": 1.5}, inflight=3)

    def models(self) -> list[ModelInfo]:
        return MODELS

    def known_models(self) -> KnownModels:
        return KnownModels(MODELS)

    def public_models(self) -> list[dict[str, Any]]:
        return public_models(MODELS, self.liveness().without_worker, self.workers)

    def routed(self, request: InferenceRequest) -> InferenceRequest:
        return request

    def readiness(self) -> Readiness:
        return self.ready

    def liveness(self) -> Liveness:
        return judge(self.workers, MODELS, 0, 1)

    def waiting_without_worker(self, liveness: Liveness) -> list[Any]:
        return []

    async def check(self, caller: Caller, request: InferenceRequest) -> Checked:
        nothing: Any = None
        anywhere: Any = lambda *_: None  # noqa: E731
        submitter = Submitter(GatewaySettings(), nothing, nothing, nothing, nothing, Allowances(), self, anywhere)
        return await submitter.check(caller, request)

    def check_room(self, checked: Checked) -> None:
        pass

    async def submit(self, checked: Checked, **options: Any) -> Accepted:
        request = checked.request
        if self._words(request)[0] == "busy":
            raise Overloaded("the gateway is full", retry_after_s=3)
        self.requests.append(request)
        return Accepted(request.request_id)

    async def submit_parts(
        self, parts: Sequence[tuple[Checked, Any]], **options: Any
    ) -> list[Accepted | BaseException]:
        return await asyncio.gather(*(self.submit(one) for one, _ in parts), return_exceptions=True)

    def peek(self, tenant: str, request_id: str) -> None:
        """Nothing is followed here."""

    async def abandon(self, tenant: str, request_id: str) -> None:
        self.cancelled.append(request_id)

    def subscribe(self, tenant: str, request_id: str, after: Any = None, *, resumes: bool = True) -> Script:
        (request,) = [r for r in self.requests if (r.tenant, r.request_id) == (tenant, request_id)]
        self.open_subscriptions += 1
        return Script(self._play(request), self._closed)

    def await_outcome(self, tenant: str, request_id: str, *, resumes: bool = True) -> Script:
        return self.subscribe(tenant, request_id)

    def followed(self, tenant: str, request_id: str) -> bool:
        return self.followed_elsewhere

    def _closed(self) -> None:
        self.open_subscriptions -= 1

    @staticmethod
    def _words(request: InferenceRequest) -> tuple[str, str]:
        if request.task == "embedding":
            return "embed", ""
        if request.payload.get("prompt_token_ids"):
            return "say", "tokens"
        prompt = request.payload.get("prompt") or request.payload["messages"][-1]["content"]
        word, _, rest = prompt.partition(" ")
        return word, rest

    async def _play(self, request: InferenceRequest) -> AsyncIterator[Frame]:
        rid = request.request_id
        word, rest = self._words(request)

        def status(name: str) -> StatusFrame:
            return StatusFrame(request_id=rid, status=name, done=False, cursor="c", detail=None, position=None)

        def chunk(text: str, offset: int) -> ChunkFrame:
            return ChunkFrame(request_id=rid, text=text, offset=offset, cursor="c")

        def end(status: str, result: dict[str, Any] | None = None, error: PenstockError | None = None) -> ResultFrame:
            body = None if error is None else error_body(error, rid)["error"]
            return ResultFrame(request_id=rid, status=status, result=result, error=body, cursor="c")

        def done(text: str) -> ResultFrame:
            return end("completed", {"text": text, "finish_reason": "stop", "usage": USAGE})

        yield status("queued")
        match word:
            case "say" | "quiet":
                yield status("running")
                for at in range(0, len(rest) if request.stream and word == "say" else 0, 3):
                    yield chunk(rest[at : at + 3], at)
                yield done(rest)
            case "embed":
                texts = request.payload.get("input_token_ids") or request.payload["input"]
                vectors = [[0.5, -0.25, float(n)] for n in range(len(texts))]
                yield end("completed", {"embeddings": vectors, "dimensions": 3, "usage": USAGE})
            case "tools":
                yield end(
                    "completed", {"text": "", "finish_reason": "tool_calls", "tool_calls": [CALL], "usage": USAGE}
                )
            case "several":
                made = [
                    {"index": n, "text": f"{rest}{n}", "finish_reason": "stop"} for n in range(request.payload["n"])
                ]
                made[0]["logprobs"] = LOGPROBS
                yield end("completed", {**made[0], "choices": made, "usage": USAGE})
            case "hold":
                if rest:
                    yield chunk(rest, 0)
                await asyncio.Event().wait()
            case "slow":
                await asyncio.sleep(0.3)
                yield done(rest)
            case "fail":
                yield end("failed", error=EngineFailed("the engine died"))
            case "too-long":
                yield end("failed", error=ContextLengthExceeded("too long", param="payload.messages"))
            case "expire":
                yield end("expired")
            case "cancelled":
                yield end("cancelled")
            case "fail-late":
                yield chunk(rest, 0)
                yield end("failed", error=EngineFailed("the engine died"))
            case "restart":
                first, second = rest.split("|")
                yield chunk(first, 0)
                yield RestartedFrame(request_id=rid, attempt=2, cursor="c")
                yield chunk(second[:2], 0)
                yield chunk(second[2:], 2)
                yield done(second)
            case _:
                raise RuntimeError("secret prompt text")


@dataclass
class Server:
    url: str
    service: FakeService
    app: FastAPI
    running: uvicorn.Server


def make_app(service: FakeService, policy: AuthPolicy, **conf: Any) -> FastAPI:
    """`conf`: keys of the gateway's section."""
    app = FastAPI(lifespan=watching)
    keys_file = None if policy.keys is None else Path("keys.json")
    settings = GatewaySettings(gateway=GatewaySection(**conf), auth=AuthSection(keys_file=keys_file))
    context = GatewayContext(settings=settings, policy=policy, allowances=allowances_of(settings, policy.current))
    context.connected = service.parts
    put_context(app, context)
    for part in (text_routes, openai_routes, response_routes, registry_routes, health, ticket_routes):
        app.include_router(part.router)

    @app.websocket("/v1/ws")
    async def _ws(socket: WebSocket) -> None:  # pyright: ignore[reportUnusedFunction]
        await socket.accept("penstock.v1")
        await socket.send_text(caller_of(socket).tenant)
        if "stay" in socket.query_params:
            await socket.scope["state"]["revoked"].wait()
            await socket.close(4401)
        await socket.close()

    @app.get("/v1/requests/{request_id}")
    async def _poll(request_id: str, wait: float) -> str:  # pyright: ignore[reportUnusedFunction]
        await asyncio.sleep(wait)
        return request_id

    section = settings.gateway
    bodies = BodyLimits(max_bytes=section.max_body_bytes, timeout_s=section.body_timeout_s)
    install_edge(app, edge_of(context, bodies=bodies), HotRoutes)
    return app


@asynccontextmanager
async def watching(app: FastAPI) -> AsyncIterator[None]:
    """The keys file is looked at, as by a whole gateway."""
    task = asyncio.create_task(context_of_app(app).connections.watch())
    yield
    task.cancel()


@contextmanager
def serving(app: FastAPI, service: FakeService) -> Iterator[Server]:
    """The app on a uvicorn of its own, in a thread."""
    port = free_port()
    server = uvicorn.Server(server_config(app, "127.0.0.1", port, drain_s=2))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started, describe="uvicorn is up")
    try:
        yield Server(f"http://127.0.0.1:{port}", service, app, server)
    finally:
        server.should_exit = True
        thread.join(15)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    service = FakeService()
    with serving(make_app(service, AuthPolicy.build()), service) as running:
        yield running


@pytest.fixture
def serve_with_keys() -> Callable[[Any], Any]:
    """A server with a keys file and one page on the list."""

    def serve(keys_file: Any, **conf: Any) -> Any:
        service = FakeService()
        policy = AuthPolicy.build(keys_file=keys_file, allowed_origins=["https://app.example"])
        return serving(make_app(service, policy, **conf), service)

    return serve
