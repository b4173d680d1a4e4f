"""Which batches a gateway takes, with a store in a folder and runs that do nothing."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gateway_parts import service_with
from penstock.common.artifacts import ArtifactStore
from penstock.common.clock import now_ms
from penstock.gateway.batches import runner
from penstock.gateway.batches.keeping import BatchStore
from penstock.gateway.batches.records import WINDOW_S, Batch
from penstock.gateway.batches.runner import BatchRunner
from penstock.gateway.context import GatewayContext
from penstock.gateway.edge.auth import AuthPolicy
from penstock.gateway.settings import GatewaySettings


class Run:
    """A run that lasts until the test is over. `taken`: all that were begun, the oldest first."""

    taken: list[Batch]

    def __init__(self, batch: Batch, lease: Any, *_: Any, **__: Any) -> None:
        self.batch, self.lease, self.woken = batch, lease, asyncio.Event()
        self.taken.append(batch)

    async def run(self) -> None:
        await asyncio.Event().wait()


@pytest.fixture
def kept(tmp_path: Path) -> BatchStore:
    return BatchStore(ArtifactStore(tmp_path))


@pytest.fixture
def made_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BatchRunner:
    monkeypatch.setattr(Run, "taken", [], raising=False)
    monkeypatch.setattr(runner, "BatchRun", Run)
    part = SimpleNamespace(catching_up=lambda: None)
    context = GatewayContext(settings=GatewaySettings(), policy=AuthPolicy.build())
    return BatchRunner(context, service_with(part, artifacts=ArtifactStore(tmp_path)))


def made(tenant: str = "default", **fields: Any) -> Batch:
    values: dict[str, Any] = {"created_ms": now_ms(), "expires_at": now_ms() // 1000 + 60, **fields}
    return Batch(
        batch_id=str(uuid.uuid4()),
        tenant=tenant,
        key_id=None,
        endpoint="/v1/embeddings",
        input_file_id=str(uuid.uuid4()),
        **values,
    )


async def looks(looker: BatchRunner, times: int = 1) -> list[Batch]:
    """All that it has taken then."""
    for _ in range(times):
        await looker._look()
        await asyncio.sleep(0)
    return Run.taken


async def test_a_batch_whose_mark_was_forgotten_while_it_was_made_is_run(
    kept: BatchStore, made_runner: BatchRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "UNMADE_S", 0.0)
    batch, write = made(), kept.write

    def forgotten_before(written: Batch) -> None:
        for key in kept.open():
            kept.forget_unmade(key)
        write(written)

    monkeypatch.setattr(kept, "write", forgotten_before)
    kept.create(batch)
    assert await looks(made_runner) == [batch]


async def test_a_batch_that_is_made_while_its_mark_is_forgotten_is_run(
    kept: BatchStore, made_runner: BatchRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = made()
    kept.create(batch)
    kept.forget_unmade(batch.key)
    assert await looks(made_runner) == [batch]


async def test_how_long_a_mark_has_been_alone_is_counted_anew_when_it_went(
    kept: BatchStore, made_runner: BatchRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.create(batch := made())
    kept.remove(batch.key)
    await looks(made_runner)
    assert batch.key in made_runner._unmade
    kept.forget_unmade(batch.key)
    await looks(made_runner)
    assert not made_runner._unmade


async def test_one_that_cannot_be_read_does_not_hold_up_the_others(kept: BatchStore, made_runner: BatchRunner) -> None:
    batches = [made("a"), made("b"), made("c")]
    for batch in batches:
        kept.create(batch)
    kept._documents.put(f"b/.batches/{batches[1].batch_id}/batch.json", b"{")
    assert await looks(made_runner) == [batches[0], batches[2]]


async def test_tenants_take_turns_and_the_oldest_is_first(
    kept: BatchStore, made_runner: BatchRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "MOST", 3)
    began_ms = now_ms()
    batches = [made(tenant, created_ms=began_ms + n) for n, tenant in enumerate(["a", "a", "a", "b", "c"])]
    for batch in reversed(batches):
        kept.create(batch)
    found = await looks(made_runner)
    assert [(batch.tenant, batch.created_ms - began_ms) for batch in found] == [("a", 0), ("b", 3), ("c", 4)]


@pytest.mark.parametrize("why", ["cancelled", "expired"])
async def test_one_that_is_over_needs_no_place_to_end(
    why: str, kept: BatchStore, made_runner: BatchRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "MOST", 1)
    created_ms = now_ms() - (WINDOW_S * 1000 if why == "expired" else 10)
    first, over, waits = made(created_ms=created_ms - 1), made(created_ms=created_ms), made()
    kept.create(first)
    await looks(made_runner)
    kept.create(over)
    kept.create(waits)
    if why == "cancelled":
        kept.cancel(over.key, 5)
    assert await looks(made_runner) == [first, over]
