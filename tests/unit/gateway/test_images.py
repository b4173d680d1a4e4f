"""Images in requests, and OpenAI's routes for images: what is submitted, what is kept and what is refused."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
from typing import Any
from unittest.mock import AsyncMock, Mock

import httpx
import openai
import pytest

from gateway_parts import service_with
from kit.gateway_http import client, gateway_app
from kit.records import subscribed
from kit.refusals import refused
from penstock.common.artifacts import ArtifactStore
from penstock.gateway.edge.bodies import BodyLimits
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.limits.callers import Caller
from penstock.gateway.limits.limits import Limits
from penstock.gateway.openai import image_routes, text_routes
from penstock.gateway.openai.responses_bodies import ResponsesBody, response_images, responses_request
from penstock.gateway.routes import native
from penstock.gateway.service.brought_images import BroughtImage
from penstock.gateway.service.submitting import Accepted, Checked
from penstock.gateway.service.subscriptions import Subscription
from penstock.gateway.settings import GatewaySection, GatewaySettings
from penstock.gateway.view.frames import Frame, PreviewFrame, ProgressFrame, RestartedFrame, ResultFrame
from penstock.schemas.errors import Overloaded, PenstockError
from penstock.schemas.records import InferenceRequest

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
SMALL = b"\xff\xd8\xff a preview"
DATA = base64.b64encode(PNG).decode()
TENANT = "default"


class Parts:
    """The service's parts: accept submissions, and answer each with an image that is kept already."""

    def __init__(self, store: ArtifactStore) -> None:
        self.asked: list[InferenceRequest] = []
        self.refuses: Exception | None = None
        self.fails: dict[str, Any] | None = None
        self.before_failure = 0
        self.made = store.put(TENANT, PNG, media_type="image/png", width=1, height=1, seed=7)
        self.preview = store.put(TENANT, SMALL, media_type="image/jpeg", width=8, height=4)
        self._store = store
        self.plan = Mock(return_value={"object": "plan"})
        self.before, self.check_room, self.followed = AsyncMock(return_value=0), Mock(), Mock(return_value=False)

    async def submit(self, checked: Checked, **options: Any) -> Accepted:
        request = checked.request
        if self.refuses is not None:
            raise self.refuses
        if (keep := options.get("keep")) is not None:
            await keep(request.request_id)
        for name in ("image", "mask"):
            if reference := request.payload.get(name):  # it is kept before the request is on its topic
                await asyncio.to_thread(self._store.get, TENANT, reference["artifact_id"])
        self.asked.append(request)
        return Accepted(request.request_id)

    async def check(self, caller: Caller, request: InferenceRequest) -> Checked:
        return Checked(caller, request, None)

    def await_outcome(self, tenant: str, request_id: str, *, resumes: bool = True) -> Subscription:
        return subscribed(self.frames(request_id)[-1])

    def subscribe(self, tenant: str, request_id: str, *, resumes: bool = True) -> Subscription:
        return subscribed(*self.frames(request_id))

    def frames(self, request_id: str) -> list[Frame]:
        """An attempt that is given up after its first preview, then one with two previews too many."""
        common: dict[str, Any] = {"request_id": request_id, "cursor": None}
        image = {"artifact_id": self.preview.artifact_id, "sha256": self.preview.sha256, "media_type": "image/jpeg"}
        image |= {"width": 8, "height": 4}
        steps = [PreviewFrame(**common, step=step, steps=30, image=image) for step in (8, 16, 24)]
        if self.fails is not None:
            ended = ResultFrame(**common, status="failed", model="tiny", result=None, error=self.fails)
            return [*steps[: self.before_failure], ended]
        lost = PreviewFrame(**common, step=4, steps=30, image={**image, "artifact_id": "art_gone"})
        restarted, progress = RestartedFrame(**common, attempt=2), ProgressFrame(**common, step=1, steps=30)
        made = self.made
        image = {"artifact_id": made.artifact_id, "sha256": made.sha256, "url": made.url, "media_type": "image/png"}
        output = {"images": [{**image, "width": 1, "height": 1, "seed": 7}], "usage": {"pixels": 1}}
        result = ResultFrame(**common, status="completed", result=output, model="tiny", error=None)
        return [progress, steps[0], restarted, lost, *steps, result]


