"""The faults of a row. Each is done to a running system, looked for where it must show, and undone."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.cli.faults.disks import SmallDisk
from penstock.cli.faults.moments import NotReached, Scene, wait_for
from penstock.cli.faults.targets import GONE, Target
from penstock.common.artifacts import ArtifactStore
from penstock.schemas.errors import PenstockError

NOTICED_S = 60.0
"""So long an outage lasts at most that nothing of the system has met."""


async def strike(part: str, scene: Scene, disk: SmallDisk | None) -> None:
    """Do it, note how it was proven, undo what is not undone by a restart."""
    await _STRIKES.get(part, _killed)(part, scene, disk)


async def strike_bystander(scene: Scene) -> None:
    """The control: the kill goes to a process that serves nothing, and the worker is looked at for its end."""
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    bystander = await asyncio.to_thread(subprocess.Popen, command)
    worker = scene.site.target("worker")
    try:
        await _kill("worker", worker, scene, pid=bystander.pid, within_s=2.0)
    finally:
        bystander.wait()


async def _killed(part: str, scene: Scene, _: SmallDisk | None) -> None:
    await _kill(part, scene.site.target(part), scene)


async def _engine_killed(part: str, scene: Scene, _: SmallDisk | None) -> None:
    worker = scene.site.target("worker")
    await wait_for(lambda: bool(worker.engines()), "the worker has an engine's process")
    for engine in worker.engines():
        await _kill(part, engine, scene)


async def _kill(part: str, target: Target, scene: Scene, *, pid: int | None = None, within_s: float = 15.0) -> None:
    """Send SIGKILL to the target, or to `pid`, and look whether the target is gone."""
    began = time.time()
    struck = Target(pid or target.pid)
    struck.signal(signal.SIGKILL)
    gone = await asyncio.to_thread(target.has_come_to, GONE, within_s)
    how = f"/proc: {part} {target.pid} is gone" if gone else f"/proc: {part} {target.pid} runs on ({target.state})"
    facts = {} if pid is None else {"bystander_gone": struck.state == GONE}
    _note(scene, part, how, proven=gone, at=began, **facts)


async def _store_away(part: str, scene: Scene, _: SmallDisk | None) -> None:
    """A file stands where the store's folder was: every call fails."""
    began, folder = time.time(), scene.site.artifacts
    aside = folder.with_name("artifacts.aside")
    folder.mkdir(exist_ok=True)
    folder.rename(aside)
    folder.touch()
    try:
        answer = await asyncio.to_thread(_answer_of_store, scene)
        noticed = await _noticed(lambda: (scene.site.metric("penstock_outputs_not_stored") or 0) > 0)
        how = f"the store answers {answer}; the worker {'holds outputs for it' if noticed else 'has not met it'}"
        _note(scene, part, how, proven=answer != "well" and noticed, at=began)
    finally:
        folder.unlink()
        aside.rename(folder)


def _answer_of_store(scene: Scene) -> str:
    try:
        ArtifactStore(str(scene.site.artifacts)).put("default", b"a trial")
    except (PenstockError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "well"


async def _disk_full(part: str, scene: Scene, disk: SmallDisk | None) -> None:
    assert disk is not None
    began, broker = time.time(), scene.site.target("broker")
    await asyncio.to_thread(disk.fill)
    full = await asyncio.to_thread(disk.is_full)
    try:
        met = await _noticed(lambda: broker.state == GONE)
        how = f"a write says ENOSPC: {full}; the broker {'ended of it' if met else 'has not met it'}"
        _note(scene, part, how, proven=full and met, at=began)
    finally:
        disk.make_room()


async def _noticed(condition: Callable[[], bool]) -> bool:
    try:
        await wait_for(condition, "", NOTICED_S)
    except NotReached:
        return False
    return True


def _note(scene: Scene, part: str, how: str, *, proven: bool, at: float, **facts: bool) -> None:
    scene.history.note("fault", target=part, how=how, proven=proven, at=round(at, 4), **facts)


_STRIKES: dict[str, Callable[[str, Scene, SmallDisk | None], Awaitable[Any]]] = {
    "engine": _engine_killed,
    "store": _store_away,
    "disk": _disk_full,
}
