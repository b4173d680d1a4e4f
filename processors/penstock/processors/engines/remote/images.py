"""Images of a remote server: POST /images/generations and /images/edits of OpenAI's API, and answers as outputs.

The images of an answer are decoded under guard and written again in the form that the request asks for, so whatever
else a server's file holds reaches nobody. Fields that OpenAI's API does not have go under the names that the option
`image_fields` gives them; others are refused.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import aiohttp
from aiohttp.http_exceptions import ContentEncodingError
from PIL import Image, ImageChops

from penstock.common.engine_kinds import IMAGE_FIELDS
from penstock.processors.engines.base import Finished, RunSpec, usage_of
from penstock.processors.engines.remote.http import RemoteClient, UnusableAnswer, json_within
from penstock.processors.engines.remote.wire import Json, counts, json_or_text
from penstock.processors.images.answered import AnsweredImages
from penstock.processors.images.decoded import DecodedImage
from penstock.processors.images.files import as_sent, check_size, encode
from penstock.processors.images.pictures import mask_in_grey, opened
from penstock.processors.settings import ImagesSection
from penstock.schemas.errors import (
    InvalidRequest,
    PenstockError,
    SourceUnavailable,
    TooLarge,
    UnsupportedParameter,
)
from penstock.schemas.records import OutputSpec

TASKS = frozenset({"image_generation", "image_editing"})
FETCHED_AGAIN_S = (0.5, 2.0)
"""Waits before the image that an answer names is fetched once more."""
_FACTS = {"inference_steps": "steps"}
"""Names of fields in the metadata of files, where they differ."""


class ImageRuns:
    """The image tasks of one remote model. `close` ends the processes that decode."""

    def __init__(self, model: str, name: str, url: str, options: Mapping[str, Any], settings: ImagesSection) -> None:
        """`name`: the model's name at the server."""
        self._model, self._name = model, name
        self._names: Mapping[str, str] = options.get("image_fields") or {}
        self._images = AnsweredImages(settings, url)

    def check(self, spec: RunSpec) -> None:
        """Raises InvalidRequest, UnsupportedParameter for what the server cannot be asked for."""
        payload = spec.payload
        for field in IMAGE_FIELDS:
            if payload.get(field) is not None and field not in self._names:
                raise UnsupportedParameter(
                    f"payload.{field}: the server of {self._model} is not known to take it (options.image_fields)",
                    param=f"payload.{field}",
                )
        if payload.get("previews") is not None:
            raise UnsupportedParameter("payload.previews: this model can show none", param="payload.previews")
        for field, other in (("width", "height"), ("height", "width")):
            if payload.get(field) is not None and payload.get(other) is None:
                raise InvalidRequest(
                    f"payload.{other} is missing: a remote model takes both sides or none", param=f"payload.{other}"
                )
        if payload.get("width") is not None:
            check_size(payload["width"], payload["height"], spec.output)
        if spec.task == "image_editing" and "image" not in spec.images:
            raise InvalidRequest("payload.image is missing", param="payload.image")

    async def run(self, http: RemoteClient, spec: RunSpec, headers: Mapping[str, str]) -> Finished:
        """Raises PenstockError, and what aiohttp raises."""
        wanted = int(spec.payload.get("n") or 1)
        path, body = "/images/generations", self._body(spec)
        if spec.task == "image_editing":
            path = "/images/edits"
            body = _form(form_of(body), await asyncio.to_thread(_files, spec.images))
        async with http.post(path, body, headers) as answer:
            try:
                return await self._finished(spec, answer, wanted)
            except (aiohttp.ClientError, TimeoutError, PenstockError) as error:
                if isinstance(error.__cause__, ContentEncodingError):
                    raise UnusableAnswer(
                        f"the answer of the server of {self._model} is not compressed as it says"
                    ) from error
                raise
            except Exception as error:  # an answer may be of any shape
                message = f"the answer of the server of {self._model} cannot be taken: {type(error).__name__}"
                raise UnusableAnswer(message) from error

    def close(self) -> None:
        self._images.close()

    def _body(self, spec: RunSpec) -> Json:
        payload = spec.payload
        body = {name: json_or_text(value) for name, value in spec.extra.items()}
        for field in IMAGE_FIELDS:
            if payload.get(field) is not None:
                _put(body, self._names[field], payload[field])
        if payload.get("width") is not None:
            body["size"] = f"{payload['width']}x{payload['height']}"
        if payload.get("n") is not None:
            body["n"] = payload["n"]
        return {**body, "model": self._name, "prompt": payload["prompt"]}

    async def _finished(self, spec: RunSpec, answer: aiohttp.ClientResponse, wanted: int) -> Finished:
        """The run's outcome. Decodes, checks and encodes one image at a time: the pixels of one are held at once."""
        found = await json_within(answer, self._images.most_bytes(wanted))
        items: Sequence[Mapping[str, Any]] = found["data"]
        if len(items) != wanted:
            raise InvalidRequest(
                f"payload.n is {wanted}, and the server of {self._model} made {len(items)}", param="payload.n"
            )
        files = [await self._taken(spec, item, number) for number, item in enumerate(items)]
        return Finished(
            run_id=spec.run_id, output={"images": files}, finish_reason="stop", usage=_usage(found.get("usage"))
        )

    async def _taken(self, spec: RunSpec, item: Mapping[str, Any], number: int) -> Json:
        """An entry of the answer as an output has it."""
        try:
            image = await self._decoded(item, f"data[{number}]")
        except (InvalidRequest, TooLarge, SourceUnavailable) as error:
            raise UnusableAnswer(f"an image of the server of {self._model} cannot be taken: {error}") from error
        self._check_made(spec, image)
        return await asyncio.to_thread(self._file, spec, image, number)

    async def _decoded(self, item: Mapping[str, Any], place: str) -> DecodedImage:
        """The image is made, and may be paid for: where it lies is asked again, not the server."""
        for wait_s in FETCHED_AGAIN_S:
            try:
                return await self._images.decoded(item, place=place)
            except SourceUnavailable:
                await asyncio.sleep(wait_s)
        return await self._images.decoded(item, place=place)

    def _check_made(self, spec: RunSpec, image: DecodedImage) -> None:
        """Raises InvalidRequest if the server made an image of another size than it was asked for."""
        width, height = spec.payload.get("width"), spec.payload.get("height")
        if width is not None and (image.width, image.height) != (width, height):
            raise InvalidRequest(
                f"{width} × {height} was asked for, and the server of {self._model} made {image.width} ×"
                f" {image.height}",
                param="payload.width",
            )

    def _file(self, spec: RunSpec, image: DecodedImage, number: int) -> Json:
        given = {_FACTS.get(field, field): spec.payload.get(field) for field in IMAGE_FIELDS}
        seed = spec.payload.get("seed") if number == 0 else None  # of the others the server chooses it
        facts = {"model": self._model, "prompt": spec.payload["prompt"], **given, "seed": seed}
        data, media_type = encode(opened(image), spec.output, facts)
        return {"data": data, "media_type": media_type, "width": image.width, "height": image.height, "seed": seed}


