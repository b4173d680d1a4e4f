"""Streams that nobody follows are passed over, and read again from the log when a client comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from kit.records import HIGH, KEY, LARGE, NAMES, ORIGIN, REQUESTS, RESULTS, chunk, outcome, request, status
from kit.view_gateway import ViewGateway
from penstock.common.reader import RawMessage
from penstock.gateway.service.subscriptions import Subscription
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.frames import ChunkFrame
from penstock.gateway.view.piece_reader import close_together, fold_of
from penstock.gateway.view.selecting import Fate, Selection, StreamPieces
from penstock.gateway.view.streams import Wanted
from penstock.schemas.codec import Codec, default_codec
from penstock.schemas.cursor import decode_cursor
from penstock.schemas.errors import BrokerUnavailable, RegistryUnavailable, StreamRestarted
from penstock.schemas.records import ResultEvent

AB = (chunk("a", 0), chunk("b", 1))
C, D = chunk("c", 2), chunk("d", 3)
REFERRING = outcome(output_artifact=LARGE)
"""An outcome that refers to its text."""


def message(topic: str, offset: int, value: bytes) -> Any:
    """As librdkafka gives it."""
    fields: dict[str, Any] = {"topic": topic, "partition": 0, "offset": offset, "key": b"r", "value": value}
    fields |= {"headers": None, "timestamp": (1, 5_000 + offset)}
    return SimpleNamespace(**{name: lambda value=value: value for name, value in fields.items()})


class Gateway(ViewGateway):
    """Fed through the selection, as by the reader's thread. The log is kept and can be read again."""

    def __init__(self, path: Path) -> None:
        self.log: list[ResultEvent] = []
        super().__init__(path)

    def start(self, **options: Any) -> None:
        super().start(**options)
        self.wanted: list[Wanted] = []
        self.asked: list[Entry] = []
        self.view.streams.read, self.view.streams.load = self.wanted.append, self.asked.append
        self.select = Selection(NAMES, (), default_codec(), self.view.streams.followed)

    def request(self) -> None:
        self.read(REQUESTS, request(conversation_id="c", stream=True))

    def append(self, *events: ResultEvent) -> list[Any]:
        """Onto the log."""
        begin = len(self.log)
        self.log += events
        return [message(NAMES.result, begin + at, self.codec.encode(event)) for at, event in enumerate(events)]

    def stream(self, *events: ResultEvent) -> list[RawMessage]:
        """Append the events and read them. Returns what the selection gave to the view."""
        selected = self.select(self.append(*events))
        self.view.apply(selected)
        return selected

    def fill(self, end: int | None = None) -> None:
        """Read again what is wanted, up to `end`."""
        wanted, self.wanted[:] = list(self.wanted), []
        for one in wanted:
            if self.view.streams.is_wanted(one):
                self.read_again(one, end)

    def read_again(self, one: Wanted, end: int | None = None) -> None:
        """Whether anybody wants it any more or not."""
        fold = fold_of(one)
        for at in range(one.begin, end or (len(self.log) if one.end is None else one.end)):
            if self.log[at].kind == "chunk":
                fold.apply(self.log[at], at)
        self.view.streams.filled(one, fold)

    def subscribe(self) -> Subscription:
        return self.subscriptions.subscribe(*KEY)

    def give(self, entry: Entry) -> None:
        """The outcome that was asked for."""
        entry.hold_outcome(self.log[entry.terminal_offset], None, 100)
        self.view.streams.loaded(entry, entry)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    with Gateway(tmp_path / "view.sqlite") as made:
        yield made


@pytest.fixture
def live(gateway: Gateway) -> Gateway:
    """With the request."""
    gateway.request()
    return gateway


@pytest.fixture
def running(live: Gateway) -> Gateway:
    """With two pieces, of which the view was given one."""
    live.stream(*AB)
    return live


def heard(subscription: Subscription) -> list[Any]:
    """The texts and types of all frames that are there."""
    texts: list[Any] = []
    while frames := subscription.take_nowait():
        texts += [frame.to_json().get("text", frame.type) for frame in frames]
    return texts


# -- what is passed over


def test_the_view_gets_the_first_piece_of_a_stream_that_nobody_follows(live: Gateway) -> None:
    selected = live.stream(*AB, C)
    assert [(one.offset, one.value is None) for one in selected] == [(0, False), (2, True)]
    assert [(one.key, one.timestamp_ms) for one in selected[1:]] == [(None, 5_002)]
    assert live.view.offsets()[RESULTS] == 3
    selected = live.stream(D, chunk("x", 0, attempt=2), chunk("y", 1, attempt=2), outcome(text="xy", attempt=2))
    assert [one.offset for one in selected if one.value is not None] == [4, 6]
    assert live.entry().status_name == "completed"