class Gateway:
    """The routes that take images, as plain HTTP and as the OpenAI client calls them."""

    def __init__(self, store: ArtifactStore, allowances: Allowances | None = None, max_body_bytes: int = 2_000_000):
        self.store, self.parts = store, Parts(store)
        settings = GatewaySettings(gateway=GatewaySection.model_validate({"max_body_bytes": max_body_bytes}))
        app = gateway_app(
            *(routes.router for routes in (native, text_routes, image_routes)),
            service=service_with(self.parts, artifacts=store),
            allowances=allowances,
            settings=settings,
            bodies=BodyLimits(max_file_bytes=50_000),
        )
        self.http = client(app)
        self.openai = openai.AsyncOpenAI(
            api_key="none", base_url="http://127.0.0.1/v1", max_retries=0, http_client=client(app)
        )

    @property
    def asked(self) -> InferenceRequest:
        (asked,) = self.parts.asked
        return asked

    async def post(self, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/requests", **body)

    async def refuses(self, call: Any, status: int, param: str | None) -> httpx.Response:
        """The call is refused for this parameter, nothing is submitted and nothing is kept."""
        used = self.store.used_bytes(TENANT)
        answer: httpx.Response = await call
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
        assert (self.parts.asked, self.store.used_bytes(TENANT)) == ([], used)
        return answer


@pytest.fixture
def gateway(store: ArtifactStore) -> Gateway:
    return Gateway(store)


def edit(image: Any, **more: Any) -> dict[str, Any]:
    return {"task": "image_editing", "payload": {"prompt": "snow", "image": image, **more}}


async def test_base64_becomes_an_artifact_of_the_tenant(gateway: Gateway) -> None:
    for _ in range(2):
        answer = await gateway.post(json=edit({"data": DATA, "media_type": "image/png"}, mask={"data": DATA}))
        assert answer.status_code == 202, answer.text
    first, second = (asked.payload for asked in gateway.parts.asked)
    assert first == second, "a repeat is the same request"
    assert first["image"] == first["mask"]
    kept = gateway.store.describe(TENANT, first["image"]["artifact_id"])
    assert (kept.media_type, kept.size_bytes, kept.sha256) == ("image/png", len(PNG), hashlib.sha256(PNG).hexdigest())
    assert kept.expires_at_ms is not None


async def test_files_of_a_multipart_body(gateway: Gateway) -> None:
    files = {"picture": ("a.png", PNG, "application/octet-stream")}
    answer = await gateway.post(data={"request": json.dumps(edit({"file": "picture"}, strength=0.5))}, files=files)
    assert answer.status_code == 202, answer.text
    assert gateway.asked.payload["strength"] == 0.5
    assert gateway.store.get(TENANT, gateway.asked.payload["image"]["artifact_id"]) == PNG


@pytest.mark.parametrize(
    ("request_part", "files", "param"),
    [
        (json.dumps(edit({"file": "other"})), {"picture": PNG}, "payload.image.file"),
        (json.dumps(edit({"file": "picture"})), {"picture": PNG, "more": PNG}, "more"),
        (json.dumps(edit({"file": "picture"})), {"picture": b"<svg/>"}, "payload.image"),
        ("{", {"picture": PNG}, "request"),
        (json.dumps(edit({"file": "picture"}, strength=float("nan"))), {"picture": PNG}, "payload.strength"),
        (None, {"picture": PNG}, "request"),
    ],
)
async def test_a_wrong_multipart_body_is_refused(
    gateway: Gateway, request_part: str | None, files: dict[str, bytes], param: str
) -> None:
    data = {} if request_part is None else {"request": request_part}
    await gateway.refuses(gateway.post(data=data, files=files), 400, param)


async def test_a_multipart_body_and_its_json_have_limits_of_their_own(store: ArtifactStore) -> None:
    """JSON is parsed on the event loop: as a file it could have the bytes of a file."""
    gateway = Gateway(store, max_body_bytes=1_000)
    for files, limit, message in (
        ({"request": b"{}", "a": bytes(60_000)}, 50_000, "50000 bytes"),
        ({"request": ("r.json", b"[" * 1_001), "picture": ("a.png", PNG)}, 1_000, "the part `request`"),
    ):
        answer = await gateway.refuses(gateway.post(files=files), 413, None)
        error = answer.json()["error"]
        assert (error["details"], message in error["message"]) == ({"limit_bytes": limit}, True), answer.text


@pytest.mark.parametrize(
    ("image", "param"),
    [
        ({"data": "%%%"}, ".data"),
        ({"data": 3}, ".data"),
        ({"data": base64.b64encode(b"text").decode()}, ""),
        ({"data": DATA, "media_type": "text/html"}, ".media_type"),
        ({"data": DATA, "url": "https://a.example/"}, ".url"),
        ({"file": "picture"}, ".file"),
    ],
)
async def test_what_is_no_image_is_refused(gateway: Gateway, image: dict[str, Any], param: str) -> None:
    await gateway.refuses(gateway.post(json=edit(image)), 400, f"payload.image{param}")


async def test_nothing_is_kept_for_a_request_that_is_refused_or_a_dry_run(gateway: Gateway) -> None:
    used = gateway.store.used_bytes(TENANT)
    answer = await gateway.http.post("/v1/requests?dry_run=true", json=edit({"data": DATA}))
    assert answer.json() == {"object": "plan"}
    assert gateway.store.used_bytes(TENANT) == used
    await gateway.refuses(gateway.post(json=edit({"data": DATA}, nonsense=1)), 400, "payload.nonsense")
    gateway.parts.refuses = Overloaded("full")
    await gateway.refuses(gateway.post(json=edit({"data": DATA})), 503, None)
    limited = Gateway(gateway.store, Allowances(defaults=Limits(artifact_bytes=10)))
    await limited.refuses(limited.post(json=edit({"data": DATA})), 429, None)


async def test_images_of_a_chat(gateway: Gateway) -> None:
    url = f"data:image/png;base64,{DATA}"
    content: list[Any] = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        {"type": "image_url", "image_url": {"url": "https://a.example/b.png"}},
    ]
    await gateway.openai.chat.completions.create(model="tiny", messages=[{"role": "user", "content": content}])
    (message,) = gateway.asked.payload["messages"]
    assert message["content"] == "What is this?"
    assert gateway.store.get(TENANT, message["parts"][1]["image"]["artifact_id"]) == PNG
    assert message["parts"][2]["image"] == {"url": "https://a.example/b.png"}
    content[1]["image_url"] = {"url": url, "detail": "medium"}
    with refused(openai.BadRequestError, code="unsupported_parameter", param="messages[0].content[1].image_url.detail"):
        await gateway.openai.chat.completions.create(model="tiny", messages=[{"role": "user", "content": content}])


