"""Which images a run gets: what it names, what its conversation showed last, what its history shows."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

from kit.records import conversation_message
from kit.refusals import refused
from kit.worker_turns import picture
from penstock.processors.conversations.log import HistoryMark
from penstock.processors.conversations.messages import Shown, as_chat
from penstock.processors.conversations.turns import TurnStart
from penstock.processors.core.work.work import Work
from penstock.processors.earlier_messages import EarlierMessages
from penstock.processors.images.decoded import DecodedImage
from penstock.processors.images.encoded import EncodedImage
from penstock.processors.run_images import SHOWN_OF_HISTORY, Gathered, RunImages
from penstock.schemas.errors import InvalidRequest, NotFound, UnsupportedParameter
from penstock.schemas.records import ArtifactRef, ConversationMessage
from penstock.schemas.requests import parse_request

Json = dict[str, Any]


class Source:
    """Has every artifact but those that are `gone`; what lies at a URL changes with each look."""

    def __init__(self) -> None:
        self.fetched: list[Mapping[str, Any]] = []
        self.looks = 0
        self.gone: set[str] = set()

    async def fetch(self, tenant: str, ref: Mapping[str, Any], *, param: str) -> DecodedImage:
        if ref.get("artifact_id") in self.gone:
            raise NotFound("it is gone", param=param)
        self.fetched.append(ref)
        return DecodedImage(1, 1, "L", hashlib.md5(str(ref).encode()).digest()[:1], "PNG", "0" * 64)

    async def look(self, tenant: str, ref: Mapping[str, Any], *, param: str) -> EncodedImage:
        found = await self.fetch(tenant, ref, param=param)
        return EncodedImage(found.width, found.height, found.mode, b"a file", "PNG", found.source_sha256, 1)

    async def kept(self, tenant: str, request_id: str, ref: Mapping[str, Any], *, param: str) -> ArtifactRef:
        if "url" in ref:
            self.looks += 1
            return picture(f"{ref['url']} at look {self.looks}")
        return picture(ref["artifact_id"])

    def close(self) -> None:
        pass


def message(role: str, content: str, *shown: str) -> ConversationMessage:
    return conversation_message(role, content=content, artifacts=[picture(name) for name in shown])


def turn_after(*history: ConversationMessage, shown: Shown | None = None) -> TurnStart:
    pictured = list(history) if any(one.artifacts for one in history) else []
    chat = [as_chat(one) for one in history]
    return TurnStart(
        answer=None,
        past=EarlierMessages(messages=chat),
        mark=HistoryMark("t", 0, 0),
        pictured=pictured,
        shown=shown or {},
    )


async def gathered(
    source: Source | None, task: str, payload: Json, turn: TurnStart | None, *, sees: bool = False
) -> Gathered:
    conversation = {} if turn is None else {"conversation_id": "c"}
    request = parse_request({"task": task, "payload": payload, **conversation}, now_ms=1)
    work = cast("Work", SimpleNamespace(request_id="r", request=request, tenant="default", lane="m"))
    return await RunImages(source, lambda lane: sees).of(work, turn)


CAT = (message("user", "draw a cat"), message("assistant", "", "cat-1", "cat-2"))


async def test_an_edit_takes_the_newest_image_of_its_conversation() -> None:
    source = Source()
    found = await gathered(source, "image_editing", {"prompt": "make it blue"}, turn_after(*CAT))
    assert source.fetched == [{"artifact_id": "cat-2", "sha256": "cat-2"}]
    assert found.images.keys() == {"image"}
    assert found.payload == {"image": {"artifact_id": "cat-2"}}
    assert (found.shown, found.past) == ({}, None), "the conversation has it already"


async def test_a_later_upload_is_newer_than_what_was_drawn() -> None:
    source = Source()
    await gathered(source, "image_to_text", {}, turn_after(*CAT, message("user", "and this?", "dog")))
    assert source.fetched == [{"artifact_id": "dog", "sha256": "dog"}]


async def test_without_an_image_the_conversation_must_have_one() -> None:
    with refused(InvalidRequest, "the conversation has no image yet", param="payload.image"):
        await gathered(Source(), "image_editing", {"prompt": "p"}, turn_after(message("user", "hello")))


async def test_named_images_belong_to_the_turn_and_masks_do_not() -> None:
    payload = {"prompt": "p", "image": {"url": "https://a/x.png"}, "mask": {"artifact_id": "mask"}}
    source = Source()
    found = await gathered(source, "image_editing", payload, turn_after(*CAT))
    kept = "https://a/x.png at look 1"
    assert source.fetched == [{"artifact_id": kept, "sha256": kept}, {"artifact_id": "mask"}]
    assert found.shown == {0: [picture(kept)]}
    assert found.images.keys() == {"image", "mask"}


async def test_what_an_earlier_attempt_wrote_is_what_is_shown_again() -> None:
    """The URL shows another image by now."""
    payload = {"prompt": "p", "image": {"url": "https://a/x.png"}}
    source, standing = Source(), {0: [picture("as it was")]}
    found = await gathered(source, "image_editing", payload, turn_after(shown=standing))
    assert source.looks == 0
    assert source.fetched == [{"artifact_id": "as it was", "sha256": "as it was"}]
    assert found.shown == standing


def parts(*content: Json) -> Json:
    return {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": [*content]}]}


async def test_images_of_a_chat_are_of_their_message() -> None:
    images = [{"type": "image", "image": {"artifact_id": name}} for name in ("a", "b")]
    payload = parts(images[0], {"type": "text", "text": "or"}, images[1])
    found = await gathered(Source(), "text_generation", payload, turn_after(*CAT))
    assert found.shown == {1: [picture("a"), picture("b")]}
    assert found.images.keys() == {"messages[1].parts[0].image", "messages[1].parts[2].image"}
    source = Source()
    again = turn_after(*CAT, shown={1: [picture("first"), picture("second")]})
    await gathered(source, "text_generation", payload, again)
    assert [ref["artifact_id"] for ref in source.fetched] == ["first", "second"]


HELLO = parts({"type": "text", "text": "what is it?"})


async def test_a_model_that_reads_text_alone_is_told_of_images_in_a_word() -> None:
    source = Source()
    history = [*CAT, message("user", "and this?", "dog")]
    found = await gathered(source, "text_generation", HELLO, turn_after(*history))
    assert source.fetched == []
    assert list(found.past.messages) == [
        {"role": "user", "content": "draw a cat"},
        {"role": "assistant", "content": "[image] [image]"},
        {"role": "user", "content": "[image]\nand this?"},
    ]


async def test_a_model_that_reads_images_is_shown_them_with_the_words_that_brought_or_asked_for_them() -> None:
    source = Source()
    history = [*CAT, message("user", "and this?", "dog")]
    found = await gathered(source, "text_generation", HELLO, turn_after(*history), sees=True)
    assert found.images.keys() == {"history/cat-1", "history/cat-2", "history/dog"}
    shown = [[part.get("place") or part["text"] for part in one.get("parts", ())] for one in found.past.messages]
    assert shown == [["history/cat-1", "history/cat-2", "draw a cat"], [], ["history/dog", "and this?"]]
    assert found.past.messages[1] == {"role": "assistant", "content": "[image] [image]"}


async def test_only_the_newest_are_shown_and_one_that_is_gone_is_left_out() -> None:
    source = Source()
    source.gone = {"5"}
    history = [message("user", f"picture {n}", str(n)) for n in range(6)]
    found = await gathered(source, "text_generation", HELLO, turn_after(*history), sees=True)
    assert found.images.keys() == {f"history/{n}" for n in range(6 - SHOWN_OF_HISTORY, 5)}
    assert [bool(one.get("parts")) for one in found.past.messages] == [False, False, True, True, True, False]


async def test_without_a_conversation_images_are_as_the_payload_names_them() -> None:
    source = Source()
    found = await gathered(source, "image_to_text", {"image": {"url": "https://a/x.png"}}, None)
    assert source.fetched == [{"url": "https://a/x.png"}]
    assert (found.shown, found.payload, found.past) == ({}, {}, None)


async def test_a_worker_that_takes_no_images_names_one_as_its_caller_wrote_it() -> None:
    image: Json = {"image": {"artifact_id": "a"}}
    chat = parts({"type": "image", **image})
    for task, payload, place in (("image_to_text", image, ""), ("text_generation", chat, "messages[1].content[0].")):
        with refused(UnsupportedParameter, param=f"payload.{place}image"):
            await gathered(None, task, payload, None)


async def test_a_model_that_opens_images_itself_gets_files() -> None:
    payload = {
        "image": {"artifact_id": "a"},
        "operations": [{"op": "composite", "image": {"artifact_id": "b"}, "left": 0, "top": 0}],
    }
    request = parse_request({"task": "image_processing", "payload": payload}, now_ms=1)
    work = cast("Work", SimpleNamespace(request=request, tenant="default", lane="m"))
    found = await RunImages(Source(), lambda lane: False, lambda lane: lane == "m").of(work, None)
    assert found.images == {}
    assert {place: file.data for place, file in found.files.items()} == {
        "image": b"a file",
        "operations[0].image": b"a file",
    }
