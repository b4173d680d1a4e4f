"""The faults of a row. Each is done to a running system, looked for where it must show, and undone."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
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
    worker = await _target("worker", scene)
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    bystander = await asyncio.to_thread(subprocess.Popen, command)
    try:
        await _kill("worker", worker, scene, pid=bystander.pid, within_s=2.0)
    finally:
        bystander.kill()
        bystander.wait()


async def _killed(part: str, scene: Scene, _: SmallDisk | None) -> None:
    await _kill(part, await _target(part, scene), scene)


async def _target(part: str, scene: Scene) -> Target:
    return await asyncio.to_thread(scene.site.target, part)


async def _engine_killed(part: str, scene: Scene, _: SmallDisk | None) -> None:
    worker = await _target("worker", scene)

    def struck() -> list[Target]:
        return [engine for engine in worker.engines() if engine not in scene.engines]

    await wait_for(lambda: bool(struck()), "the worker has a process of an engine for the requests")
    for engine in struck():
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
    aside.touch()
    exchange(folder, aside)
    try:
        answer = await asyncio.to_thread(_answer_of_store, scene)
        noticed = await _noticed(lambda: (scene.site.metric("penstock_outputs_not_stored") or 0) > 0)
        how = f"the store answers {answer}; the worker {'holds outputs for it' if noticed else 'has not met it'}"
        _note(scene, part, how, proven=answer != "well" and noticed, at=began)
    finally:
        exchange(folder, aside)


def exchange(one: Path, other: Path) -> None:
    """Let two paths change places in one step: between two steps the worker could make its folder again."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(one))


_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""Of Linux's renameat2(2)."""


def _answer_of_store(scene: Scene) -> str:
    try:
        ArtifactStore(str(scene.site.artifacts)).put("default", b"a trial")
    except (PenstockError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "well"


async def _disk_full(part: str, scene: Scene, disk: SmallDisk | None) -> None:
    assert disk is not None
    began, broker = time.time(), await _target("broker", scene)
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


def _note(scene: Scene, part: str, how: str, *, proven: bool, at: float, **facts: Any) -> None:
    scene.history.note("fault", target=part, how=how, proven=proven, at=round(at, 4), **facts)


_STRIKES: dict[str, Callable[[str, Scene, SmallDisk | None], Awaitable[Any]]] = {
    "engine": _engine_killed,
    "store": _store_away,
    "disk": _disk_full,
}
