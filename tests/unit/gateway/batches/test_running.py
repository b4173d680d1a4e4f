"""One batch on its way to its end, with a store in a folder and no broker."""

from __future__ import annotations

import asyncio
import io
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kit.gateway_batches import new_batch
from penstock.common.artifacts import ArtifactStore
from penstock.common.clock import now_ms
from penstock.gateway.batches import running
from penstock.gateway.batches.checking import Part
from penstock.gateway.batches.keeping import BatchStore, Lease
from penstock.gateway.batches.line_runs import LineEnd
from penstock.gateway.batches.records import Batch, Counts
from penstock.gateway.batches.running import BatchRun, OpenPart
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.limits.callers import Caller
from penstock.gateway.routes.line_reader import Line
from penstock.gateway.settings import GatewaySettings
from support import wait_until_async


class Service:
    """What a run asks of a gateway when none of its lines has to run."""

    def __init__(self, stops: bool) -> None:
        self.settings = GatewaySettings()
        self.lookups = self.artifacts = self
        self._stops = stops
        self.subscriptions = SimpleNamespace(open=self._nothing)

    @staticmethod
    def _nothing(most_frames: int) -> Any:
        return SimpleNamespace(close=lambda: None)

    async def stored(self, _: str, work: Callable[[Any], Any]) -> Any:
        return work(None)

    async def catch_up(self) -> None:
        return

    async def put_stream(self, *_: Any, **__: Any) -> Any:
        if self._stops:
            raise asyncio.CancelledError
        return SimpleNamespace(size_bytes=1)


def made(**fields: Any) -> Batch:
    return new_batch(**{"status": "in_progress", "total": 1, "parts": (Part(1, 0, 1),), **fields})


async def run(kept: BatchStore, batch: Batch, caller: Caller | None, *, stops: bool) -> None:
    """As the next gateway that takes it."""
    held = kept.lease(batch.key)
    lease = Lease(1 if held is None else held.number + 1, "beat")
    assert kept.take_lease(batch.key, lease.number, lease.beat)
    found = kept.running(batch.key)
    assert found is not None
    service: Any = Service(stops)
    await BatchRun(found, lease, kept, service, Allowances(), lambda: caller, lambda: 1).run()


@pytest.mark.parametrize("why", ["cancelled", "expired", "revoked"])
async def test_a_stop_outlives_the_gateway_that_writes_the_files(why: str, tmp_path: Path) -> None:
    kept = BatchStore(ArtifactStore(tmp_path))
    batch = made(expires_at=now_ms() // 1000 - 1) if why == "expired" else made()
    kept.create(batch)
    kept.put_part(batch.key, 0, io.BytesIO(), io.BytesIO(b"not run\n"), Counts(failed=1))
    if why == "cancelled":
        kept.cancel(batch.key, 5)
    caller = None if why == "revoked" else Caller(tenant="default")
    with pytest.raises(asyncio.CancelledError):
        await run(kept, batch, caller, stops=True)
    await run(kept, batch, caller, stops=False)
    assert kept.get(batch.key).status == ("expired" if why == "expired" else "cancelled")


async def test_a_cancel_of_many_lines_does_not_outlive_the_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "BEAT_S", 0.01)
    kept, batch, commanded = BatchStore(ArtifactStore(tmp_path)), made(), asyncio.Event()
    kept.create(batch)
    assert kept.take_lease(batch.key, 1, "beat")

    async def never_ends(*_: Any) -> None:
        commanded.set()
        await asyncio.Event().wait()

    lines = SimpleNamespace(close=lambda: None, flying=dict.fromkeys(map(str, range(1_000))), refusal=None)
    monkeypatch.setattr(running, "LineRuns", lambda *_, **__: lines)
    service: Any = Service(stops=False)
    service.control = SimpleNamespace(abandon=never_ends, abandon_some=never_ends)
    service.catch_up = asyncio.Event().wait
    service.peek = lambda *_: None
    run = BatchRun(batch, Lease(1, "beat"), kept, service, Allowances(), lambda: Caller(tenant="default"), lambda: 1)
    task = asyncio.create_task(run.run())
    kept.cancel(batch.key, 5)
    await asyncio.wait_for(commanded.wait(), 30)
    held = kept.lease(batch.key)
    await wait_until_async(lambda: kept.lease(batch.key) != held, 5, "the next beat", promised=True)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(("lease", "resumed"), [(1, False), (2, True)])
async def test_who_is_not_the_first_that_runs_a_batch_looks_what_was_submitted(
    lease: int, resumed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before may have checked the input and begun since this one read how far it was: lines ran twice."""
    kept = BatchStore(ArtifactStore(tmp_path))
    kept.create(batch := made(status="validating", parts=()))
    assert kept.take_lease(batch.key, lease, "beat")
    told: list[bool] = []

    def line_runs(*_: Any, resumed: bool) -> Any:
        told.append(resumed)
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(running, "LineRuns", line_runs)
    service: Any = Service(stops=False)
    BatchRun(batch, Lease(lease, "beat"), kept, service, Allowances(), lambda: None, lambda: 1)
    assert told == [resumed]


async def test_ends_of_lines_are_written_beside_the_loop_and_hold_their_room_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, threads, given = threading.Event(), list[threading.Thread](), list[int]()

    class SlowFile(tempfile.SpooledTemporaryFile[bytes]):
        def write(self, s: Any) -> int:
            threads.append(threading.current_thread())
            assert threads[-1] is threading.main_thread() or answers.wait(60)
            return super().write(s)

    monkeypatch.setattr(running.tempfile, "SpooledTemporaryFile", SlowFile)
    kept = BatchStore(ArtifactStore(tmp_path))
    kept.create(batch := made(total=2, parts=(Part(2, 0, 1),)))
    service: Any = Service(stops=False)
    run: Any = BatchRun(batch, Lease(1, "beat"), kept, service, Allowances(), lambda: None, lambda: 1)
    run._window = SimpleNamespace(give=given.append)
    part = run._open[0] = OpenPart(0, 2, str(tmp_path))
    keeping = asyncio.create_task(run._keep_part(part))
    for number in range(2):
        run._ended(part, Line(number, 0, b"{}"), LineEnd(content=b"x\n", completed=True, counts=Counts(completed=1)))
    await wait_until_async(lambda: threads)
    assert (threading.main_thread() in threads, given) == (False, [])
    answers.set()
    await keeping
    assert (len(given), kept.parts(batch.key)) == (2, {0: Counts(completed=2)})
