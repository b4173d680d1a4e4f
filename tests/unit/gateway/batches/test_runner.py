"""Which batches a gateway takes, with a store in a folder and runs that do nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gateway_parts import service_with
from kit.gateway_batches import new_batch as made
from kit.gateway_http import gateway_context
from penstock.common.artifacts import ArtifactStore
from penstock.common.clock import now_ms
from penstock.gateway.batches import runner
from penstock.gateway.batches.keeping import BatchStore
from penstock.gateway.batches.records import WINDOW_S, Batch
from penstock.gateway.batches.runner import BatchRunner


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
        facts = SimpleNamespace(catching_up=self._begin)
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
    batch, write = made(), site.kept.write

    def forgotten_before(written: Batch) -> None:
        for key in site.kept.open():
            site.kept.forget_unmade(key)
        write(written)

    monkeypatch.setattr(site.kept, "write", forgotten_before)
    site.kept.create(batch)
    assert await site.look() == [batch]


async def test_a_batch_that_is_made_while_its_mark_is_removed_is_run(site: Site) -> None:
    batch = site.kept.create(made())
    site.kept.forget_unmade(batch.key)
    assert await site.look() == [batch]


async def test_a_mark_without_a_batch_is_removed_after_a_while_since_it_was_made_last(site: Site) -> None:
    """Its maker died. A mark that went and came back is a new one."""
    batch, kept = made(), site.kept
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
    batches = [site.kept.create(made(tenant)) for tenant in "abc"]
    site.store.places[None].put(f"b/.batches/{batches[1].batch_id}/batch.json", b"{")
    assert await site.look() == [batches[0], batches[2]]


async def test_tenants_take_turns_and_the_oldest_batch_is_first(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MOST", 3)
    began_ms = now_ms()
    batches = [made(tenant, created_ms=began_ms + n) for n, tenant in enumerate(["a", "a", "a", "b", "c"])]
    for batch in reversed(batches):
        site.kept.create(batch)
    found = await site.look()
    assert [(batch.tenant, batch.created_ms - began_ms) for batch in found] == [("a", 0), ("b", 3), ("c", 4)]


@pytest.mark.parametrize("why", ["cancelled", "expired"])
async def test_a_finished_batch_needs_no_place_to_end(why: str, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MOST", 1)
    created_ms = now_ms() - (WINDOW_S * 1000 if why == "expired" else 10)
    first, over, waits = made(created_ms=created_ms - 1), made(created_ms=created_ms), made()
    for batch in (first, over, waits):
        site.kept.create(batch)
    if why == "cancelled":
        site.kept.cancel(over.key, 5)
    assert await site.look() == [first, over]
