"""The JSON bodies of requests that look at an image, as `bodies` has those for text."""

from __future__ import annotations

from typing import Annotated, Literal, Required

from pydantic import Field
from typing_extensions import TypedDict

from penstock.schemas.bodies import INT, STRICT, RequestFields
from penstock.schemas.image_bodies import ImageInput


class ImageToTextPayload(TypedDict, total=False):
    """The payload of image_to_text."""

    __pydantic_config__ = STRICT  # pyright: ignore[reportGeneralTypeIssues]

    image: Required[ImageInput]
    prompt: Annotated[str | None, Field(description="What to ask of it; null: describe it.")]
    max_tokens: Annotated[int | None, Field(ge=1, le=INT, description="Longest answer, tokens.")]


class ImageToTextRequest(RequestFields, total=False):
    """A request for text from an image. The payload may stand under `payload` or, as in Avro, under the task's name."""

    __pydantic_config__ = STRICT  # pyright: ignore[reportGeneralTypeIssues]

    task: Required[Literal["image_to_text"]]
    payload: ImageToTextPayload | None
    image_to_text: ImageToTextPayload | None
