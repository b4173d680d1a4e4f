"""The bodies of OpenAI's routes for images, as JSON and as forms: what is read, what is harmless, what is refused."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from penstock.gateway.limits.callers import Caller
from penstock.gateway.openai.chat_bodies import (
    FEW_ENTRIES,
    Json,
    OpenAIBody,
    PenstockOptions,
    parse_in_openai_words,
)
from penstock.gateway.openai.other_fields import HARMLESS_IMAGE, refuse_unsupported
from penstock.schemas.errors import InvalidRequest, UnsupportedParameter
from penstock.schemas.finite_json import loads_finite
from penstock.schemas.records import InferenceRequest

_SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")
ASSUMED_STEPS = 30
"""Of a request that does not say how many."""
_OF_PENSTOCK = ("negative_prompt", "inference_steps", "guidance_scale", "seed", "sampler", "strength")
_NUMBERS = frozenset({"n", "output_compression", "partial_images"})
_FLAGS = frozenset({"stream"})
WORDS = {
    "payload.width": "size",
    "payload.height": "size",
    "output.format": "output_format",
    "output.quality": "output_compression",
    "payload.previews": "partial_images",
    **{f"payload.{name}": f"penstock.{name}" for name in _OF_PENSTOCK},
}


class ImageOptions(PenstockOptions):
    """`extra_body={"penstock": {…}}` of images: the fields of the payload that OpenAI's protocol does not have."""

    negative_prompt: Any = None
    inference_steps: Any = None
    guidance_scale: Any = None
    seed: Any = None
    sampler: Any = None
    strength: Any = Field(None, description="of an edit: how far it may go from the image, above 0 to 1")
    metadata: Any = None


class ImageBody(OpenAIBody):
    """The body of POST /v1/images/generations; of /v1/images/edits the fields beside the files."""

    prompt: str
    penstock: Annotated[ImageOptions | None, FEW_ENTRIES] = None  # pyright: ignore[reportIncompatibleVariableOverride]
    n: int | None = None
    size: Annotated[str | None, Field(description="As 512x512; auto: as the model has it.")] = None
    response_format: Literal["url", "b64_json"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: Annotated[int | None, Field(ge=0, le=100, description="Quality of jpeg and webp.")] = None
    stream: Annotated[bool | None, Field(description="Events, each with an image as b64_json.")] = None
    partial_images: Annotated[
        int | None, Field(ge=0, le=3, description="Of a stream: at most so many small images on the way.")
    ] = None

    @property
    def in_conversation(self) -> bool:
        """Whether it is a turn of a conversation, whose newest image an edit may take."""
        return self.penstock is not None and self.penstock.conversation_id is not None


def image_request(
    body: ImageBody, caller: Caller, now_ms: int, images: Mapping[str, Any] | None = None
) -> InferenceRequest:
    """A request to make images, or with `images` (image, mask) to change one.

    Raises InvalidRequest or UnsupportedParameter with OpenAI's field in `param`; Forbidden for the priority.
    """
    refuse_unsupported(body, HARMLESS_IMAGE)
    if body.stream and body.response_format == "url":
        raise UnsupportedParameter("response_format: a stream carries its images as b64_json", param="response_format")
    if body.partial_images and not body.stream:
        raise InvalidRequest("partial_images are parts of a stream: send stream true with it", param="partial_images")
    payload: Json = {"prompt": body.prompt, "n": body.n, **_sides(body.size), **(images or {})}
    if (own := body.penstock) is not None:
        for name in _OF_PENSTOCK:
            if (value := getattr(own, name)) is not None:
                payload[name] = value
        body = body.model_copy(update={"penstock": own.model_copy(update=dict.fromkeys(_OF_PENSTOCK))})
    if body.stream and body.partial_images:
        payload["previews"] = _steps_between(payload.get("inference_steps"), body.partial_images)
    more: Json = {}
    if body.output_format is not None or body.output_compression is not None:
        more["output"] = {"format": body.output_format, "quality": body.output_compression}
    task = "image_generation" if images is None else "image_editing"
    return parse_in_openai_words(task, body, payload, caller, now_ms, more=more, words=WORDS)


def _steps_between(steps: Any, previews: int) -> int:
    """So that the images on the way lie evenly before the last one; a model that takes fewer steps shows fewer."""
    known = steps if isinstance(steps, int) and steps > 0 else ASSUMED_STEPS
    return -(-known // (previews + 1))


def _sides(size: str | None) -> Json:
    if size is None or size == "auto":
        return {}
    found = _SIZE.fullmatch(size)
    if found is None:
        raise InvalidRequest("size must be auto, or width x height in pixels as 512x512", param="size")
    return {"width": int(found[1]), "height": int(found[2])}


def form_fields(items: Iterable[tuple[str, str]]) -> Json:
    """The fields of a form as JSON has them: numbers as numbers, `penstock[seed]` as a field of an object.

    Raises InvalidRequest for a field that is there twice.
    """
    fields: Json = {}
    own: Json = {}
    for name, text in items:
        holder, key = fields, name
        if name.startswith("penstock[") and name.endswith("]"):
            holder, key = own, name[len("penstock[") : -1]
        if key in holder:
            raise InvalidRequest(f"{name[:100]} is there twice", param=name[:100])
        plain = holder is fields and name not in _NUMBERS and name not in _FLAGS
        holder[key] = text if plain else _scalar(text)
    if own:
        fields["penstock"] = own
    return fields


def _scalar(text: str) -> Any:
    """A number or a flag as what it is; all else stays text."""
    try:
        value = loads_finite(text)
    except ValueError:
        return text
    return value if isinstance(value, bool | int | float) else text


def only_image(count: int, name: str, *, needed: bool) -> None:
    """Raises InvalidRequest without a file that is needed, UnsupportedParameter for several."""
    if count == 0 and needed:
        raise InvalidRequest(f"{name} is missing: send the image as a file", param=name)
    if count > 1:
        raise UnsupportedParameter(f"{name}: one image can be edited at a time", param=name)