def form_of(body: Json) -> dict[str, str]:
    """A body as the fields of a form: `{"a": {"b": 1}}` is `a[b]`."""
    fields: dict[str, str] = {}
    for name, value in body.items():
        inner: Json = {name: value}
        if isinstance(value, dict):
            inner = {f"{name}[{key}]": one for key, one in cast("Json", value).items()}
        fields |= {key: one if isinstance(one, str) else json.dumps(one) for key, one in inner.items()}
    return fields


def _form(fields: Mapping[str, str], files: Mapping[str, tuple[str, bytes, str]]) -> aiohttp.FormData:
    form = aiohttp.FormData(quote_fields=False)
    for name, value in fields.items():
        form.add_field(name, value)
    for name, (filename, data, media_type) in files.items():
        form.add_field(name, io.BytesIO(data), filename=filename, content_type=media_type)
    return form


def _put(body: Json, name: str, value: Any) -> None:
    """`penstock.seed` is the field `seed` of the object `penstock`."""
    holder, dot, key = name.partition(".")
    if not dot:
        body[name] = value
        return
    inner = body.get(holder, {})
    if not isinstance(inner, dict):
        raise InvalidRequest(f"extra.{holder} must be a JSON object here: {name} goes into it", param=f"extra.{holder}")
    body[holder] = {**cast("Json", inner), key: value}


def _files(images: Mapping[str, DecodedImage]) -> dict[str, tuple[str, bytes, str]]:
    """The files of an edit. OpenAI wants image and mask in one format. Raises InvalidRequest. Runs in a thread."""
    mask = images.get("mask")
    data, media_type = as_sent(images["image"], lossless=mask is not None)
    files = {"image": (f"image.{media_type.removeprefix('image/')}", data, media_type)}
    if mask is not None:
        grey = mask_in_grey(opened(mask), opened(images["image"]))
        sent = Image.new("RGBA", grey.size)
        sent.putalpha(ImageChops.invert(grey))  # the image may change where the mask is transparent
        files["mask"] = ("mask.png", encode(sent, OutputSpec(format="png"), {})[0], "image/png")
    return files


def _usage(said: Any) -> dict[str, int]:
    """Tokens, from servers that count some for images."""
    found = counts(said)
    return usage_of(found.get("input_tokens", 0), found.get("output_tokens", 0))
