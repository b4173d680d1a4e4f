"""A store of artifacts that gives nothing for a while: requests whose image lies in it wait for it, and then run."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from PIL import Image

from penstock.common.artifacts import ArtifactStore
from s3_proxy import BreakableS3
from system import Process, System, eventually
from worker_requests import outcome, send, statuses

IMAGES = {"id": "images", "source": "pillow", "engine": "imaging"}
SMALL = {"id": "small", "source": "noop", "engine": "noop", "tasks": ["text_generation"]}
LARGE = {**SMALL, "id": "large", "options": {"tokens": 6, "chars": 50_000, "slots": 64}}
"""Its outputs go to the store."""
UNKEPT = 300
"""So many refused outputs keep eight threads busy for a minute: the store's client takes some seconds for each."""


@pytest.fixture
def store() -> Iterator[BreakableS3]:
    store = BreakableS3(failures=(403,))
    try:
        yield store
    finally:
        store.stop()


def image_request(store: ArtifactStore) -> dict[str, Any]:
    """A request whose image lies in the store."""
    image = io.BytesIO()
    Image.new("RGB", (8, 8)).save(image, "PNG")
    kept = store.put("default", image.getvalue(), media_type="image/png")
    operations = [{"op": "thumbnail", "width": 4, "height": 4}]
    return {
        "task": "image_processing",
        "payload": {"image": {"artifact_id": kept.artifact_id}, "operations": operations},
    }


def failed_reads(worker: Process) -> int:
    return worker.log.read_text(errors="replace").count("artifacts.failed")


@pytest.mark.slow
def test_an_image_that_cannot_be_read_is_waited_for(make_system: Callable[..., System], store: BreakableS3) -> None:
    system = make_system(models=[IMAGES, SMALL])
    worker = system.worker(env=store.env).wait_ready()
    request = image_request(store.direct())
    send(system, {"request_id": "before", **request})
    assert outcome(system, "before", 60).status == "completed", "the engine is there from here on"
    store.begin("fails")
    send(system, {"request_id": "i", **request, "max_attempts": 1})
    send(system, {"request_id": "late", **request, "ttl_ms": 4_000})
    send(system, {"request_id": "small", "model": "small"})
    assert outcome(system, "small").status == "completed", "others do not wait"
    late = outcome(system, "late", 30)
    assert (late.status, late.error.code) == ("expired", "expired"), late.error
    assert "403" in late.error.message, "the cause"
    assert late.created_at >= late.origin.append_time_ms + 4_000
    reads = failed_reads(worker)
    eventually(lambda: failed_reads(worker) > reads, 30, worker.tail)
    assert "i" not in system.outcomes(), "it waits"
    store.heal()
    ended = outcome(system, "i", 30)
    assert (ended.status, ended.error) == ("completed", None), worker.tail()
    assert statuses(system, "i")[-1] == "completed"


@pytest.mark.slow
def test_an_image_is_read_though_the_store_takes_no_outputs(
    make_system: Callable[..., System], store: BreakableS3
) -> None:
    """Reads waited behind writes that were refused: of the soak's images none ran while the store was full."""
    system = make_system(models=[IMAGES, LARGE])
    worker = system.worker(env=store.env).wait_ready()
    request = image_request(store.direct())
    send(system, {"request_id": "before", **request})
    assert outcome(system, "before", 60).status == "completed", "the engine is there from here on"
    store.begin("fills")
    send(system, *({"request_id": f"l{n}", "model": "large"} for n in range(UNKEPT)))
    eventually(lambda: worker.log.read_text(errors="replace").count("output.not_stored") > 8, 60, worker.tail)
    send(system, {"request_id": "i", **request})
    eventually(lambda: "running" in statuses(system, "i"), 20, worker.tail)
    assert "i" not in system.outcomes(), "its own output waits like the others"
    store.heal()
    assert outcome(system, "i", 60).status == "completed", worker.tail()


@pytest.mark.slow
def test_a_worker_that_starts_while_its_folder_is_away_waits_for_it(make_system: Callable[..., System]) -> None:
    system = make_system(models=[IMAGES])
    folder = system.folder / "artifacts"
    request = image_request(ArtifactStore(folder))
    away = folder.rename(system.folder / "away")
    folder.write_text("a file where the folder should be")
    worker = system.worker().wait_ready()
    send(system, {"request_id": "i", **request})
    eventually(lambda: "retrying" in statuses(system, "i"), 60, worker.tail)
    worker.kill9()
    worker = system.worker().wait_ready()
    eventually(lambda: statuses(system, "i").count("retrying") > 1, 60, worker.tail)
    folder.unlink()
    away.rename(folder)
    ended = outcome(system, "i", 30)
    assert (ended.status, ended.error) == ("completed", None), worker.tail()
