"""The images of a run: those that its payload names, its conversation's newest one, those that its history shows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from penstock.processors.conversations.messages import PICTURE, Shown, as_chat
from penstock.processors.conversations.turns import TurnStart
from penstock.processors.core.work.work import Subject
from penstock.processors.earlier_messages import EarlierMessages
from penstock.processors.images.decoded import DecodedImage
from penstock.processors.images.encoded import EncodedImage
from penstock.schemas.errors import InvalidRequest, NotFound, UnsupportedParameter
from penstock.schemas.image_payloads import image_references
from penstock.schemas.records import ArtifactRef, ConversationMessage, InferenceRequest

HISTORY = "history"
SHOWN_OF_HISTORY = 4
"""How many images of a conversation are shown to a model that reads them, the newest; the others are words."""


class Images(Protocol):
    """Where the images that requests name come from."""

    async def fetch(self, tenant: str, ref: Mapping[str, Any], *, param: str) -> DecodedImage:
        """Raises PenstockError, naming `param`."""
        ...

    async def look(self, tenant: str, ref: Mapping[str, Any], *, param: str) -> EncodedImage:
        """The same, not decoded yet. Raises as `fetch`, for what an image's beginning shows."""
        ...

    async def kept(self, tenant: str, request_id: str, ref: Mapping[str, Any], *, param: str) -> ArtifactRef:
        """The artifact behind a reference; what lies at a URL becomes an input of the request. Raises as `fetch`."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """`images` by their place in the payload, or by `history/…`; `payload`: what it says beyond the request's own.

    `files` in place of images for models that open them themselves.
    """

    images: dict[str, DecodedImage] = field(default_factory=dict[str, DecodedImage])
    files: dict[str, EncodedImage] = field(default_factory=dict[str, EncodedImage])
    shown: Shown = field(default_factory=dict[int, Sequence[ArtifactRef]])
    past: EarlierMessages | None = None
    payload: dict[str, Any] = field(default_factory=dict[str, Any])


class RunImages:
    """Of a lane says `sees` whether its model reads images among messages, `opens` whether it opens them itself."""

    def __init__(
        self, source: Images | None, sees: Callable[[str], bool], opens: Callable[[str], bool] = lambda lane: False
    ) -> None:
        self._source = source
        self._sees = sees
        self._opens = opens

    def close(self) -> None:
        if self._source is not None:
            self._source.close()

    async def of(self, subject: Subject, turn: TurnStart | None) -> Gathered:
        """What a run gets. `turn`: how its conversation stands, of a turn. Raises PenstockError."""
        if self._opens(subject.lane):  # its tasks have no turns
            return Gathered(
                files={place: await self._look(subject, place, ref) for place, ref in _named(subject.request)}
            )
        if turn is None:
            return Gathered(
                images={place: await self._fetch(subject, place, ref) for place, ref in _named(subject.request)}
            )
        request, shown = subject.request, dict(turn.shown)
        images: dict[str, DecodedImage] = {}
        for place, ref in _named(request):
            images[place] = await self._shown(subject, place, ref, shown, turn.shown)
        extra: dict[str, Any] = {}
        if request.payload.get("image") == {}:
            newest = _newest(turn.pictured)
            extra["image"] = {"artifact_id": newest.artifact_id}
            images["image"] = await self._fetch(subject, "image", _reference(newest))
        if request.task != "text_generation":  # such a model reads no history
            return Gathered(images=images, shown=shown, payload=extra)
        return Gathered(images=images, shown=shown, past=await self._past(subject, turn, images))

    async def _shown(
        self,
        subject: Subject,
        place: str,
        ref: Mapping[str, Any],
        shown: dict[int, Sequence[ArtifactRef]],
        standing: Shown,
    ) -> DecodedImage:
        """An image that a turn names. It belongs to the conversation from now on, but for a mask."""
        number = _message_of(place)
        if number is None:
            return await self._fetch(subject, place, ref)
        if number in standing:  # written by an earlier attempt: what lies at a URL may be another image by now
            of_message = [one for one, _ in _named(subject.request) if _message_of(one) == number]
            return await self._fetch(subject, place, _reference(standing[number][of_message.index(place)]))
        kept = await self._images(place).kept(subject.tenant, subject.request_id, ref, param=_as_written(place))
        shown[number] = [*shown.get(number, ()), kept]
        return await self._fetch(subject, place, _reference(kept))

    async def _past(self, subject: Subject, turn: TurnStart, images: dict[str, DecodedImage]) -> EarlierMessages:
        """The history as chat. A model that reads images gets the newest of them among the messages.

        What an assistant made is shown with the words that asked for it: templates show no images of assistants.
        """
        if not turn.pictured or not self._sees(subject.lane):
            return turn.past
        seen = {one.artifact_id: one for message in turn.pictured for one in message.artifacts}
        newest = dict(list(seen.items())[-SHOWN_OF_HISTORY:])
        decoded = await asyncio.gather(*(self._of_history(subject, one) for one in newest.values()))
        pixels = {key: image for key, image in zip(newest, decoded, strict=True) if image is not None}
        images |= {f"{HISTORY}/{key}": image for key, image in pixels.items()}
        return replace(turn.past, messages=_as_shown(turn.pictured, pixels.keys()))

    async def _of_history(self, subject: Subject, one: ArtifactRef) -> DecodedImage | None:
        """None for one that is gone: the conversation goes on without it."""
        try:
            return await self._images("messages").fetch(subject.tenant, _reference(one), param="conversation_id")
        except NotFound:
            return None

    async def _fetch(self, subject: Subject, place: str, ref: Mapping[str, Any]) -> DecodedImage:
        return await self._images(place).fetch(subject.tenant, ref, param=_as_written(place))

    async def _look(self, subject: Subject, place: str, ref: Mapping[str, Any]) -> EncodedImage:
        return await self._images(place).look(subject.tenant, ref, param=_as_written(place))

    def _images(self, place: str) -> Images:
        if self._source is None:
            raise UnsupportedParameter("this worker takes no images", param=_as_written(place))
        return self._source


def _named(request: InferenceRequest) -> list[tuple[str, Mapping[str, Any]]]:
    return list(image_references(request.payload))


def _as_written(place: str) -> str:
    """A place in the payload as callers write it: the parts of a message are its content."""
    return f"payload.{place.replace('.parts[', '.content[')}"


def _message_of(place: str) -> int | None:
    """The number of the message that shows the image at a place of a payload; None for one that no turn shows."""
    if place == "image":
        return 0
    if place.startswith("messages["):
        return int(place[len("messages[") : place.index("]")])
    return None


def _reference(artifact: ArtifactRef) -> dict[str, str]:
    return {"artifact_id": artifact.artifact_id, "sha256": artifact.sha256}


def _newest(history: Sequence[ConversationMessage]) -> ArtifactRef:
    """Of several that one message has, the last. Raises InvalidRequest."""
    for message in reversed(history):
        if message.artifacts:
            return message.artifacts[-1]
    raise InvalidRequest(
        "payload.image is missing, and the conversation has no image yet: draw one first, or bring one along",
        param="payload.image",
    )


def _as_shown(history: Sequence[ConversationMessage], pixels: Set[str]) -> list[dict[str, Any]]:
    """Messages with parts: an image part has its `place` among the run's images."""
    chat: list[dict[str, Any]] = []
    asked: dict[str, Any] | None = None
    for message in history:
        chat.append(as_chat(message))
        if message.role == "user":
            asked = chat[-1]
        for one in message.artifacts:
            if asked is not None and one.artifact_id in pixels:
                words = {"type": "text", "text": str(asked["content"]).replace(PICTURE, "").strip()}
                images = [part for part in asked.get("parts", ()) if part["type"] == "image"]
                asked["parts"] = [*images, {"type": "image", "place": f"{HISTORY}/{one.artifact_id}"}, words]
    return chat
