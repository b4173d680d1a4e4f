"""Which batches a gateway takes, and one batch on its way to its end, with a store in a folder and no broker."""

from __future__ import annotations

import asyncio
import io
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from gateway_parts import service_with
from kit.gateway_http import gateway_context
from kit.records import new_batch
from penstock.common.artifacts import ArtifactStore
from penstock.common.clock import now_ms
from penstock.gateway.batches import runner, running
from penstock.gateway.batches.checking import Part
from penstock.gateway.batches.keeping import BatchStore, Lease
from penstock.gateway.batches.line_runs import LineEnd
from penstock.gateway.batches.records import WINDOW_S, Batch, Counts
from penstock.gateway.batches.runner import BatchRunner
from penstock.gateway.batches.running import BatchRun
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.limits.callers import Caller
from penstock.gateway.routes.line_reader import Line
from penstock.gateway.routes.window import Budget
from penstock.gateway.settings import GatewaySettings
from support import wait_until_async


class Run:
    """A run that lasts until the test is over. `taken`: all that were begun, the oldest first."""

    taken: list[Batch]

    def __init__(self, batch: Batch, lease: Any, *_: Any, **__: Any) -> None:
        self.batch, self.lease, self.woken = batch, lease, asyncio.Event()
        self.taken.append(batch)

    async def run(self) -> None:
        await asyncio.Event().wait()


class Site:
    """A runner over a store in a folder."""

    def __init__(self, folder: Path) -> None:
        self.store = ArtifactStore(folder)
        self.kept = BatchStore(self.store)
        self.began = self.now_s = 0
        facts = SimpleNamespace(catching_up=self._begin, lacks=lambda: None)
        self.runner = BatchRunner(gateway_context(), service_with(facts, artifacts=self.store))

    def _begin(self) -> None:
        self.began += 1

    async def look(self) -> list[Batch]:
        """The runner looks once, whole; all batches that it has taken by then."""
        running, until = asyncio.create_task(self.runner.run()), self.began + 2
        while self.began < until:
            self.runner.wake()
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])
        return Run.taken


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    made = Site(tmp_path)
    monkeypatch.setattr(Run, "taken", [], raising=False)
    monkeypatch.setattr(runner, "BatchRun", Run)
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: made.now_s))
    return made