def test_the_end_of_a_status_is_passed_over(gateway: Gateway) -> None:
    """The outcome says it. Bytes that do not decode are left to the view."""
    values = [gateway.codec.encode(status(name)) for name in ("running", "completed")] + [b"junk"]
    messages = [message(NAMES.status, at, value) for at, value in enumerate(values)]
    assert [one.value for one in gateway.select(messages[:2])] == [values[0], None]
    assert [one.value for one in gateway.select(messages[2:])] == [b"junk"]


def test_a_piece_with_an_unknown_schema_is_not_passed_over() -> None:
    pieces = StreamPieces(Codec(Mock(side_effect=RegistryUnavailable("no answer"))), set())
    foreign = b"\0\0\0\0\x07" + default_codec().encode(AB[0])[5:]
    assert {pieces.fate(b"r", foreign) for _ in range(3)} == {Fate.DELIVERED}


def test_remembered_streams_are_bounded() -> None:
    pieces = StreamPieces(default_codec(), set(), most=2)
    values = {key: default_codec().encode(chunk(request_id=key)) for key in "abc"}
    assert {pieces.fate(key.encode(), value) for key, value in values.items()} == {Fate.FIRST_OF_UNFOLLOWED_STREAM}
    fates = [pieces.fate(key.encode(), value) for key, value in reversed(values.items())]
    assert fates == [Fate.PASSED_OVER, Fate.PASSED_OVER, Fate.FIRST_OF_UNFOLLOWED_STREAM]


# -- clients that come later


CALLS = [
    chunk("", 0, tool_call_pieces=[{"index": 0, "id": name, "name": name, "arguments": text, "offset": at}])
    for at, (name, text) in enumerate([("f", "{"), (None, "1"), (None, "}")])
]
FILL, LATE = "what is wanted is read again", "another client comes"


@pytest.mark.parametrize(
    ("before", "steps"),
    [
        (AB, [((C,), []), (LATE, []), (FILL, ["status", "abc"]), ((D, outcome(text="abcde")), ["d", "e", "result"])]),
        (AB, [((C, outcome(text="abc")), ["abc", "result"]), (FILL, [])]),
        ((*AB, REFERRING), [(FILL, ["ab", "result"])]),
        # A piece without its beginning is useless: it comes with the outcome.
        (CALLS[:2], [(FILL, ["status"]), (CALLS[2:], [])]),
        # Of two records with one id readers follow the one that was read first.
        ((chunk(kind="preview"), chunk("X", 0, origin=replace(ORIGIN, topic=HIGH[0])), chunk("a", 0)),
         [(FILL, ["status", "a"])]),
    ],
    ids=["in the middle", "it ends meanwhile", "an outcome that refers to its text", "calls",
         "another record's"],
)  # fmt: skip
def test_a_client_that_comes_later_gets_all(live: Gateway, before: Any, steps: Any) -> None:
    live.stream(*before)
    clients = [live.subscribe()]
    for number, (events, told) in enumerate(steps):
        if events is FILL:
            live.fill()
        elif events is LATE:
            clients.append(live.subscribe())
        else:
            live.stream(*events)
        assert [heard(client) for client in clients] == [told] * len(clients), number
    if live.entry().done:
        assert live.view.streams.followed == {}
        assert not live.entry().fold.text, "it is not kept in memory"


def test_a_cursor_behind_pieces_that_were_read_again_says_where_they_were(running: Gateway) -> None:
    """Another gateway waits until it has read as far."""
    client = running.subscribe()
    running.fill()
    cursor = client.take_nowait()[-1].cursor
    assert decode_cursor(cursor).offset == 1


async def test_followers_of_a_conversation_get_a_stream_that_had_begun(gateway: Gateway) -> None:
    client = gateway.subscriptions.open()
    await gateway.subscriptions.follow_conversation(client, "default", "c")
    gateway.stream(*AB)
    gateway.request()
    assert heard(client) == []
    gateway.stream(C)
    gateway.fill()
    assert heard(client) == ["status", "abc"]
    gateway.stream(D)
    assert heard(client) == ["d"]


