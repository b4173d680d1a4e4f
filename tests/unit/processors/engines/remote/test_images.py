"""Images by a remote server: what it is sent, what it may answer, and chats with images."""

from __future__ import annotations

import base64
import email.parser
import email.policy
import io
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from PIL import Image

from kit.engines import Server, run, served, serving
from kit.pictures import decoded, file_of
from penstock.processors.engines.base import Finished, RunFailed, RunSpec
from penstock.processors.engines.remote import images
from penstock.processors.images.answered import AnsweredImages
from penstock.processors.images.decoded import DecodedImage
from penstock.processors.outputs import pixels_of
from penstock.schemas.errors import InvalidRequest, RetryKind, SourceUnavailable, UnsupportedParameter
from penstock.schemas.records import OutputSpec

RED, CLEAR = (220, 30, 30), (0, 0, 0, 0)
TAKES = {
    "negative_prompt": "negative_prompt",
    "inference_steps": "num_inference_steps",
    "seed": "penstock.seed",
    "guidance_scale": "penstock.guidance_scale",
}


def b64(size: tuple[int, int] = (16, 8), format: str = "PNG") -> dict[str, str]:
    return {"b64_json": base64.b64encode(file_of(Image.new("RGB", size, RED), format)).decode()}


def made(*items: dict[str, Any], **fields: Any) -> httpx.Response:
    return httpx.Response(200, json={"created": 1, "data": list(items), **fields})


def asked(task: str = "image_generation", *, images: dict[str, DecodedImage] | None = None, **payload: Any) -> RunSpec:
    extra = payload.pop("extra", {})
    output = payload.pop("output", None)
    payload = {"prompt": "a cat", **payload}
    return RunSpec(
        run_id="r1",
        task=task,
        model="m",
        prompt=payload["prompt"],
        payload=payload,
        images=images or {},
        extra=extra,
        output=output,
    )


def form(request: httpx.Request) -> dict[str, tuple[str | None, str, bytes]]:
    """The parts of a multipart body by name: (file name, type, bytes)."""
    head = f"content-type: {request.headers['content-type']}\r\n\r\n".encode()
    whole = email.parser.BytesParser(policy=email.policy.HTTP).parsebytes(head + request.content)
    return {
        str(part.get_param("name", header="content-disposition")): (
            part.get_filename(),
            part.get_content_type(),
            part.get_payload(decode=True),
        )
        for part in whole.iter_parts()
    }  # pyright: ignore[reportReturnType]


async def test_a_prompt_becomes_images_with_their_facts() -> None:
    server = Server(made(b64(), b64(), usage={"input_tokens": 5, "output_tokens": 7, "total_tokens": 12}))
    fields = {"negative_prompt": "dogs", "inference_steps": 4, "seed": 7, "guidance_scale": 2.5}
    async with serving(server, remote_model="big", image_fields=TAKES) as engine:
        spec = asked(n=2, width=16, height=8, extra={"quality": "high"}, **fields)
        _, found = await run(engine, spec)
    assert isinstance(found, Finished), found
    assert str(server.requests[0].url) == "http://server/v1/images/generations"
    assert server.bodies() == [
        {
            "model": "big",
            "prompt": "a cat",
            "n": 2,
            "size": "16x8",
            "quality": "high",
            "negative_prompt": "dogs",
            "num_inference_steps": 4,
            "penstock": {"seed": 7, "guidance_scale": 2.5},
        }
    ]
    images = found.output["images"]
    assert [(one["width"], one["height"], one["media_type"], one["seed"]) for one in images] == [
        (16, 8, "image/png", 7),
        (16, 8, "image/png", None),
    ]
    file = Image.open(io.BytesIO(images[0]["data"]))
    assert file.convert("RGB").getpixel((3, 3)) == RED
    facts = {"Software": "Penstock", "model": "m", "prompt": "a cat", "negative_prompt": "dogs", "steps": "4"}
    assert file.info == {**facts, "seed": "7", "guidance_scale": "2.5"}
    assert (found.prompt_tokens, found.completion_tokens, pixels_of(found.output)) == (5, 7, 2 * 16 * 8)