async def test_generations_as_the_openai_client_asks_for_them(gateway: Gateway) -> None:
    options: Any = {"output_format": "jpeg", "output_compression": 80, "quality": "auto", "n": 1, "size": "64x32"}
    extra = {"penstock": {"seed": 7, "inference_steps": 3, "priority": 2}}
    made = await gateway.openai.images.generate(prompt="a dam", **options, extra_body=extra)
    assert base64.b64decode(made.data[0].b64_json) == PNG
    asked = gateway.asked
    expected = {"prompt": "a dam", "n": 1, "width": 64, "height": 32, "seed": 7, "inference_steps": 3}
    assert (asked.task, asked.payload) == ("image_generation", expected)
    assert (asked.output.format, asked.output.quality, asked.priority) == ("jpeg", 80, 2)
    url = (await gateway.openai.images.generate(prompt="a dam", response_format="url")).data[0].url
    assert url.startswith(f"http://127.0.0.1/v1/artifacts/{gateway.parts.made.artifact_id}/content?ticket=")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"size": "big"}, "size"),
        ({"size": "99999x99999"}, "size"),
        ({"quality": "hd"}, "quality"),
        ({"style": "vivid"}, "style"),
        ({"background": "transparent"}, "background"),
        ({"n": 100}, "n"),
        ({"stream": True, "response_format": "url"}, "response_format"),
        ({"stream": True, "partial_images": 4}, "partial_images"),
        ({"partial_images": 1}, "partial_images"),
        ({"response_format": "png"}, "response_format"),
        ({"output_format": "png", "output_compression": 50}, "output_compression"),
        ({"penstock": {"inference_steps": 0}}, "penstock.inference_steps"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
async def test_fields_that_would_change_an_image_are_refused_by_name(
    gateway: Gateway, fields: dict[str, Any], param: str
) -> None:
    await gateway.refuses(gateway.http.post("/v1/images/generations", json={"prompt": "a dam", **fields}), 400, param)


@pytest.mark.parametrize(("partial_images", "previews"), [(0, None), (2, 10), (3, 8)])
async def test_a_stream_of_images_as_the_openai_client_reads_it(
    gateway: Gateway, partial_images: int, previews: int | None
) -> None:
    stream = await gateway.openai.images.generate(prompt="a dam", stream=True, partial_images=partial_images)
    *partial, last = [event async for event in stream]
    assert gateway.asked.payload.get("previews") == previews
    # One of the first attempt, then none that is lost and none too many.
    numbers = [getattr(event, "partial_image_index", None) for event in partial]
    assert numbers == [[], [0, 0, 1], [0, 0, 1, 2]][max(0, partial_images - 1)]
    for event in partial:
        assert event.type == "image_generation.partial_image"
        assert base64.b64decode(event.b64_json) == SMALL
        assert (event.size, event.output_format) == ("8x4", "jpeg")
    assert last.type == "image_generation.completed"
    assert base64.b64decode(last.b64_json) == PNG
    assert (last.size, last.output_format, last.usage.total_tokens) == ("1x1", "png", 0)
    assert {event.created_at for event in partial} <= {last.created_at}


async def test_a_stream_of_an_edit_and_how_many_steps_lie_between(gateway: Gateway) -> None:
    extra = {"penstock": {"inference_steps": 9}}
    stream = await gateway.openai.images.edit(
        image=io.BytesIO(PNG), prompt="snow", stream=True, partial_images=1, extra_body=extra
    )
    assert [event.type async for event in stream] == [*["image_edit.partial_image"] * 2, "image_edit.completed"]
    assert gateway.asked.payload["previews"] == 5


async def test_a_stream_of_images_that_fails(gateway: Gateway) -> None:
    message = "payload.previews: this model can show none"
    gateway.parts.fails = {"code": "unsupported_parameter", "message": message, "param": "payload.previews"}
    with pytest.raises(openai.BadRequestError) as caught:
        await gateway.openai.images.generate(prompt="a dam", stream=True, partial_images=1)
    assert caught.value.param == "partial_images", "before its first event it is an answer of its own"
    gateway.parts.before_failure = 1
    stream = await gateway.openai.images.generate(prompt="a dam", stream=True, partial_images=1)
    assert (await anext(stream)).type == "image_generation.partial_image"
    with pytest.raises(openai.APIError, match="can show none"):
        await anext(stream)


async def test_edits_as_the_openai_client_asks_for_them(gateway: Gateway) -> None:
    options: Any = {"n": 1, "size": "64x64", "response_format": "b64_json"}
    options["extra_body"] = {"penstock": {"strength": 0.5, "seed": 3}}
    made = await gateway.openai.images.edit(image=io.BytesIO(PNG), mask=io.BytesIO(PNG), prompt="snow", **options)
    assert base64.b64decode(made.data[0].b64_json) == PNG
    asked = gateway.asked
    assert (asked.task, asked.payload["strength"], asked.payload["seed"]) == ("image_editing", 0.5, 3)
    assert gateway.store.get(TENANT, asked.payload["mask"]["artifact_id"]) == PNG
    for images in ([], [io.BytesIO(PNG), io.BytesIO(PNG)]):
        with refused(openai.BadRequestError, param="image"):
            await gateway.openai.images.edit(image=images, prompt="snow")
    with pytest.raises(openai.BadRequestError, match="edits"):
        await gateway.openai.images.create_variation(image=io.BytesIO(PNG))


def of_input(*content: dict[str, Any]) -> tuple[list[BroughtImage], InferenceRequest]:
    body = ResponsesBody.model_validate({"model": "eyes", "input": [{"role": "user", "content": [*content]}]})
    return response_images(body, Caller()), responses_request(body, Caller(), 1)


def test_images_of_a_response_are_kept_and_become_references() -> None:
    (brought,), asked = of_input(
        {"type": "input_text", "text": "What is this?"},
        {"type": "input_image", "image_url": f"data:image/png;base64,{DATA}", "detail": "auto"},
        {"type": "input_image", "image_url": "https://a.example/x.png", "detail": "original"},
    )
    assert (brought.data, brought.media_type) == (PNG, "image/png")
    (message,) = asked.payload["messages"]
    assert message["content"] == "What is this?"
    images = [None, {"artifact_id": brought.artifact_id}, {"url": "https://a.example/x.png"}]
    assert [part.get("image") for part in message["parts"]] == images


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"image_url": "data:image/png;base64,!"}, "input[0].content[0].image_url"),
        ({}, "input[0].content[0]"),
        ({"file_id": "a", "image_url": "https://a.example/x.png"}, "input[0].content[0]"),
    ],
)
def test_a_wrong_image_of_a_response_is_named(part: dict[str, Any], param: str) -> None:
    with refused(PenstockError, param=param):
        of_input({"type": "input_image", **part})


async def test_an_edit_in_a_conversation_needs_no_file(gateway: Gateway) -> None:
    form = {"prompt": (None, "make it blue"), "penstock[conversation_id]": (None, "trip")}
    answer = await gateway.http.post("/v1/images/edits", files=form)
    assert answer.status_code == 200, answer.text
    asked = gateway.parts.asked.pop()
    assert (asked.task, asked.conversation_id, asked.payload["image"]) == ("image_editing", "trip", {})
    del form["penstock[conversation_id]"]
    await gateway.refuses(gateway.http.post("/v1/images/edits", files=form), 400, "image")