def test_pieces_that_were_passed_over_before_a_client_came_are_read_once(live: Gateway) -> None:
    client = live.subscribe()
    live.view.streams.followed.clear()
    messages = live.append(*AB, C)
    selected = live.select(messages[:2])
    live.view.streams.expect(KEY)
    live.view.apply(selected)
    live.fill(end=2)
    assert heard(client) == ["status", "ab"], "also when no later piece shows that one was passed over"
    live.view.apply(live.select(messages[2:]))
    assert heard(client) == ["c"]
    live.stream(chunk("z", 9))
    live.fill()
    assert heard(client) == [], "the pieces before it are not in the log"
    live.stream(D, chunk("y", 8))
    assert live.wanted == [], "and are not looked for again and again"
    assert heard(client) == ["d"]


def test_a_read_from_before_the_outcome_does_not_end_one_from_after_it(running: Gateway) -> None:
    client = running.subscribe()
    (early,) = running.wanted
    running.stream(C, REFERRING)
    late = running.subscribe()
    running.read_again(early, end=2)
    assert heard(client) == ["result"], "published at once; the text is where the result refers to"
    running.fill()
    assert heard(late) == ["abc", "result"]


def test_a_stream_that_nobody_wants_any_more_is_not_read(running: Gateway) -> None:
    client = running.subscribe()
    (wanted,) = running.wanted
    client.close()
    assert not running.view.streams.is_wanted(wanted)
    assert running.view.streams.followed == {}
    running.subscribe()
    assert len(running.wanted) == 2
    running.flush()
    running.view.forget(running.store.silent_live(1 << 60), 1 << 60)
    assert running.view.streams.followed == {}


def test_streams_that_began_together_are_read_together() -> None:
    begins = {"old": 5, "late": 900_000, "later": 910_000}
    old, late, later = (Wanted(("default", name), None, 0, begin, None) for name, begin in begins.items())
    assert close_together([old, late, later]) == [later, late]
    assert close_together([old]) == [old]


def test_clients_that_left_while_a_stream_was_read_again_get_nothing(running: Gateway) -> None:
    client = running.subscriptions.open()
    running.subscriptions.follow(client, *KEY)
    running.subscriptions.unfollow(client, *KEY)
    gone = running.subscribe()
    gone.close()
    running.fill()
    assert (heard(client), heard(gone)) == ([], [])
    running.subscriptions.follow(client, *KEY)
    running.fill()
    assert heard(client) == ["status", "ab"]


# -- requests that ended before this gateway started


def ended_before(gateway: Gateway, *events: ResultEvent) -> None:
    """The request as the file has it, after a restart."""
    gateway.request()
    gateway.stream(*events)
    gateway.reopen()
    assert gateway.entry().lacks_outcome


def test_all_readers_of_an_ended_request_wait_for_one_read_of_its_outcome(gateway: Gateway) -> None:
    ended_before(gateway, chunk("a", 0), outcome(text="ab"))
    clients = [gateway.subscribe(), gateway.subscriptions.await_outcome(*KEY)]
    assert (len(gateway.asked), [heard(client) for client in clients]) == (1, [[], []])
    gateway.give(gateway.asked[0])
    assert [heard(client) for client in clients] == [["ab", "result"], ["result"]]
    assert gateway.wanted == [], "its pieces are not needed"


@pytest.mark.parametrize("has_reader", [True, False])
def test_text_that_an_outcome_refers_to_is_read_after_the_outcome(gateway: Gateway, has_reader: bool) -> None:
    ended_before(gateway, *AB, REFERRING)
    waiting, reader = gateway.subscriptions.await_outcome(*KEY), gateway.subscribe() if has_reader else None
    gateway.give(gateway.asked[0])
    assert reader is None or heard(reader) == []
    gateway.fill()
    assert reader is None or heard(reader) == ["ab", "result"]
    assert heard(waiting) == ["result"]


async def test_readers_get_the_error_if_an_outcome_cannot_be_read_and_may_try_again(gateway: Gateway) -> None:
    ended_before(gateway, outcome(text="ab"))
    clients = [gateway.subscribe(), gateway.subscriptions.await_outcome(*KEY)]
    several = gateway.subscriptions.open()
    gateway.subscriptions.follow(several, *KEY)
    gateway.view.streams.loaded(gateway.asked[0], BrokerUnavailable("away"))
    for client in clients:
        with pytest.raises(BrokerUnavailable):
            await client.next_frame()
    frame = await several.next_frame()
    assert (frame.type, frame.to_json()["error"]["code"]) == ("error", "broker_unavailable")
    gateway.subscriptions.follow(several, *KEY)
    gateway.give(gateway.asked[1])
    assert heard(several) == ["ab", "result"]


