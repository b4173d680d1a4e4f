"""Pieces of a stream: when they go out, what a chunk holds, and what the next run continues."""

from __future__ import annotations

from typing import Any

import pytest

from flow_driver import ready
from penstock.processors.core.effects import Chunk
from penstock.processors.core.requests.streams import GATHERED_PIECES, Streams
from penstock.processors.core.work.work import Run, Work

LINGER_S = 0.5


def logprob(token: str) -> dict[str, Any]:
    return {"token": token, "logprob": -0.5, "bytes": list(token.encode())}


class Stream:
    """One run of a request, and the chunks of it."""

    def __init__(self, *, streams: bool = True) -> None:
        work = ready().submit("r", stream=streams)
        assert work is not None
        self.work: Work = work
        self.chunks: list[Chunk] = []
        self.of = Streams(self.chunks.append, LINGER_S)

    @property
    def run(self) -> Run:
        assert self.work.run is not None
        return self.work.run

    def delta(self, text: str, tokens: list[int], now: float, **more: Any) -> None:
        self.of.delta(self.work, self.run, text, tokens, now, **more)

    def texts(self) -> list[tuple[str, list[int], int, int]]:
        """Of each chunk its text, its tokens, and how many tokens and characters were before it."""
        return [(one.text, one.token_ids, one.first_token_index, one.text_offset) for one in self.chunks]


def test_the_first_piece_goes_out_at_once_and_later_ones_after_the_linger_of_the_oldest() -> None:
    stream = Stream()
    stream.delta("a", [1], 0.0)
    assert stream.texts() == [("a", [1], 0, 0)]
    assert stream.of.next_due() is None
    stream.delta("bc", [2], 1.0)
    stream.delta("d", [3, 4], 1.3)
    assert stream.of.next_due() == 1.5
    stream.of.tick(1.49)
    assert len(stream.chunks) == 1
    stream.of.tick(1.5)
    assert stream.texts()[1:] == [("bcd", [2, 3, 4], 1, 1)]
    stream.of.tick(9.0)
    stream.of.flush(stream.work, stream.run)
    assert len(stream.chunks) == 2, "nothing is published twice"
    assert stream.of.next_due() is None
    stream.delta("e", [5], 9.0)
    assert stream.of.next_due() == 9.5


def test_a_token_without_text_waits_for_text() -> None:
    stream = Stream()
    stream.delta("", [1], 2.0)
    assert (stream.chunks, stream.run.first_token_at) == ([], 2.0)
    stream.delta("a", [2], 2.1)
    assert stream.texts() == [("a", [1, 2], 0, 0)]
    assert stream.run.first_token_at == 2.0


def test_what_is_not_streamed_is_kept_alone() -> None:
    stream = Stream(streams=False)
    stream.delta("a", [1], 0.0)
    stream.delta("b", [2], 0.1)
    stream.of.tick(9.0)
    stream.of.remember(stream.work)
    assert (stream.chunks, stream.work.published) == ([], None)
    assert (stream.run.text, stream.run.tokens) == (["a", "b"], [1, 2])


def test_a_call_goes_out_at_once_and_its_next_pieces_become_one() -> None:
    stream = Stream()
    stream.delta("", [1], 0.0, calls=[{"index": 0, "offset": 0, "name": "f", "arguments": "{"}])
    stream.delta("", [2], 0.1, calls=[{"index": 0, "offset": 1, "arguments": "ab"}])
    stream.delta("", [3], 0.2, calls=[{"index": 0, "offset": 3, "arguments": "}"}])
    stream.delta("", [4], 0.3, calls=[{"index": 1, "offset": 0, "name": "g", "arguments": ""}])
    stream.delta("", [5], 0.3, calls=[{"index": 1, "offset": 0, "arguments": "x"}])
    stream.of.tick(0.6)
    assert [one.calls for one in stream.chunks] == [
        [{"index": 0, "offset": 0, "name": "f", "arguments": "{"}],
        [
            {"index": 0, "offset": 1, "arguments": "ab}"},
            {"index": 1, "offset": 0, "name": "g", "arguments": ""},
            {"index": 1, "offset": 0, "arguments": "x"},
        ],
    ]
    assert stream.run.sent_calls == [4, 1]


def test_log_probabilities_go_with_their_tokens_and_say_how_many_were_before() -> None:
    stream = Stream()
    stream.delta("a", [1], 0.0, logprobs=[logprob("a")])
    stream.delta("b", [2], 0.1, logprobs=[logprob("b")])
    stream.delta("c", [3], 0.2, logprobs=[logprob("c")])
    stream.of.tick(0.6)
    stream.delta("d", [4], 1.0)
    stream.of.tick(2.0)
    told = [([one["token"] for one in chunk.logprobs], chunk.first_logprob_index) for chunk in stream.chunks]
    assert told == [(["a"], 0), (["b", "c"], 1), ([], 0)]


def test_while_chunks_are_slow_more_pieces_leave_together() -> None:
    stream = Stream()
    stream.of.slow = True
    stream.delta("a", [0], 0.0)
    stream.delta("b", [1], 0.0)
    stream.of.tick(0.5)
    assert len(stream.chunks) == 1
    assert stream.of.next_due() == 1.0
    for number in range(GATHERED_PIECES - 1):
        stream.delta("c", [number], 0.6)
    stream.of.tick(1.0)
    assert stream.chunks[1].text == "b" + "c" * (GATHERED_PIECES - 1)
    stream.delta("d", [1], 2.0)
    stream.of.slow = False
    stream.of.tick(2.5)
    assert stream.chunks[2].text == "d"


def test_what_gathers_of_a_run_that_is_over_is_not_published() -> None:
    stream = Stream()
    stream.delta("a", [1], 0.0)
    stream.delta("b", [2], 0.1)
    stream.work.run = Run(run_id="the next")
    stream.of.tick(9.0)
    assert len(stream.chunks) == 1
    assert stream.of.next_due() is None


@pytest.mark.parametrize("began", [None, (1, 1)])
def test_the_next_run_continues_what_was_published(began: tuple[int, int] | None) -> None:
    stream = Stream()
    stream.run.since = began
    stream.work.attempt = 3
    call = {"index": 0, "offset": 0, "name": "f", "arguments": "{}"}
    stream.delta("once ", [1], 0.0, logprobs=[logprob("once ")])
    stream.delta("upon", [2], 0.1, logprobs=[logprob("upon")], calls=[call])
    stream.of.remember(stream.work)
    published = stream.work.published
    assert published is not None
    since = began or (stream.work.epoch, 3)
    assert (published.text, published.token_ids, published.since) == ("once upon", (1, 2), since)
    assert (published.model, published.call_chars) == ("m", (2,))
    assert [chunk.text for chunk in stream.chunks] == ["once ", "upon"], "what gathered is published before"
    following = Stream()
    following.of.go_on_from(following.run, published)
    following.delta(" a", [3], 5.0, logprobs=[logprob(" a")], calls=[{**call, "index": 0, "offset": 2}])
    following.of.tick(9.0)
    (chunk,) = following.chunks
    assert following.texts() == [(" a", [3], 2, 9)]
    assert (chunk.since, chunk.first_logprob_index) == (since, 2)
    assert following.run.sent_calls == [4]
    assert published.logprobs is not None
    assert published.logprobs.count == 2, "another run may begin there too"


def test_nothing_is_continued_of_a_run_that_published_nothing() -> None:
    stream = Stream()
    stream.of.remember(stream.work)
    assert stream.work.published is None
