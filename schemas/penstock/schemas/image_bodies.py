"""The JSON bodies of requests for images, as `bodies` has those for text."""

from __future__ import annotations

from typing import Annotated, Literal, Required

from pydantic import Field
from typing_extensions import TypedDict

from penstock.schemas.bodies import INT, LONG, ImageInput, Name64, RequestFields
from penstock.schemas.limits import LIMITS

MAX_SIDE = 65_536


class ImageGenerationPayload(TypedDict, total=False):
    """The payload of image_generation."""

    prompt: Required[Annotated[str, Field(description="What to draw.")]]
    negative_prompt: Annotated[str | None, Field(description="What not to draw.")]
    width: Annotated[int | None, Field(ge=1, le=MAX_SIDE, description="Pixels; null: as the model has it.")]
    height: Annotated[int | None, Field(ge=1, le=MAX_SIDE, description="Pixels; null: as the model has it.")]
    inference_steps: Annotated[int | None, Field(ge=1, le=1_000, description="Denoising steps.")]
    guidance_scale: Annotated[float | None, Field(ge=0, le=100, description="How strictly it follows the prompt.")]
    seed: Annotated[int | None, Field(ge=-LONG - 1, le=LONG, description="The same seed gives the same image.")]
    sampler: Annotated[Name64 | None, Field(description="euler, euler_a, ddim, dpm++_2m, unipc, lms, pndm, …")]
    n: Annotated[
        int | None, Field(ge=1, le=LIMITS.max_images, description="How many images; the seeds of the others follow.")
    ]
    previews: Annotated[int | None, Field(ge=1, le=INT, description="A small image every so many steps.")]


class ImageEditingPayload(ImageGenerationPayload, total=False):
    """The payload of image_editing: the same, with the image to change."""

    image: Annotated[ImageInput | None, Field(description="Left out in a conversation: its newest image.")]
    mask: Annotated[
        ImageInput | None,
        Field(description="Of the image's size. The image may change where it is transparent, or white without alpha."),
    ]
    strength: Annotated[float | None, Field(gt=0, le=1, description="How far it may go from the image.")]


class ImageGenerationRequest(RequestFields, total=False):
    """A request for an image. The payload may stand under `payload` or, as in Avro, under the task's name."""

    task: Required[Literal["image_generation"]]
    payload: ImageGenerationPayload | None
    image_generation: ImageGenerationPayload | None


class ImageEditingRequest(RequestFields, total=False):
    """A request to change an image. The payload may stand under `payload` or, as in Avro, under the task's name."""

    task: Required[Literal["image_editing"]]
    payload: ImageEditingPayload | None
    image_editing: ImageEditingPayload | None