async def test_a_file_has_the_form_that_was_asked_for_and_nothing_else_that_the_server_put_in() -> None:
    exif = Image.Exif()
    exif[0x010E] = "secret of the server"
    data = file_of(Image.new("RGB", (16, 8), RED), "JPEG", exif=exif)
    _, found = await served(
        lambda _: made({"b64_json": base64.b64encode(data).decode()}),
        asked(output=OutputSpec(format="webp", quality=80, facts=False)),
    )
    (image,) = found.output["images"]
    assert (Image.open(io.BytesIO(image["data"])).format, image["media_type"]) == ("WEBP", "image/webp")
    assert b"secret" not in image["data"]


async def test_an_edit_is_a_form_whose_mask_is_transparent_where_the_image_changes() -> None:
    server = Server(made(b64()))
    image = Image.new("RGBA", (4, 2), (*RED, 128))
    mask = Image.new("L", (4, 2), 0)
    mask.paste(255, (2, 0, 4, 2))  # pyright: ignore[reportArgumentType]
    async with serving(server, image_fields={"strength": "strength", "seed": "penstock.seed"}) as engine:
        images = {"image": decoded(image, "JPEG"), "mask": decoded(mask)}
        spec = asked("image_editing", images=images, strength=0.5, seed=3, n=1, extra={"input_fidelity": "high"})
        _, found = await run(engine, spec)
    assert isinstance(found, Finished), found
    assert server.requests[0].url.path == "/v1/images/edits"
    parts = form(server.requests[0])
    texts = {name: data.decode() for name, (file, _, data) in parts.items() if file is None}
    assert texts == {
        "model": "m",
        "prompt": "a cat",
        "n": "1",
        "strength": "0.5",
        "penstock[seed]": "3",
        "input_fidelity": "high",
    }
    assert [parts[name][:2] for name in ("image", "mask")] == [("image.png", "image/png"), ("mask.png", "image/png")]
    base = Image.open(io.BytesIO(parts["image"][2]))
    assert (base.mode, base.getpixel((0, 0))) == ("RGB", (237, 142, 142))  # on white, as local engines see it
    alpha = Image.open(io.BytesIO(parts["mask"][2])).getchannel("A")
    assert list(alpha.get_flattened_data()) == [255, 255, 0, 0] * 2


async def test_a_photograph_without_a_mask_is_sent_as_one() -> None:
    server = Server(made(b64()))
    async with serving(server) as engine:
        await run(engine, asked("image_editing", images={"image": decoded(Image.new("RGB", (4, 2), RED), "JPEG")}))
    assert form(server.requests[0])["image"][:2] == ("image.jpeg", "image/jpeg")


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        *(({name: 1}, UnsupportedParameter, f"payload.{name}") for name in ("inference_steps", "seed", "strength")),
        ({"negative_prompt": "dogs"}, UnsupportedParameter, "payload.negative_prompt"),
        ({"sampler": "ddim"}, UnsupportedParameter, "payload.sampler"),
        ({"guidance_scale": 2.0}, UnsupportedParameter, "payload.guidance_scale"),
        ({"previews": 2}, UnsupportedParameter, "payload.previews"),
        ({"width": 64}, InvalidRequest, "payload.height"),
        ({"task": "image_editing"}, InvalidRequest, "payload.image"),
        *(({"extra": {name: "x"}}, InvalidRequest, f"extra.{name}") for name in ("model", "prompt", "size", "image")),
        ({"width": 16_384, "height": 16, "output": OutputSpec(format="webp")}, InvalidRequest, "output.format"),
    ],
)
async def test_what_the_server_does_not_take_is_refused_before_it_is_sent(
    fields: dict[str, Any], error: type[Exception], param: str
) -> None:
    async with serving(lambda _: made(b64())) as engine:
        with pytest.raises(error) as caught:
            await engine.prepare(asked(**fields))
    assert caught.value.param == param  # pyright: ignore[reportAttributeAccessIssue]


