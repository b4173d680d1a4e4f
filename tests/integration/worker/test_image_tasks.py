"""Images and summaries over Kafka alone: artifacts in and out, refusals by name, a killed engine, one outcome each."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from kit.http_server import HttpServer
from penstock.common.artifacts import ArtifactStore
from support import engine_processes, in_background
from system import System, eventually
from worker_requests import outcome, records, send, statuses, turn

pytestmark = pytest.mark.slow

COLOURS = {"red": (220, 30, 30), "green": (30, 180, 40), "blue": (30, 50, 220)}


def store(system: System) -> ArtifactStore:
    return ArtifactStore(system.folder / "artifacts")


def kept(system: System, colour: str, size: tuple[int, int] = (60, 40)) -> dict[str, str]:
    """An image of this colour, as requests refer to it."""
    data = io.BytesIO()
    Image.new("RGB", size, COLOURS[colour]).save(data, "PNG")
    return {"artifact_id": store(system).put("default", data.getvalue(), media_type="image/png").artifact_id}


def processing(request_id: str, image: dict[str, str], *operations: dict[str, Any]) -> dict[str, Any]:
    payload = {"image": image, "operations": list(operations)}
    return {"request_id": request_id, "task": "image_processing", "payload": payload}


def made(system: System, request_id: str) -> Image.Image:
    event = outcome(system, request_id, 120)
    assert event.status == "completed", (event.error, system.processes[-1].tail())
    assert event.output is not None
    (image,) = event.output["images"]
    found = Image.open(io.BytesIO(store(system).get("default", image["artifact_id"], sha256=image["sha256"])))
    assert (image["width"], image["height"], image["media_type"]) == (*found.size, Image.MIME[found.format or ""])
    return found


def refused(system: System, request_id: str) -> tuple[str, str | None]:
    event = outcome(system, request_id, 60)
    assert event.error is not None, event
    return event.error.code, event.error.param


def test_images_and_summaries_over_kafka(make_system: Callable[..., System], tiny_vision: Path, tiny_lm: Path) -> None:
    system = make_system(
        models=[
            {"id": "images", "source": "pillow", "engine": "imaging"},
            {
                "id": "eyes",
                "source": str(tiny_vision),
                "engine": "vision",
                "tasks": ["image_to_text", "text_generation"],
            },
            {"id": "tiny", "source": str(tiny_lm), "engine": "text", "tasks": ["text_generation", "summarization"]},
        ]
    )
    worker = system.worker().wait_ready()
    red, blue = kept(system, "red"), kept(system, "blue", (20, 20))

    # Processing: both forms of operations, and a second image.
    resize = {"op": "resize", "arguments": {"width": "30", "height": "30", "fit": "cover"}}
    put = {"op": "composite", "image": blue, "left": 20, "top": 20}
    send(system, processing("p1", red, resize, put, {"op": "convert", "format": "webp", "quality": 100}))
    image = made(system, "p1")
    assert image.size == (30, 30)
    assert image.format == "WEBP"
    corners = [image.convert("RGB").getpixel(place) for place in ((2, 2), (27, 27))]
    for found, colour in zip(corners, ("red", "blue"), strict=True):
        assert found == pytest.approx(COLOURS[colour], abs=30)
    send(system, processing("p2", red, {"op": "flip", "axis": "vertical"}, {"op": "upscale"}))
    send(system, processing("p3", red, {"op": "crop", "left": 50, "width": 11, "height": 1}))
    send(system, processing("p4", red, {"op": "rotate"}))
    assert refused(system, "p2") == ("unsupported_parameter", "payload.operations[1].op")
    assert refused(system, "p3") == ("invalid", "payload.operations[0].width")
    assert refused(system, "p4") == ("invalid", "payload.operations[0].degrees")

    # Captions and questions.
    for number, (colour, prompt) in enumerate([("red", None), ("green", "What colour is it?")]):
        payload = {"image": kept(system, colour), **({} if prompt is None else {"prompt": prompt})}
        send(system, {"request_id": f"t{number}", "task": "image_to_text", "payload": payload, "stream": True})
    texts = [outcome(system, f"t{number}", 120).output or {} for number in range(2)]
    assert [text["text"] for text in texts] == ["A red picture.", "It is green."]

    # Summaries: longer than any window of the tiny model; its steps are told.
    words = "The red dog lived near Paris. " * 400
    summary = {"task": "summarization", "payload": {"text": words, "max_tokens": 20}}
    send(system, {"request_id": "s1", **summary})
    event = outcome(system, "s1", 180)
    assert event.status == "completed", (event.error, worker.tail())
    assert event.usage is not None
    assert (event.usage.prompt_tokens or 0) > 3000, "each part was read"
    assert isinstance((event.output or {})["text"], str)
    # Of a conversation, which is only read.
    send(system, turn("c1-1", "My name is Ada."))
    assert outcome(system, "c1-1", 60).status == "completed"
    before = records(system)
    told = {"task": "summarization", "payload": {"conversation_id": "c1", "max_tokens": 20}}
    send(system, {"request_id": "s2", **told})
    send(system, {"request_id": "s3", **told, "payload": {"conversation_id": "nobody"}})
    whole = outcome(system, "s2", 60)
    assert whole.status == "completed", whole.error
    assert refused(system, "s3") == ("not_found", "payload.conversation_id")
    through = {"conversation_id": "c1", "through_offset": 0, "max_tokens": 20}
    send(system, {"request_id": "s4", **told, "payload": through})
    part = outcome(system, "s4", 60)
    assert whole.usage is not None
    assert part.usage is not None
    assert (part.usage.prompt_tokens or 0) < (whole.usage.prompt_tokens or 0)
    assert records(system) == before
    assert worker.stop() == 0, worker.tail()


def test_a_killed_engine_of_images_gives_one_outcome_each(make_system: Callable[..., System]) -> None:
    system = make_system(models=[{"id": "images", "source": "pillow", "engine": "imaging"}])
    worker = system.worker().wait_ready()
    image = kept(system, "green", (600, 600))
    send(system, processing("warm", image, {"op": "thumbnail", "width": 9, "height": 9}))
    made(system, "warm")
    ids = [f"r{n}" for n in range(24)]
    heavy = [{"op": "rotate", "degrees": 33}, {"op": "resize", "width": 600, "height": 560}] * 2
    send(system, *(processing(one, image, *heavy, {"op": "thumbnail", "width": 20, "height": 20}) for one in ids))
    eventually(lambda: any(one in system.outcomes() for one in ids), 120, worker.tail)
    for engine in engine_processes(worker.popen.pid):
        engine.kill()
    assert {made(system, one).size for one in ids} == {(20, 19)}
    ends = [event.request_id for event in system.results() if event.request_id in ids and event.is_terminal]
    assert sorted(ends) == sorted(ids)
    outcomes = system.outcomes()
    again = [one for one in ids if outcomes[one].attempt == 2]
    assert again, "all runs were over before the engine was killed"
    assert "retrying" in statuses(system, again[0])
    assert worker.stop() == 0, worker.tail()


def test_an_image_that_came_as_a_file_goes_to_the_store_that_the_request_names(
    make_system: Callable[..., System], tmp_path: Path
) -> None:
    """Multipart in, from an allowed host, and from one that is not; the bytes lie in `output.store`."""
    data = io.BytesIO()
    Image.new("RGB", (60, 40), COLOURS["green"]).save(data, "PNG")
    renders, hosts = tmp_path / "renders", HttpServer(lambda _: (200, data.getvalue(), {}))
    settings = {
        "PENSTOCK_ARTIFACTS__STORES": json.dumps({"renders": {"location": str(renders)}}),
        "PENSTOCK_IMAGES__INTERNAL_HOSTS": json.dumps([f"127.0.0.1:{hosts.server_port}"]),
    }
    system = make_system(models=[{"id": "images", "source": "pillow", "engine": "imaging"}])
    with in_background(hosts):
        worker, gateway = system.worker(env=settings), system.gateway(env=settings)
        worker.wait_ready()
        gateway.wait_ready()
        output = {"store": "renders", "prefix": "2026/11", "format": "webp"}
        thumbnail = {"op": "thumbnail", "width": 30, "height": 30}

        def asked(image: dict[str, str], **files: bytes) -> dict[str, Any]:
            body = {
                "task": "image_processing",
                "payload": {"image": image, "operations": [thumbnail]},
                "output": output,
            }
            parts = {"request": (None, json.dumps(body), "application/json"), **files}
            answer = httpx.post(f"{gateway.url}/v1/requests", files=parts, timeout=30)
            assert answer.status_code == 202, answer.text
            return gateway.request(answer.json()["request_id"], wait=60)

        port = hosts.server_port
        found = [asked({"file": "photo"}, photo=data.getvalue()), asked({"url": f"http://127.0.0.1:{port}/a.png"})]
        for done in found:
            assert done["status"] == "completed", (done, worker.tail())
            (image,) = done["result"]["images"]
            fetched = httpx.get(gateway.url + image["url"], timeout=30)
            assert (fetched.headers["content-type"], Image.open(io.BytesIO(fetched.content)).size) == (
                "image/webp",
                (30, 20),
            )
            (file,) = [one for one in renders.rglob("*") if one.is_file() and one.read_bytes() == fetched.content][:1]
            assert "2026/11" in file.as_posix()
        elsewhere = asked({"url": f"http://127.0.0.1:{port + 1}/a.png"})
        assert (elsewhere["error"]["code"], elsewhere["error"]["param"]) == ("invalid", "payload.image.url")
        assert "is not among the hosts that images may come from" in elsewhere["error"]["message"]
    assert worker.stop() == 0, worker.tail()
