"""The moments at which a row strikes: each is reached when what it says is seen, not after a time."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from penstock.cli.faults.histories import History
from penstock.cli.faults.loads import MODEL
from penstock.cli.faults.site import Site
from penstock.cli.faults.stubs import Outside
from penstock.cli.faults.targets import STOPPED, Target

REACHED_S = 120.0
_POLL_S = 0.02
_MOST = 0.9


class NotReached(Exception):
    """The moment did not come: the message says what there was in its place."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Where a row takes place."""

    site: Site
    outside: Outside
    history: History
    count: int
    streams: int
    """How many can run at once."""
    real_model: bool = False
    """Whether the model runs in a process of its own."""
    engines: list[Target] = field(default_factory=list[Target])
    """Processes of engines that ran before a row's model is loaded: they are not struck."""
    stopped: list[Target] = field(default_factory=list[Target])
    """Processes that stand still, or may come to, until the row goes on."""

    def acknowledged(self) -> bool:
        return len(self.history.named["acknowledged"]) >= self.count

    def ended(self) -> int:
        return len(self.history.named["terminal"])


async def prepare(moment: str, scene: Scene) -> None:
    """What has to be so before the first request is sent."""
    if moment == "retry_wait":
        scene.outside.refuses.set()
    if moment == "webhook":
        scene.outside.answers.clear()
    if moment == "loading":
        worker = await asyncio.to_thread(scene.site.target, "worker")
        scene.engines.extend(worker.engines())


async def reach(moment: str, scene: Scene, *, planted: bool = False) -> None:
    """Return at the moment. Raises NotReached."""
    await (_planted(scene) if planted else _REACH[moment](scene))


def leave(scene: Scene) -> None:
    """What held the system at the moment holds it no longer."""
    scene.outside.refuses.clear()
    scene.outside.answers.set()
    for target in scene.stopped:
        if target.state == STOPPED:
            target.signal(signal.SIGCONT)


async def wait_for(condition: Callable[[], bool], what: str, within_s: float = REACHED_S) -> None:
    """Raises NotReached."""
    give_up = time.monotonic() + within_s
    while not await asyncio.to_thread(condition):
        if time.monotonic() > give_up:
            raise NotReached(f"not within {within_s:.0f} s: {what}")
        await asyncio.sleep(_POLL_S)


async def _stopped(scene: Scene) -> None:
    """The worker stands at its fault point, and behind it wait all requests."""
    worker = await asyncio.to_thread(scene.site.target, "worker")
    scene.stopped.append(worker)
    await wait_for(lambda: worker.state == STOPPED, "the worker stands at its fault point")
    await wait_for(scene.acknowledged, "all requests are acknowledged")


async def _queued(scene: Scene) -> None:
    await wait_for(scene.acknowledged, "all requests are acknowledged")

    def held() -> bool:
        return (scene.site.metric("penstock_inflight") or 0) + scene.ended() >= scene.count

    await wait_for(held, "the worker holds all requests")


async def _loading(scene: Scene) -> None:
    def loading() -> bool:
        answer = scene.site.asked("worker", "/readyz")
        return answer is not None and answer.json()["models"].get(MODEL) == "loading"

    if scene.real_model:
        await _stop_new_engine(scene)
    await wait_for(scene.acknowledged, "all requests are acknowledged")
    await wait_for(loading, "the model is being loaded")


async def _stop_new_engine(scene: Scene) -> None:
    """Stop the process that loads a real model: else the load ends before all requests are acknowledged."""
    worker = await asyncio.to_thread(scene.site.target, "worker")

    def stopped() -> bool:
        new = [engine for engine in worker.engines() if engine not in scene.engines]
        for engine in new:
            engine.signal(signal.SIGSTOP)
        scene.stopped.extend(new)
        return bool(new)

    await wait_for(stopped, "the process that loads the model")


async def _mid_stream(scene: Scene) -> None:
    def begun() -> bool:
        return len(scene.history.named["piece"]) >= _MOST * scene.streams

    await wait_for(scene.acknowledged, "all requests are acknowledged")
    await wait_for(begun, "most streams have begun")


async def _retry_wait(scene: Scene) -> None:
    def refused() -> bool:
        return len(scene.history.named["status:retrying"]) >= _MOST * scene.count

    await wait_for(refused, "most requests wait for their next attempt")


async def _drain(scene: Scene) -> None:
    await _mid_stream(scene)
    worker = await asyncio.to_thread(scene.site.target, "worker")
    worker.signal(signal.SIGTERM)

    def draining() -> bool:
        answer = scene.site.asked("worker", "/healthz")
        return answer is not None and answer.json()["state"] == "stopping"

    await wait_for(draining, "the worker lets its running requests end")


async def _webhook(scene: Scene) -> None:
    await wait_for(lambda: scene.outside.held > 0, "a receiver of a webhook was called")


async def _planted(scene: Scene) -> None:
    def committed() -> bool:
        return scene.site.committed_and_lag()[0] > 0

    await wait_for(committed, "an offset is committed before its outcome is published")
    await wait_for(scene.acknowledged, "all requests are acknowledged")


_REACH: dict[str, Callable[[Scene], Awaitable[None]]] = {
    "accepted": _stopped,
    "queued": _queued,
    "loading": _loading,
    "mid_stream": _mid_stream,
    "result_commit": _stopped,
    "retry_wait": _retry_wait,
    "drain": _drain,
    "webhook": _webhook,
}