SIZED: Any = {"width": 16, "height": 8}


def other(**form: Any) -> httpx.Response:
    return httpx.Response(200, **form)


class BreaksOff(httpx.AsyncByteStream):
    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b'{"data": ['
        raise OSError


@pytest.mark.parametrize(
    ("answer", "fields", "code", "says"),
    [
        (made(b64((8, 8))), SIZED, "invalid", "16 × 8 was asked for, and the server of m made 8 × 8"),
        *(
            (made(*items), SIZED, "invalid", f"payload.n is 1, and the server of m made {len(items)}")
            for items in ([b64(), b64()], [], [{"b64_json": "?"}] * 40)
        ),
        *(
            (made(item), SIZED, "engine_failed", says)
            for item, says in (
                ({"b64_json": "?"}, r"data\[0\].b64_json is not base64"),
                ({"b64_json": base64.b64encode(b"GIF89a").decode()}, r"data\[0\]"),
                ({}, "neither b64_json nor url"),
                ({"url": "http://elsewhere/x.png"}, "elsewhere:80 is not among the hosts"),
                ({"url": "http://server:9000/x.png"}, "server:9000 is not among the hosts"),
                ({"url": "file:///etc/passwd"}, "must be a URL of http or https"),
                ({"b64_json": "A" * (40 << 20)}, "answered with more than"),
            )
        ),
        *((other(json=body), {}, "engine_failed", "") for body in ({}, {"data": None}, {"data": ["x"]}, ["x"])),
        (other(html="<html>Sign in</html>"), {}, "engine_failed", ""),
        (other(text="[" * 200_000), {}, "engine_failed", ""),
        (other(headers={"content-encoding": "gzip"}, stream=httpx.ByteStream(b"no gzip")), {}, "engine_failed", ""),
        (made(b64((16_384, 1))), {"output": OutputSpec(format="webp")}, "invalid", "output.format"),
        (made(b64()), {"seed": 1, "extra": {"penstock": "text"}}, "invalid", "extra.penstock"),
        (httpx.Response(400, json={"error": {"message": "no 16x8"}}), SIZED, "invalid", "no 16x8"),
        (other(stream=BreaksOff()), SIZED, "engine_failed", None),
        (httpx.Response(500), SIZED, "engine_failed", None),
        (httpx.Response(429), SIZED, "engine_failed", None),
    ],
)
async def test_an_answer_that_cannot_be_taken_is_no_output_and_is_not_asked_for_again(
    answer: httpx.Response, fields: dict[str, Any], code: str, says: str | None
) -> None:
    """`says` is None if the server may take it at another time."""
    _, found = await served(lambda _: answer, asked(**fields), image_fields=TAKES)
    assert isinstance(found, RunFailed), found
    assert (found.error.code, found.retryable_here) == (code, says is None)
    if says is not None:
        assert re.search(says, str(found.error))
    if "output" in fields or "extra" in fields:
        assert found.error.param == says
    if says is not None and answer.status_code == 200:
        assert found.error.retry_kind is RetryKind.FINAL


@pytest.mark.parametrize(("fails", "posts"), [(2, 1), (3, 1)])
async def test_an_image_that_is_not_fetched_is_fetched_again_and_not_drawn_again(
    monkeypatch: pytest.MonkeyPatch, fails: int, posts: int
) -> None:
    fetches: list[str] = []
    real = AnsweredImages.decoded

    async def away(self: AnsweredImages, item: Any, *, place: str) -> DecodedImage:
        fetches.append(place)
        if len(fetches) <= fails:
            raise SourceUnavailable("its host answered 502")
        return await real(self, b64(), place=place)

    monkeypatch.setattr(AnsweredImages, "decoded", away)
    monkeypatch.setattr(images, "FETCHED_AGAIN_S", (0.0, 0.0))
    server = Server(made({"url": "http://server/x.png"}))
    _, found = await served(server, asked())
    assert (len(fetches), len(server.requests)) == (3, posts)
    assert isinstance(found, Finished if fails < 3 else RunFailed)
    if isinstance(found, RunFailed):
        assert (found.retryable_here, found.error.retry_kind) == (False, RetryKind.FINAL)