async def test_a_batch_whose_mark_was_removed_while_it_was_made_is_run(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, write = new_batch(), site.kept.write

    def forgotten_before(written: Batch) -> None:
        for key in site.kept.open():
            site.kept.forget_unmade(key)
        write(written)

    monkeypatch.setattr(site.kept, "write", forgotten_before)
    site.kept.create(batch)
    assert await site.look() == [batch]


async def test_a_batch_that_is_made_while_its_mark_is_removed_is_run(site: Site) -> None:
    batch = site.kept.create(new_batch())
    site.kept.forget_unmade(batch.key)
    assert await site.look() == [batch]


async def test_a_mark_without_a_batch_is_removed_after_a_while_since_it_was_made_last(site: Site) -> None:
    batch, kept = new_batch(), site.kept
    for site.now_s in (0, int(runner.UNMADE_S)):
        kept.create(batch)
        kept.remove(batch.key)
        await site.look()
        assert kept.open() == [batch.key]
        if not site.now_s:
            kept.forget_unmade(batch.key)
            await site.look()
    site.now_s = 2 * int(runner.UNMADE_S)
    assert await site.look() == []
    assert kept.open() == []


async def test_an_unreadable_batch_does_not_hold_up_the_others(site: Site) -> None:
    batches = [site.kept.create(new_batch(tenant)) for tenant in "abc"]
    site.store.places[None].put(f"b/.batches/{batches[1].batch_id}/batch.json", b"{")
    assert await site.look() == [batches[0], batches[2]]


async def test_tenants_take_turns_and_the_oldest_batch_is_first(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MOST", 3)
    began_ms = now_ms()
    batches = [new_batch(tenant, created_ms=began_ms + n) for n, tenant in enumerate(["a", "a", "a", "b", "c"])]
    for batch in reversed(batches):
        site.kept.create(batch)
    found = await site.look()
    assert [(batch.tenant, batch.created_ms - began_ms) for batch in found] == [("a", 0), ("b", 3), ("c", 4)]


@pytest.mark.parametrize("why", ["cancelled", "expired"])
async def test_a_finished_batch_needs_no_place_to_end(why: str, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MOST", 1)
    created_ms = now_ms() - (WINDOW_S * 1000 if why == "expired" else 10)
    first, over, waits = new_batch(created_ms=created_ms - 1), new_batch(created_ms=created_ms), new_batch()
    for batch in (first, over, waits):
        site.kept.create(batch)
    if why == "cancelled":
        site.kept.cancel(over.key, 5)
    assert await site.look() == [first, over]


# -- one batch on its way to its end, with a store in a folder and no broker


CALLER = Caller(tenant="default")


class Service:
    """What a run asks of a gateway. `stops`: it stops before the first file is written."""

    def __init__(self, store: ArtifactStore, *, stops: bool = False) -> None:
        self.settings = GatewaySettings()
        self.lookups = self
        self.control: Any = None
        self.artifacts = Mock(wraps=store)
        if stops:
            self.artifacts.put_stream = AsyncMock(side_effect=asyncio.CancelledError)
        self.subscriptions = SimpleNamespace(open=lambda most_frames: SimpleNamespace(close=lambda: None))

    async def stored(self, _: str, work: Callable[[Any], Any]) -> Any:
        return work(None)

    async def catch_up(self) -> None: ...
    def peek(self, *_: Any) -> None: ...


@pytest.fixture
def kept(store: ArtifactStore) -> BatchStore:
    return BatchStore(store)


def made(**fields: Any) -> Batch:
    return new_batch(**{"status": "in_progress", "total": 1, "parts": (Part(1, 0, 1),), **fields})


def next_run(
    kept: BatchStore, batch: Batch, service: Any, caller: Caller | None = CALLER, budget: Budget | None = None
) -> BatchRun:
    """By the next gateway that takes the batch."""
    held = kept.lease(batch.key)
    lease = Lease(1 if held is None else held.number + 1, "beat")
    assert kept.take_lease(batch.key, lease.number, lease.beat)
    return BatchRun(kept.running(batch.key), lease, kept, service, Allowances(), lambda: caller, lambda: 9, budget)


@pytest.mark.parametrize("why", ["cancelled", "expired", "revoked"])
async def test_a_stop_outlives_the_gateway_that_writes_the_files(
    why: str, store: ArtifactStore, kept: BatchStore
) -> None:
    batch = kept.create(made(expires_at=now_ms() // 1000 - 1) if why == "expired" else made())
    kept.put_part(batch.key, 0, io.BytesIO(), io.BytesIO(b"not run\n"), Counts(failed=1))
    if why == "cancelled":
        kept.cancel(batch.key, 5)
    caller = None if why == "revoked" else CALLER
    with pytest.raises(asyncio.CancelledError):
        await next_run(kept, batch, Service(store, stops=True), caller).run()
    await next_run(kept, batch, Service(store), caller).run()
    assert kept.get(batch.key).status == ("expired" if why == "expired" else "cancelled")


class Lines:
    """In the place of `LineRuns`: each line ends at once. `told`: whether those that were made are resumed."""

    told: list[bool]
    flying: dict[str, None]
    refusal = None

    def __init__(self, *_: Any, resumed: bool) -> None:
        self.told.append(resumed)

    async def follow(self) -> None:
        await asyncio.Event().wait()

    async def submit(self, lines: Sequence[Line], ended: Callable[[Line, LineEnd], object]) -> None:
        for one in lines:
            ended(one, LineEnd(content=b"x\n", completed=True, counts=Counts(completed=1)))

    def close(self) -> None: ...


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> type[Lines]:
    for name, value in (("told", []), ("flying", {})):
        monkeypatch.setattr(Lines, name, value, raising=False)
    monkeypatch.setattr(running, "LineRuns", Lines)
    return Lines


async def test_a_cancel_of_many_lines_does_not_outlive_the_lease(
    store: ArtifactStore, kept: BatchStore, lines: type[Lines], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "BEAT_S", 0.01)
    monkeypatch.setattr(lines, "flying", dict.fromkeys(map(str, range(1_000))))
    batch, commanded, service = kept.create(made()), asyncio.Event(), Service(store)
    service.catch_up = asyncio.Event().wait  # pyright: ignore[reportAttributeAccessIssue]

    async def never_ends(*_: Any) -> None:
        commanded.set()
        await asyncio.Event().wait()

    service.control = SimpleNamespace(abandon_some=never_ends)
    task = asyncio.create_task(next_run(kept, batch, service).run())
    kept.cancel(batch.key, 5)
    await asyncio.wait_for(commanded.wait(), 30)
    held = kept.lease(batch.key)
    await wait_until_async(lambda: kept.lease(batch.key) != held, 5, "the next beat", promised=True)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_who_is_not_the_first_that_runs_a_batch_looks_what_was_submitted(
    store: ArtifactStore, kept: BatchStore, lines: type[Lines]
) -> None:
    batch = kept.create(made(status="validating", parts=()))
    for _ in range(2):
        next_run(kept, batch, Service(store))
    assert lines.told == [False, True]


@pytest.mark.usefixtures("lines")
async def test_ends_of_lines_are_written_beside_the_loop_and_hold_their_room_until_then(
    store: ArtifactStore, kept: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, threads, budget = threading.Event(), list[threading.Thread](), Budget()

    class SlowFile(tempfile.SpooledTemporaryFile[bytes]):
        def write(self, s: Any) -> int:
            threads.append(threading.current_thread())
            assert threads[-1] is threading.main_thread() or go_on.wait(60)
            return super().write(s)

    monkeypatch.setattr(running.tempfile, "SpooledTemporaryFile", SlowFile)
    batch = kept.create(made(total=2, parts=(Part(1, 0, 5),)))
    store.put(batch.tenant, b"{}\n{}", artifact_id=batch.input_file_id)
    task = asyncio.create_task(next_run(kept, batch, Service(store), budget=budget).run())
    await wait_until_async(lambda: threads)
    assert (threading.main_thread() in threads, budget.used) == (False, 4)
    go_on.set()
    await task
    assert (budget.used, kept.get(batch.key).counts) == (0, Counts(completed=2))
