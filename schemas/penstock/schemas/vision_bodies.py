"""The JSON bodies of image_processing and image_to_text, as `bodies` has those for text."""

from __future__ import annotations

from typing import Annotated, Literal, Required

from pydantic import Field
from typing_extensions import TypedDict

from penstock.schemas.bodies import ListOf, RequestFields
from penstock.schemas.image_bodies import ImageInput
from penstock.schemas.image_operations import MAX_SIDE
from penstock.schemas.limits import LIMITS


class ImageOperation(TypedDict, total=False):
    """One step of image_processing. Its arguments are fields, or texts under `arguments` as in Avro.

    Which of them an operation takes is said by `penstock.schemas.image_operations`.
    """

    op: Required[
        Literal[
            "resize", "crop", "rotate", "flip", "convert", "thumbnail", "composite", "strip_metadata", "upscale"
        ]
    ]  # fmt: skip
    arguments: Annotated[dict[str, str] | None, Field(description="The arguments as texts.")]
    width: Annotated[int | None, Field(ge=1, le=MAX_SIDE, description="Pixels.")]
    height: Annotated[int | None, Field(ge=1, le=MAX_SIDE, description="Pixels.")]
    fit: Annotated[Literal["exact", "contain", "cover"] | None, Field(description="Of resize.")]
    left: Annotated[int | None, Field(ge=-MAX_SIDE, le=MAX_SIDE, description="Of crop and composite, pixels.")]
    top: Annotated[int | None, Field(ge=-MAX_SIDE, le=MAX_SIDE, description="Of crop and composite, pixels.")]
    degrees: Annotated[float | None, Field(ge=-360, le=360, description="Of rotate, clockwise.")]
    expand: Annotated[bool | None, Field(description="Of rotate: the image grows so that nothing is cut off.")]
    axis: Annotated[Literal["horizontal", "vertical"] | None, Field(description="Of flip.")]
    format: Annotated[Literal["png", "jpeg", "jpg", "webp"] | None, Field(description="Of convert.")]
    quality: Annotated[int | None, Field(ge=1, le=100, description="Of convert to jpeg or webp.")]
    image: Annotated[ImageInput | None, Field(description="Of composite: what is put onto the image.")]
    opacity: Annotated[float | None, Field(ge=0, le=1, description="Of composite.")]
    factor: Annotated[Literal[2, 4] | None, Field(description="Of upscale: how many times larger.")]


class ImageProcessingPayload(TypedDict):
    """The payload of image_processing: steps applied in order."""

    image: ImageInput
    operations: Annotated[ListOf[ImageOperation], Field(min_length=1, description="At most 32.")]


class ImageToTextPayload(TypedDict, total=False):
    """The payload of image_to_text."""

    image: Annotated[ImageInput | None, Field(description="Left out in a conversation: its newest image.")]
    prompt: Annotated[str | None, Field(description="What to ask about the image; null: its description.")]
    max_tokens: Annotated[int | None, Field(ge=1, le=LIMITS.max_tokens, description="Longest answer, tokens.")]


class ImageProcessingRequest(RequestFields, total=False):
    """A request to process an image. Its payload may stand under `payload` or, as in Avro, under the task's name."""

    task: Required[Literal["image_processing"]]
    payload: ImageProcessingPayload | None
    image_processing: ImageProcessingPayload | None


class ImageToTextRequest(RequestFields, total=False):
    """A request about an image. Its payload may stand under `payload` or, as in Avro, under the task's name."""

    task: Required[Literal["image_to_text"]]
    payload: ImageToTextPayload | None
    image_to_text: ImageToTextPayload | None
