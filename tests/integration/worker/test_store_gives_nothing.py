"""A store of artifacts that gives nothing for a while: requests whose image lies in it wait for it, and then run."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator

import pytest
from PIL import Image

from s3_proxy import BreakableS3
from system import Process, System, eventually
from worker_requests import outcome, send, statuses

IMAGES = {"id": "images", "source": "pillow", "engine": "imaging"}
SMALL = {"id": "small", "source": "noop", "engine": "noop", "tasks": ["text_generation"]}


@pytest.fixture
def store() -> Iterator[BreakableS3]:
    store = BreakableS3(failures=(403,))
    try:
        yield store
    finally:
        store.stop()


def failed_reads(worker: Process) -> int:
    return worker.log.read_text(errors="replace").count("artifacts.failed")


@pytest.mark.slow
def test_an_image_that_cannot_be_read_is_waited_for(make_system: Callable[..., System], store: BreakableS3) -> None:
    system = make_system(models=[IMAGES, SMALL])
    worker = system.worker(env=store.env).wait_ready()
    image = io.BytesIO()
    Image.new("RGB", (8, 8)).save(image, "PNG")
    kept = store.direct().put("default", image.getvalue(), media_type="image/png")
    payload = {
        "image": {"artifact_id": kept.artifact_id},
        "operations": [{"op": "thumbnail", "width": 4, "height": 4}],
    }
    request = {"task": "image_processing", "payload": payload}
    send(system, {"request_id": "before", **request})
    assert outcome(system, "before", 60).status == "completed", "the engine is there from here on"
    store.begin("fails")
    send(system, {"request_id": "i", **request, "max_attempts": 1})
    send(system, {"request_id": "late", **request, "ttl_ms": 4_000})
    send(system, {"request_id": "small", "model": "small"})
    assert outcome(system, "small").status == "completed", "others do not wait"
    late = outcome(system, "late", 30)
    assert late.error is not None
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