def test_a_request_that_is_forgotten_while_its_outcome_is_read_may_come_again(gateway: Gateway) -> None:
    ended_before(gateway, outcome(text="ab"))
    client = gateway.subscribe()
    gateway.store.prune(1 << 60)
    gateway.stream(outcome(text="ab"))
    assert heard(client)[-1:] == ["result"]


# -- replays: each piece as the worker published it


def pieces_of(subscription: Subscription) -> list[tuple[str, int]]:
    """Text and offset of each. Where tokens have log probabilities, each piece has those of its characters."""
    pieces: list[tuple[str, int]] = []
    while frames := subscription.take_nowait():
        for frame in frames:
            for one in frame.pieces() if isinstance(frame, ChunkFrame) else ():
                if getattr(frame, "logprobs", None):
                    assert one.logprobs
                    assert [token["token"] for token in one.logprobs] == [*one.text]
                    assert one.logprobs_offset == one.offset
                pieces.append((one.text, one.offset))
    return pieces


PIECES = [("a", 0), ("bb", 1), ("c", 3), ("ddd", 4)]


def scored(text: str, at: int) -> ResultEvent:
    """A piece whose characters are tokens with log probabilities."""
    tokens = [{"token": letter, "logprob": -1.0, "bytes": None, "top_logprobs": None} for letter in text]
    return chunk(text, at, token_logprobs=tokens, first_logprob_index=at)


@pytest.mark.parametrize("before", range(5))
@pytest.mark.parametrize("filled", [True, False])
@pytest.mark.parametrize("piece", [chunk, scored])
def test_a_replay_has_the_same_pieces_whenever_it_begins(
    live: Gateway, before: int, filled: bool, piece: Callable[[str, int], ResultEvent]
) -> None:
    """After `before` pieces; those are read again before the outcome, or after it."""
    live.stream(*(piece(*one) for one in PIECES[:before]))
    client = live.subscriptions.replay(*KEY, resumed=True)
    assert pieces_of(client) == []
    if filled:
        live.fill()
    live.stream(*(piece(*one) for one in PIECES[before:]))
    first = pieces_of(client)
    live.stream(outcome(text="abbcddd"))
    live.fill()
    assert [*first, *pieces_of(client)] == PIECES
    late = live.subscriptions.replay(*KEY, resumed=True)
    live.fill()
    assert pieces_of(late) == PIECES
    assert not live.entry().fold.text, "it is not kept in memory"


def test_a_replay_of_what_ended_before_a_restart_is_read_after_its_outcome(gateway: Gateway) -> None:
    ended_before(gateway, *(chunk(*one) for one in PIECES), outcome(text="abbcddd"))
    client, other = gateway.subscriptions.replay(*KEY, resumed=True), gateway.subscribe()
    gateway.give(gateway.asked[0])
    gateway.fill()
    assert (pieces_of(client), heard(other)) == (PIECES, ["abbcddd", "result"])


SINCE: dict[str, Any] = {"since_epoch": 1, "since_attempt": 1}
REPLAYS: dict[str, tuple[Sequence[ResultEvent], bool, list[tuple[str, int]]]] = {
    "another attempt continues": ([chunk("c", 2, attempt=2, **SINCE), outcome(text="abcd", attempt=3, **SINCE)],
                                  False, [("a", 0), ("b", 1), ("c", 2)]),
    "another attempt restarts": ([chunk("x", 0, attempt=2)], True, [("x", 0)]),
    "it has ended": ([chunk("x", 0, attempt=2), outcome(text="xy", attempt=2)], True, [("x", 0)]),
    "it ended without pieces": ([outcome(text="xy", attempt=2)], True, []),
}  # fmt: skip
"""Events of later attempts; whether a resumed replay is refused; the pieces of a new one."""


@pytest.mark.parametrize("case", REPLAYS)
async def test_a_resumed_replay_is_refused_if_its_text_was_restarted(running: Gateway, case: str) -> None:
    later, refused, pieces = REPLAYS[case]
    running.stream(*later)
    resumed, new = (running.subscriptions.replay(*KEY, resumed=resumed) for resumed in (True, False))
    running.fill()
    assert pieces_of(new) == pieces
    if refused:
        with pytest.raises(StreamRestarted):
            await resumed.next_frame()
    else:
        assert pieces_of(resumed) == pieces
