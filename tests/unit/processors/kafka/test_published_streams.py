"""What other workers told of streams: what stands before a claim counts, and only if all of it is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kit.records import ORIGIN, chunk
from penstock.common.settings import KafkaSettings
from penstock.processors.core.work.published_prefix import PublishedPrefix
from penstock.processors.core.work.work import Subject
from penstock.processors.kafka.published_streams import Beginning, PublishedStreams, StreamSoFar
from penstock.schemas.codec import default_codec
from penstock.schemas.records import ResultEvent
from penstock.schemas.topics import TP
from support import wait_until_async

FIRST = chunk("ab", request_id="a", token_ids=[1, 2], first_token_index=0)
MORE = replace(FIRST, text="c", text_offset=2, token_ids=[3], first_token_index=2)


def subject(request_id: str = "a", epoch: int = 2) -> Subject:
    key = ("t", 0, 0)
    return Subject(key, 1, request_id, "default", "text_generation", "m", None, 1, epoch, ORIGIN, None)


def claim(epoch: int = 2) -> ResultEvent:
    nothing: dict[str, Any] = dict.fromkeys(("text", "text_offset", "token_ids", "first_token_index"))
    return replace(FIRST, epoch=epoch, worker_id="other", **nothing)


def told(*events: ResultEvent) -> PublishedPrefix | None:
    stream = StreamSoFar(subject())
    for event in events:
        stream.apply(event)
    return stream.published


def test_all_that_stands_before_the_claim_is_told() -> None:
    assert told(FIRST, MORE, claim()) == PublishedPrefix("m", "abc", (1, 2, 3), (), (1, 1))
    zombie = replace(FIRST, text="x", text_offset=3, token_ids=[9], first_token_index=3)
    assert told(FIRST, MORE, claim(), zombie) == told(FIRST, MORE, claim())


def without_tokens(event: ResultEvent) -> ResultEvent:
    return replace(event, token_ids=[], first_token_index=0)


def test_a_remote_model_tells_text_without_tokens() -> None:
    first, more = without_tokens(FIRST), without_tokens(MORE)
    assert told(first, more, claim()) == PublishedPrefix("m", "abc", (), (), (1, 1))
    stream = StreamSoFar(subject())
    stream.apply(more)
    assert stream.is_cut, "it is not looked for in what stands before"
    assert told(more, claim()) is None


@pytest.mark.parametrize(
    "events",
    [
        (),
        (claim(),),
        (MORE, claim()),
        (FIRST, replace(MORE, first_token_index=3), claim()),
        (FIRST, claim(epoch=1)),
        (FIRST, replace(FIRST, kind="terminal", status="completed", text_offset=None), claim()),
    ],
    ids=["nothing", "no text", "its beginning is missing", "tokens are missing", "the claim is not there", "it ended"],
)
def test_what_is_not_whole_is_begun_anew(events: tuple[ResultEvent, ...]) -> None:
    assert told(*events) is None


class Fake(PublishedStreams):
    """Its topic holds a chunk and the claims of two streams."""

    def __init__(self) -> None:
        self.looks = 0
        self.unanswered: list[Callable[[], None]] = []
        """Claims that the broker does not have yet."""

        def publish(subject: Subject, stands: Callable[[], None]) -> None:
            self.unanswered.append(stands)

        super().__init__(KafkaSettings(), default_codec(), publish, look_back_s=1)

    def _look(self) -> dict[bytes, Beginning]:
        self.looks += 1
        return dict.fromkeys((b"a", b"b"), (("r", 0), 1))

    def _apply(self, streams: dict[bytes, StreamSoFar], begins: dict[TP, int]) -> None:
        for key, stream in streams.items():
            for event in (FIRST, claim()):
                stream.apply(replace(event, request_id=key.decode()))


async def test_the_next_assignment_takes_nothing_from_streams_that_are_claimed() -> None:
    streams = Fake()
    claimed = [asyncio.create_task(streams.of(subject(name))) for name in ("a", "b")]
    await wait_until_async(lambda: len(streams.unanswered) == 2)
    assert await streams.of(subject("c", epoch=3)) is None
    for stands in streams.unanswered:
        stands()
    for one in await asyncio.gather(*claimed):
        assert one.text == "ab"
    assert await streams.of(subject("d", epoch=2)) is None
    assert streams.looks == 2, "an older assignment does not look again"
