"""Image tasks of remote models over Kafka: another Penstock as the server, and one that refuses, hangs and is left."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image

from penstock.common.artifacts import ArtifactStore
from penstock.schemas.records import ResultEvent
from support import in_background
from system import System, eventually
from worker_requests import command, outcome, send

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LOADED_S = 240
OURS = {
    name: f"penstock.{name}"
    for name in ("negative_prompt", "inference_steps", "guidance_scale", "seed", "strength", "sampler")
}
DRAWING = {"prompt": "a cat", "width": 32, "height": 32, "inference_steps": 2, "seed": 7, "negative_prompt": "dogs"}


def file_of(image: Image.Image) -> bytes:
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


def kept(system: System, image: Image.Image) -> dict[str, str]:
    store = ArtifactStore(system.folder / "artifacts")
    return {"artifact_id": store.put("default", file_of(image), media_type="image/png").artifact_id}


def drawn(system: System, request_id: str) -> tuple[ResultEvent, Image.Image]:
    """The outcome, which has one image, and that image."""
    event = outcome(system, request_id, LOADED_S)
    assert event.status == "completed", event.error
    (one,) = (event.output or {})["images"]
    data = ArtifactStore(system.folder / "artifacts").get("default", one["artifact_id"], sha256=one["sha256"])
    image = Image.open(io.BytesIO(data))
    assert (one["width"], one["height"]) == image.size
    return event, image


def far(model: str, url: str, *tasks: str, **options: Any) -> dict[str, Any]:
    return {"id": model, "source": url, "engine": "remote", "tasks": [*tasks], "options": options}


def diffusers(model: str, asset: str, task: str) -> dict[str, Any]:
    folder = pytest.importorskip("penstock.cli.assets").prepare_model(asset, print)
    return {"id": model, "source": str(folder), "engine": "diffusers", "tasks": [task], "preload": False}


@pytest.mark.model
def test_another_penstock_draws_edits_and_describes(make_system: Callable[..., System], tiny_vision: Path) -> None:
    there = make_system(
        models=[
            diffusers("painter", "tiny-image-generation", "image_generation"),
            diffusers("editor", "tiny-image-editing", "image_editing"),
            {
                "id": "eyes",
                "source": str(tiny_vision),
                "engine": "vision",
                "tasks": ["image_to_text", "text_generation"],
                "preload": False,
            },
        ]
    )
    url = there.start_all(["w1", "g1"]).process("g1").url
    here = make_system(
        models=[
            far("painter", url, "image_generation", image_fields=OURS),
            far("editor", url, "image_editing", image_fields={"inference_steps": OURS["inference_steps"]}),
            far("eyes", url, "image_to_text", "text_generation", caption_prompt="What colour is it?"),
        ]
    )
    here.start_all(["w1", "g1"])

    # The same seed, steps and words give the same pixels.
    drawing = {"task": "image_generation", "model": "painter", "payload": DRAWING}
    send(there, {"request_id": "there", **drawing})
    send(here, {"request_id": "here", **drawing})
    event, image = drawn(here, "here")
    _, same = drawn(there, "there")
    assert image.tobytes() == same.tobytes()
    assert (event.usage.pixels, event.device, event.model) == (32 * 32, "remote", "painter")
    facts = (image.info["model"], image.info["prompt"], image.info["seed"], image.info["negative_prompt"])
    assert facts == ("painter", "a cat", "7", "dogs")

    # An edit; what the server refuses, and what it is not known to take.
    red = kept(here, Image.new("RGB", (32, 32), (220, 30, 30)))
    edit = {"prompt": "make it blue", "image": red, "inference_steps": 2}
    send(here, {"request_id": "edit", "task": "image_editing", "model": "editor", "payload": edit})
    send(here, {"request_id": "odd", **drawing, "payload": {**DRAWING, "width": 33, "height": 33}})
    send(here, {"request_id": "seeded", "task": "image_editing", "model": "editor", "payload": {**edit, "seed": 1}})
    assert drawn(here, "edit")[1].size == (32, 32)
    said = [outcome(here, one, LOADED_S).error for one in ("odd", "seeded")]
    assert [(one.code, one.param) for one in said if one] == [
        ("invalid", None),
        ("unsupported_parameter", "payload.seed"),
    ]
    assert said[0]
    assert "multiples of" in said[0].message

    # Captions, and chats with images by the stock client.
    send(here, {"request_id": "caption", "task": "image_to_text", "payload": {"image": red}, "stream": True})
    assert (outcome(here, "caption", LOADED_S).output or {})["text"] == "It is red."
    client = openai.OpenAI(api_key="none", base_url=f"{here.process('g1').url}/v1", max_retries=0)
    green = f"data:image/png;base64,{base64.b64encode(file_of(Image.new('RGB', (32, 32), (30, 180, 40)))).decode()}"
    parts: Any = [
        {"type": "image_url", "image_url": {"url": green}},
        {"type": "text", "text": "What colour is it?"},
    ]
    chat = client.chat.completions.create(model="eyes", messages=[{"role": "user", "content": parts}], temperature=0)
    assert chat.choices[0].message.content == "It is green."
    made = client.images.generate(
        model="painter", prompt="a cat", size="32x32", extra_body={"penstock": {"inference_steps": 2, "seed": 7}}
    )
    assert made.data
    assert Image.open(io.BytesIO(base64.b64decode(made.data[0].b64_json or ""))).size == (32, 32)


@dataclass
class Drawer:
    """A server that gives the URL of an image on itself. It turns away the first `refusals`, and may hang."""

    url: str = ""
    refusals: int = 0
    may_draw: threading.Event = field(default_factory=threading.Event)
    asked: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    headers: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    left: int = 0
    """Requests whose client had gone before they were answered."""

    @contextmanager
    def listening(self) -> Iterator[Drawer]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{server.server_port}"
        with in_background(server):
            yield self


def _handler(drawer: Drawer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            drawer.asked.append(body)
            drawer.headers.append({name.lower(): value for name, value in self.headers.items()})
            if drawer.refusals:
                drawer.refusals -= 1
                self._answer(429, b"{}", "application/json")
                return
            self.connection.settimeout(0.1)
            while not drawer.may_draw.is_set():
                try:
                    if self.connection.recv(1) == b"":
                        drawer.left += 1
                        return
                except TimeoutError:
                    pass
                except OSError:
                    drawer.left += 1
                    return
            where = body.get("at", drawer.url)
            answer = {"data": [{"url": f"{where}/made.png"}] * body.get("n", 1)}
            self._answer(200, json.dumps(answer).encode(), "application/json")

        def do_GET(self) -> None:
            self._answer(200, file_of(Image.new("RGB", (8, 8), (220, 30, 30))), "image/png")

        def _answer(self, status: int, data: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


def test_a_drawing_is_turned_away_cancelled_and_begun_anew_and_has_one_outcome(
    make_system: Callable[..., System],
) -> None:
    """By the server's URL of an image: its own host is asked, another only where `[images]` names it."""
    with Drawer(refusals=2).listening() as server, Drawer().listening() as elsewhere:
        system = make_system(models=[far("painter", server.url, "image_generation")])
        worker = system.worker().wait_ready()
        drawing = {"task": "image_generation", "payload": {"prompt": "a cat"}}
        send(system, {"request_id": "kept", **drawing}, {"request_id": "gone", **drawing})
        eventually(lambda: len(server.asked) >= 4, 60, worker.tail)
        command(system, "cancel", "gone")
        assert outcome(system, "gone").status == "cancelled"
        eventually(lambda: server.left == 1, 30, worker.tail)
        worker.kill9()
        eventually(lambda: server.left == 2, 30, worker.tail)
        server.may_draw.set()
        worker = system.worker("w2").wait_ready()
        event, image = drawn(system, "kept")
        assert (image.size, image.convert("RGB").getpixel((4, 4))) == ((8, 8), (220, 30, 30))
        assert event.usage.pixels == 64
        assert {one: end.status for one, end in system.outcomes().items()} == {"gone": "cancelled", "kept": "completed"}

        asked = len(server.asked)
        outside = {**drawing, "extra": {"at": elsewhere.url}}
        send(system, {"request_id": "outside", **outside})
        failed = outcome(system, "outside")
        assert (failed.error.code, failed.attempt) == ("engine_failed", 1)
        assert "is not among the hosts that images may come from" in failed.error.message
        assert len(server.asked) == asked + 1, "it was drawn again, though the answer can never be taken"
        assert worker.stop() == 0, worker.tail()
        allowed = {"PENSTOCK_IMAGES__INTERNAL_HOSTS": json.dumps([elsewhere.url.removeprefix("http://")])}
        worker = system.worker("w3", env=allowed).wait_ready()
        send(system, {"request_id": "inside", **outside})
        assert drawn(system, "inside")[1].size == (8, 8)
        assert worker.stop() == 0, worker.tail()
