"""The tasks: one entry each says where its requests go, what a payload must be, and what an output is.

A new task is an entry here, its payload's type (`bodies`, `image_bodies`) and its normal form (`payloads`,
`image_payloads`), with the records' fields in the Avro schemas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from penstock.schemas.image_payloads import (
    GENERATION_DEFAULTS,
    editing_payload,
    generation_payload,
    image_to_text_payload,
    processing_payload,
)
from penstock.schemas.payloads import (
    EMBEDDING_DEFAULTS,
    TEXT_DEFAULTS,
    Payload,
    embedding_payload,
    items_payload,
    summarization_payload,
    text_payload,
)

NormalForm = Callable[[Payload], Payload]
"""What checks a payload beyond its type, and gives it as the records carry it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSpec:
    """What is particular to a task. Without a `normal_form` it is known, and not built yet."""

    topic: Literal["text", "image", "embedding"]
    """Text topics are chosen by priority; on the other two the scheduler looks at the record's."""
    output: Literal["text", "images", "embeddings", "offsets"]
    normal_form: NormalForm | None = None
    body: str = ""
    """The type of its requests' bodies, as module:Class; nobody loads it before the first body comes."""
    default_fields: frozenset[str] = frozenset()
    """The fields of a payload for which a model may have a default."""
    example: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The smallest payload."""
    needs_model: bool = True
    """Whether a model runs it; else any worker of its pool does it by itself."""
    in_conversation: bool = False
    """Whether a request may name the conversation that it adds to."""
    takes_turn: bool = True
    """Whether what it adds is a turn: turns run one after the other. A summary is none."""


_IMAGE = {"image": {"artifact_id": "x"}}

TASKS: Mapping[str, TaskSpec] = MappingProxyType(
    {
        "text_generation": TaskSpec(
            topic="text",
            output="text",
            normal_form=text_payload,
            body="penstock.schemas.bodies:TextRequest",
            default_fields=TEXT_DEFAULTS,
            example={"prompt": "x"},
            in_conversation=True,
        ),
        "embedding": TaskSpec(
            topic="embedding",
            output="embeddings",
            normal_form=embedding_payload,
            body="penstock.schemas.bodies:EmbeddingRequest",
            default_fields=EMBEDDING_DEFAULTS,
            example={"input": "x"},
        ),
        "image_generation": TaskSpec(
            topic="image",
            output="images",
            normal_form=generation_payload,
            body="penstock.schemas.image_bodies:ImageGenerationRequest",
            default_fields=GENERATION_DEFAULTS,
            example={"prompt": "x"},
            in_conversation=True,
        ),
        "image_editing": TaskSpec(
            topic="image",
            output="images",
            normal_form=editing_payload,
            body="penstock.schemas.image_bodies:ImageEditingRequest",
            default_fields=GENERATION_DEFAULTS | {"strength"},
            example={"prompt": "x", **_IMAGE},
            in_conversation=True,
        ),
        "image_to_text": TaskSpec(
            topic="image",
            output="text",
            normal_form=image_to_text_payload,
            body="penstock.schemas.vision_bodies:ImageToTextRequest",
            default_fields=frozenset({"prompt", "max_tokens"}),
            example=_IMAGE,
            in_conversation=True,
        ),
        "image_processing": TaskSpec(
            topic="image",
            output="images",
            normal_form=processing_payload,
            body="penstock.schemas.vision_bodies:ImageProcessingRequest",
            example={**_IMAGE, "operations": [{"op": "strip_metadata"}]},
        ),
        "summarization": TaskSpec(
            topic="text",
            output="text",
            normal_form=summarization_payload,
            body="penstock.schemas.bodies:SummarizationRequest",
            example={"text": "x"},
            in_conversation=True,
            takes_turn=False,
        ),
        "conversation_items": TaskSpec(
            topic="text",
            output="offsets",
            normal_form=items_payload,
            body="penstock.schemas.bodies:ItemsRequest",
            example={"messages": [{"role": "user", "content": "x"}]},
            needs_model=False,
            in_conversation=True,
        ),
    }
)
"""By name, in the order of the records' payload fields."""

BUILT_TASKS = tuple(name for name, spec in TASKS.items() if spec.normal_form is not None)


def topic_of(task: str) -> str:
    """text, image or embedding; text for a task of a newer release."""
    spec = TASKS.get(task)
    return "text" if spec is None else spec.topic


def needs_model(task: str) -> bool:
    """Whether a model runs it; true for a task of a newer release."""
    spec = TASKS.get(task)
    return spec is None or spec.needs_model


def takes_turn(task: str) -> bool:
    """Whether a request that names a conversation is a turn of it; true for a task of a newer release."""
    spec = TASKS.get(task)
    return spec is None or spec.takes_turn


def default_fields(task: str) -> frozenset[str]:
    """The fields of its payload for which a model may have a default."""
    spec = TASKS.get(task)
    return frozenset() if spec is None else spec.default_fields