async def test_a_prompt_that_is_too_long_for_exif_costs_the_file_only_this_fact() -> None:
    _, found = await served(lambda _: made(b64()), asked(prompt="a" * 70_000, output=OutputSpec(format="jpeg")))
    assert isinstance(found, Finished), found
    facts = Image.open(io.BytesIO(found.output["images"][0]["data"])).getexif()[0x010E]
    assert json.loads(facts) == {"model": "m"}


def shown(request: httpx.Request) -> tuple[Any, str]:
    """(the image of the last message's first part, the text behind it)."""
    image, text = json.loads(request.content)["messages"][-1]["content"]
    head, _, data = image["image_url"]["url"].partition(",")
    assert head in ("data:image/png;base64", "data:image/jpeg;base64")
    return Image.open(io.BytesIO(base64.b64decode(data))), text["text"]


CHAT = {"choices": [{"message": {"content": "A red picture."}, "finish_reason": "stop"}]}


@pytest.mark.parametrize(
    ("prompt", "options", "text"),
    [
        (None, {}, "Describe this image."),
        (None, {"caption_prompt": "Caption?"}, "Caption?"),
        ("Colour?", {"caption_prompt": "Caption?"}, "Colour?"),
    ],
)
async def test_a_caption_is_a_chat_with_the_image(prompt: str | None, options: dict[str, Any], text: str) -> None:
    server = Server(httpx.Response(200, json=CHAT))
    async with serving(server, **options) as engine:
        spec = RunSpec(
            run_id="r",
            task="image_to_text",
            model="m",
            prompt=prompt,
            params={"max_tokens": 9},
            images={"image": decoded(Image.new("RGB", (4, 2), RED))},
        )
        _, found = await run(engine, spec)
    assert found.output == {"text": "A red picture."}
    body = server.bodies()[0]
    assert (server.requests[0].url.path, body["max_tokens"], len(body["messages"])) == ("/v1/chat/completions", 9, 1)
    image, words = shown(server.requests[0])
    assert (image.format, image.getpixel((0, 0)), words) == ("PNG", RED, text)


@pytest.mark.parametrize("source_format", ["PNG", "JPEG"])
async def test_what_transparency_hides_is_sent_to_no_server(source_format: str) -> None:
    hidden = decoded(Image.new("RGBA", (4, 2), (*RED, 0)), source_format)
    server = Server(lambda request: made(b64()) if "edits" in request.url.path else httpx.Response(200, json=CHAT))
    async with serving(server) as engine:
        await run(engine, RunSpec(run_id="r", task="image_to_text", model="m", images={"image": hidden}))
        await run(engine, asked("image_editing", images={"image": hidden}))
    sent = [shown(server.requests[0])[0], Image.open(io.BytesIO(form(server.requests[1])["image"][2]))]
    assert [(image.mode, image.getpixel((0, 0))) for image in sent] == [("RGB", (255, 255, 255))] * 2


async def test_chats_show_their_images_in_their_places() -> None:
    server = Server(httpx.Response(200, json=CHAT))
    parts = [{"type": "image", "image": {"artifact_id": "a"}}, {"type": "text", "text": "What is it?"}]
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is it?", "parts": parts},
    ]
    images = {"messages[1].parts[0].image": decoded(Image.new("RGB", (4, 2), RED), "JPEG")}
    async with serving(server) as engine:
        _, found = await run(
            engine, RunSpec(run_id="r", task="text_generation", model="m", messages=messages, images=images)
        )
    assert found.output == {"text": "A red picture."}
    image, words = shown(server.requests[0])
    assert (image.format, image.size, words) == ("JPEG", (4, 2), "What is it?")
    assert server.bodies()[0]["messages"][0] == messages[0]
    assert "parts" not in server.bodies()[0]["messages"][1]
