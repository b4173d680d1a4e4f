"""Outputs and their store: calls that hang hold up their own kind."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from penstock.common.artifacts import ArtifactStore
from penstock.common.configuration import ArtifactsSection, StoreSection
from penstock.processors.core.work.work import Subject
from penstock.processors.images.inputs import image_inputs
from penstock.processors.outputs import Outputs
from penstock.processors.settings import ImagesSection
from penstock.processors.store_threads import StoreThreads
from penstock.schemas.records import OutputSpec
from support import wait_until_async

PIXELS = b"pixels"
PNG = {"data": PIXELS, "media_type": "image/png", "width": 1, "height": 1}
MANY = 40
"""More than there are threads of a kind."""


class HangingPuts:
    """Outputs to these stores hang until they are let go of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *stores: str | None) -> None:
        self.let_go, self.begun = threading.Event(), 0
        put = ArtifactStore.put

        def hang(artifacts: ArtifactStore, tenant: str, data: bytes, **named: Any) -> Any:
            if named.get("store") in stores:
                self.begun += 1
                assert self.let_go.wait(60)
            return put(artifacts, tenant, data, **named)

        monkeypatch.setattr(ArtifactStore, "put", hang)


@pytest.fixture
def threads() -> StoreThreads:
    return StoreThreads()


@pytest.fixture
def outputs(tmp_path: Path, threads: StoreThreads) -> Outputs:
    section = ArtifactsSection(stores={"cold": StoreSection(location=str(tmp_path / "cold"))})
    return Outputs(tmp_path / "artifacts", section, threads)


def subject(name: str, store: str | None = None) -> Subject:
    request = Mock(tenant="default", request_id=name, conversation_id=None, output=OutputSpec(store=store))
    return Mock(tenant="default", request_id=name, epoch=1, attempt=1, request=request)


async def test_an_image_is_read_while_outputs_hang(
    outputs: Outputs, threads: StoreThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = outputs.store().put("default", PIXELS, media_type="image/png")
    hanging = HangingPuts(monkeypatch, None)
    puts = [asyncio.ensure_future(outputs.keep(subject(str(n)), {"images": [PNG]})) for n in range(MANY)]
    await wait_until_async(lambda: hanging.begun == 8, 10)
    inputs = image_inputs(ImagesSection(), outputs.store, threads)
    found = await asyncio.wait_for(inputs._bytes("default", {"artifact_id": kept.artifact_id}, "image"), 10)  # pyright: ignore[reportPrivateUsage]
    assert found == PIXELS
    free = asyncio.to_thread(lambda: "free")  # the watchdog asks Kafka in such a thread
    assert await asyncio.wait_for(free, 10) == "free"
    hanging.let_go.set()
    assert len(await asyncio.gather(*puts)) == MANY
    inputs.close()


async def test_outputs_are_kept_while_a_store_with_a_name_hangs(
    outputs: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = HangingPuts(monkeypatch, "cold")
    puts = [asyncio.ensure_future(outputs.keep(subject(str(n), "cold"), {"images": [PNG]})) for n in range(MANY)]
    await wait_until_async(lambda: hanging.begun == 8, 10)
    stored = await asyncio.wait_for(outputs.keep(subject("other"), {"images": [PNG]}), 10)
    assert len(stored.images) == 1
    hanging.let_go.set()
    assert len(await asyncio.gather(*puts)) == MANY
