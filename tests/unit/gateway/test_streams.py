"""Streams that nobody follows are passed over, and read again from the log when a client comes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.common.reader import RawMessage
from penstock.gateway.service.subscriptions import Subscription, Subscriptions
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.frames import ChunkFrame
from penstock.gateway.view.hub import Hub
from penstock.gateway.view.piece_reader import close_together, fold_of
from penstock.gateway.view.selecting import Fate, Selection, StreamPieces
from penstock.gateway.view.store import Store
from penstock.gateway.view.streams import Wanted
from penstock.gateway.view.view import View
from penstock.schemas.codec import Codec, default_codec
from penstock.schemas.cursor import decode_cursor
from penstock.schemas.errors import BrokerUnavailable, RegistryUnavailable, StreamRestarted
from penstock.schemas.records import ArtifactRef, ControlCommand, InferenceRequest, Origin, ResultEvent, StatusEvent
from penstock.schemas.topics import TopicNames

NAMES = TopicNames()
KEY = ("default", "r")
ORIGIN = Origin(topic="inference.request.medium", partition=0, offset=0, append_time_ms=1_000)
REQUEST = InferenceRequest(
    request_id="r",
    tenant="default",
    task="text_generation",
    text_generation={"prompt": "p"},
    conversation_id="c",
    stream=True,
    created_at=900,
)
PIECE = ResultEvent(
    request_id="r",
    tenant="default",
    kind="chunk",
    origin=ORIGIN,
    attempt=1,
    epoch=1,
    task="text_generation",
    created_at=2_000,
    worker_id="w",
    text="a",
    text_offset=0,
)
DONE = StatusEvent(
    request_id="r",
    tenant="default",
    status="completed",
    done=True,
    rank=100,
    attempt=1,
    epoch=1,
    origin=ORIGIN,
    worker_id="w",
    created_at=2_000,
)


def piece(text: str, at: int, **fields: Any) -> ResultEvent:
    return replace(PIECE, text=text, text_offset=at, **fields)


def outcome(text: str, **fields: Any) -> ResultEvent:
    event = replace(PIECE, kind="terminal", text=None, text_offset=None, status="completed")
    return replace(event, **({"text_generation": {"text": text}} | fields))


class Message:
    """One of librdkafka's, as far as it is looked at."""

    def __init__(self, topic: str, offset: int, value: bytes, key: bytes = b"r", partition: int = 0) -> None:
        self._fields = {"topic": topic, "partition": partition, "offset": offset, "key": key, "value": value}

    def __getattr__(self, name: str) -> Any:
        return lambda: self._fields[name]

    def timestamp(self) -> tuple[int, int]:
        return 1, 5_000 + self._fields["offset"]

    def headers(self) -> None:
        return None


class Gateway:
    """A view, fed through the selection as by the reader's thread; the log is kept to be read again."""

    def __init__(self, path: Path) -> None:
        self.store = Store(path, "cluster")
        self.hub = Hub()
        self.view = View(self.store, self.hub, NAMES, 1, codec=default_codec())
        self.wanted: list[Wanted] = []
        self.view.streams.read = self.wanted.append
        self.select = Selection(NAMES, (), default_codec(), self.view.streams.followed)
        self.subscriptions = Subscriptions(self.view, Any, self.hub, NAMES)  # pyright: ignore[reportArgumentType]
        self.log: list[ResultEvent] = []

    def request(self) -> None:
        value = default_codec().encode(REQUEST)
        self.view.apply([RawMessage(ORIGIN.topic, 0, 0, 1_000, b"r", value)])

    def read(self, *events: ResultEvent) -> list[RawMessage]:
        """What of these was told to the view."""
        messages: list[Any] = []
        for event in events:
            messages.append(Message(NAMES.result, len(self.log), default_codec().encode(event)))
            self.log.append(event)
        told = self.select(messages)
        self.view.apply(told)
        return told

    def fill(self) -> None:
        wanted, self.wanted[:] = list(self.wanted), []
        for one in wanted:
            self.fill_one(one)

    def fill_one(self, one: Wanted, end: int | None = None) -> None:
        if self.view.streams.is_wanted(one):
            self.read_again(one, end)

    def read_again(self, one: Wanted, end: int | None = None) -> None:
        """The pieces up to `end`, whether anybody wants them any more or not."""
        fold = fold_of(one)
        for at in range(one.begin, end or (len(self.log) if one.end is None else one.end)):
            if self.log[at].kind == "chunk":
                fold.apply(self.log[at], at)
        self.view.streams.filled(one, fold)

    def entry(self) -> Entry:
        found = self.view.find(KEY)
        assert found is not None
        return found


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    found = Gateway(tmp_path / "view.sqlite")
    yield found
    found.store.close()


def heard(subscription: Subscription) -> list[Any]:
    """The texts and kinds of all frames that are there."""
    told: list[Any] = []
    while frames := subscription.take_nowait():
        told += [frame.to_json().get("text", frame.type) for frame in frames]
    return told


# -- what is passed over


def test_of_a_stream_that_nobody_follows_the_first_piece_is_told(gateway: Gateway) -> None:
    gateway.request()
    told = gateway.read(piece("a", 0), piece("b", 1), piece("c", 2))
    assert [(one.offset, one.value is None) for one in told] == [(0, False), (2, True)]
    assert [(one.key, one.timestamp_ms) for one in told[1:]] == [(None, 5_002)]
    assert gateway.view.offsets()[NAMES.result, 0] == 3
    told = gateway.read(piece("d", 3), piece("x", 0, attempt=2), piece("y", 1, attempt=2), outcome("xy", attempt=2))
    assert [one.offset for one in told if one.value is not None] == [4, 6]
    assert gateway.entry().status_name == "completed"


def test_a_zombie_s_outcome_is_not_heard_where_pieces_are_passed_over(gateway: Gateway) -> None:
    gateway.request()
    gateway.read(piece("a", 0), piece("x", 0, epoch=2), piece("y", 1, epoch=2))
    gateway.read(piece("b", 1), outcome("ab"))
    assert not gateway.entry().done
    gateway.read(outcome("xyz", epoch=2))
    assert gateway.entry().done


def test_requests_of_two_tenants_with_one_id_are_two(gateway: Gateway) -> None:
    told = gateway.read(piece("a", 0), piece("a", 0, tenant="other"), piece("b", 1), piece("b", 1, tenant="other"))
    assert all(one.value is not None for one in told), "they are told more than needed, and nothing is mixed up"
    assert gateway.view.live_count == 2


def test_the_end_of_a_status_is_told_by_the_outcome_alone(gateway: Gateway) -> None:
    running = replace(DONE, status="running", done=False, rank=40)
    values = [default_codec().encode(event) for event in (running, DONE)]
    messages: list[Any] = [Message(NAMES.status, at, value) for at, value in enumerate(values)]
    assert [one.value for one in gateway.select(messages)] == [values[0], None]
    junk: list[Any] = [Message(NAMES.status, 2, b"junk")]
    assert [one.value for one in gateway.select(junk)] == [b"junk"], "that is for the view to judge"


def test_a_schema_that_is_still_asked_for_is_told() -> None:
    def away(schema_id: int) -> str:
        raise RegistryUnavailable("nobody answers")

    pieces = StreamPieces(Codec(away), set())
    foreign = b"\0\0\0\0\x07" + default_codec().encode(PIECE)[5:]
    assert {pieces.fate(b"r", foreign) for _ in range(3)} == {Fate.TOLD}


def test_streams_that_are_remembered_are_bounded() -> None:
    pieces = StreamPieces(default_codec(), set(), most=2)
    values = {key: default_codec().encode(replace(PIECE, request_id=key)) for key in "abc"}
    assert {pieces.fate(key.encode(), value) for key, value in values.items()} == {Fate.ALONE}
    fates = [pieces.fate(key.encode(), value) for key, value in reversed(values.items())]
    assert fates == [Fate.PASSED_OVER, Fate.PASSED_OVER, Fate.ALONE]


# -- who comes later


def test_who_comes_in_the_middle_is_told_all(gateway: Gateway) -> None:
    gateway.request()
    gateway.read(piece("a", 0), piece("b", 1))
    client = gateway.subscriptions.subscribe(*KEY)
    assert heard(client) == []
    gateway.read(piece("c", 2))
    late = gateway.subscriptions.subscribe(*KEY)
    gateway.fill()
    assert (heard(client), heard(late)) == (["status", "abc"], ["status", "abc"])
    gateway.read(piece("d", 3), outcome("abcde"))
    assert heard(client) == heard(late) == ["d", "e", "result"]


def test_pieces_that_come_while_others_are_read_again_follow_them(gateway: Gateway) -> None:
    gateway.request()
    gateway.read(piece("a", 0), piece("b", 1))
    client = gateway.subscriptions.subscribe(*KEY)
    gateway.read(piece("c", 2))
    gateway.fill_one(gateway.wanted.pop(), end=2)
    assert heard(client) == ["status", "abc"]
    gateway.read(piece("d", 3))
    assert heard(client) == ["d"]


def test_a_cursor_of_another_gateway_is_gone_on_from(gateway: Gateway, tmp_path: Path) -> None:
    other = Gateway(tmp_path / "other.sqlite")
    for one in (gateway, other):
        one.request()
    first = gateway.subscriptions.subscribe(*KEY)
    for one in (gateway, other):
        one.read(piece("a", 0), piece("b", 1))
    frames = first.take_nowait()
    for one in (gateway, other):
        one.read(piece("c", 2))
    assert frames[-1].cursor is not None
    client = other.subscriptions.subscribe(*KEY, decode_cursor(frames[-1].cursor))
    other.fill()
    assert heard(client) == ["status", "c"]
    other.store.close()


def test_a_stream_that_ends_while_it_is_read_again_is_told_by_its_outcome(gateway: Gateway) -> None:
    gateway.request()
    gateway.read(piece("a", 0), piece("b", 1))
    client = gateway.subscriptions.subscribe(*KEY)
    gateway.read(piece("c", 2), outcome("abc"))
    assert heard(client) == ["abc", "result"]
    gateway.fill()
    assert heard(client) == []
    assert gateway.view.streams.followed == {}


def test_who_follows_the_conversation_hears_of_a_stream_that_had_begun(gateway: Gateway) -> None:
    """Its pieces may be read before the request that says whose they are."""
    client = gateway.subscriptions.open()
    gateway.subscriptions.follow_conversation(client, "default", "c")
    gateway.read(piece("a", 0), piece("b", 1))
    gateway.request()
    assert heard(client) == []
    gateway.read(piece("c", 2))
    gateway.fill()
    assert heard(client) == ["status", "abc"]
    gateway.read(piece("d", 3))
    assert heard(client) == ["d"]


def test_what_was_passed_over_before_anybody_came_is_read_once(gateway: Gateway) -> None:
    """The reader's thread had passed a piece over when the view had not yet seen the first: a gap."""
    gateway.request()
    client = gateway.subscriptions.subscribe(*KEY)
    gateway.view.streams.followed.clear()
    messages: list[Any] = []
    for event in (piece("a", 0), piece("b", 1), piece("c", 2)):
        messages.append(Message(NAMES.result, len(gateway.log), default_codec().encode(event)))
        gateway.log.append(event)
    told = gateway.select(messages[:2])
    gateway.view.streams.expect(KEY)
    gateway.view.apply(told)
    gateway.fill_one(gateway.wanted.pop(), end=2)
    assert heard(client) == ["status", "ab"], "also when no later piece shows that one was passed over"
    gateway.view.apply(gateway.select(messages[2:]))
    assert heard(client) == ["c"]
    gateway.read(piece("z", 9))
    gateway.fill()
    assert heard(client) == [], "that is not in the log"
    gateway.read(piece("d", 3), piece("y", 8))
    assert gateway.wanted == [], "and is not looked for again and again"
    assert heard(client) == ["d"]


def test_an_older_attempt_s_text_is_void_when_a_newer_one_was_read_again(gateway: Gateway) -> None:
    gateway.request()
    client = gateway.subscriptions.subscribe(*KEY)
    gateway.read(piece("a", 0), piece("c", 2))
    gateway.read(piece("x", 0, attempt=2), piece("y", 1, attempt=2))
    gateway.fill()
    assert heard(client) == ["status", "a", "restarted", "xy"]


def test_an_outcome_that_refers_to_its_text_is_told_with_it(gateway: Gateway) -> None:
    reference = ArtifactRef(artifact_id="f", uri="file:f", media_type="text/plain", size_bytes=2, sha256="0")
    gateway.request()
    gateway.read(piece("a", 0), piece("b", 1), outcome("", text_generation=None, output_artifact=reference))
    client = gateway.subscriptions.subscribe(*KEY)
    assert heard(client) == []
    gateway.fill()
    assert heard(client) == ["ab", "result"]
    assert gateway.view.streams.followed == {}
    assert not gateway.entry().fold.text, "it is not kept in memory"


def test_a_read_that_was_begun_before_the_outcome_does_not_end_one_that_was_begun_after_it(gateway: Gateway) -> None:
    reference = ArtifactRef(artifact_id="f", uri="file:f", media_type="text/plain", size_bytes=2, sha256="0")
    gateway.request()
    gateway.read(piece("a", 0), piece("b", 1))
    client = gateway.subscriptions.subscribe(*KEY)
    (early,) = gateway.wanted
    gateway.read(piece("c", 2), outcome("", text_generation=None, output_artifact=reference))
    late = gateway.subscriptions.subscribe(*KEY)
    gateway.read_again(early, end=2)
    assert heard(client) == ["result"], "it was told at once; the text is where the result refers to"
    gateway.fill()
    assert heard(late) == ["abc", "result"]


def test_who_waits_for_an_erased_request_hears_its_outcome(gateway: Gateway) -> None:
    gateway.request()
    gateway.read(piece("a", 0), piece("b", 1))
    client = gateway.subscriptions.subscribe(*KEY)
    command = ControlCommand(kind="erase", request_id="r", tenant="default", created_at=1)
    gateway.view.apply([RawMessage(NAMES.control, 0, 0, 1, b"r", default_codec().encode(command))])
    gateway.read(outcome("ab"))
    assert heard(client) == ["ab", "result"]


def test_a_cursor_behind_what_was_read_again_says_where_that_was(gateway: Gateway) -> None:
    """Another gateway waits until it has read as far."""
    gateway.request()
    gateway.read(piece("a", 0), piece("b", 1))
    client = gateway.subscriptions.subscribe(*KEY)
    gateway.fill()
    cursor = client.take_nowait()[-1].cursor
    assert cursor is not None
    assert decode_cursor(cursor).offset == 1


def test_pieces_of_calls_that_were_passed_over_come_with_the_outcome(gateway: Gateway) -> None:
    def call(arguments: str, at: int) -> ResultEvent:
        first = at == 0
        told = {"index": 0, "id": "i" if first else None, "name": "f" if first else None}
        return piece("", 0, tool_call_pieces=[{**told, "arguments": arguments, "offset": at}])

    gateway.request()
    gateway.read(call("{", 0), call("1", 1))
    client = gateway.subscriptions.subscribe(*KEY)
    gateway.fill()
    gateway.read(call("}", 2))
    assert [frame.type for frame in client.take_nowait()] == ["status"], "a piece without a beginning says nothing"


def test_what_nobody_waits_for_any_more_is_not_read(gateway: Gateway) -> None:
    gateway.request()
    gateway.read(piece("a", 0), piece("b", 1))
    client = gateway.subscriptions.subscribe(*KEY)
    (wanted,) = gateway.wanted
    client.close()
    assert not gateway.view.streams.is_wanted(wanted)
    assert gateway.view.streams.followed == {}
    gateway.subscriptions.subscribe(*KEY)
    assert len(gateway.wanted) == 2


def test_who_was_silent_for_two_horizons_is_forgotten_whole(gateway: Gateway) -> None:
    gateway.request()
    gateway.subscriptions.subscribe(*KEY)
    written = threading.Event()
    assert gateway.view.flush(written)
    assert written.wait(10)
    gateway.view.forget(gateway.store.silent_live(1 << 60), 1 << 60)
    assert gateway.view.streams.followed == {}


def test_streams_are_read_together_that_began_together() -> None:
    def wanted(name: str, begin: int) -> Wanted:
        return Wanted(("default", name), None, 0, begin, None)

    old, late, later = wanted("old", 5), wanted("late", 900_000), wanted("later", 910_000)
    assert close_together([old, late, later]) == [later, late]
    assert close_together([old]) == [old]


def test_who_left_while_it_was_read_again_is_told_nothing(gateway: Gateway) -> None:
    gateway.request()
    gateway.read(piece("a", 0), piece("b", 1))
    client = gateway.subscriptions.open()
    gateway.subscriptions.follow(client, *KEY)
    gateway.subscriptions.unfollow(client, *KEY)
    gone = gateway.subscriptions.subscribe(*KEY)
    gone.close()
    gateway.fill()
    assert (heard(client), heard(gone)) == ([], [])
    gateway.subscriptions.follow(client, *KEY)
    gateway.fill()
    assert heard(client) == ["status", "ab"]


# -- what ended before this gateway began


def ended_before(gateway: Gateway, *events: ResultEvent) -> list[Entry]:
    """The request as the file has it, after a restart; and which outcomes are asked for."""
    gateway.request()
    gateway.read(*events)
    written = threading.Event()
    assert gateway.view.flush(written)
    assert written.wait(10)
    asked: list[Entry] = []
    gateway.view = View(gateway.store, gateway.hub, NAMES, 1, codec=default_codec())
    gateway.view.streams.read, gateway.view.streams.load = gateway.wanted.append, asked.append
    gateway.subscriptions = Subscriptions(gateway.view, Any, gateway.hub, NAMES)  # pyright: ignore[reportArgumentType]
    assert gateway.entry().lacks_outcome
    return asked


def give(gateway: Gateway, entry: Entry) -> None:
    """The outcome that was asked for."""
    entry.hold_outcome(gateway.log[entry.terminal_offset], None, 100)
    gateway.view.streams.loaded(entry, entry)


def test_all_who_come_to_an_ended_request_wait_for_one_reading_of_its_outcome(gateway: Gateway) -> None:
    asked = ended_before(gateway, piece("a", 0), outcome("ab"))
    clients = [gateway.subscriptions.subscribe(*KEY), gateway.subscriptions.await_outcome(*KEY)]
    assert (len(asked), [heard(client) for client in clients]) == (1, [[], []])
    give(gateway, asked[0])
    assert [heard(client) for client in clients] == [["ab", "result"], ["result"]]
    assert gateway.wanted == [], "its pieces are not needed"


def test_text_that_an_ended_request_refers_to_is_read_behind_its_outcome(gateway: Gateway) -> None:
    large = ArtifactRef(artifact_id="large", uri="u", media_type="application/json", size_bytes=1, sha256="s")
    asked = ended_before(
        gateway, piece("a", 0), piece("b", 1), outcome("", text_generation=None, output_artifact=large)
    )
    client = gateway.subscriptions.subscribe(*KEY)
    give(gateway, asked[0])
    assert heard(client) == []
    gateway.fill()
    assert heard(client) == ["ab", "result"]


async def test_who_cannot_be_told_an_outcome_hears_why_and_may_come_again(gateway: Gateway) -> None:
    asked = ended_before(gateway, outcome("ab"))
    clients = [gateway.subscriptions.subscribe(*KEY), gateway.subscriptions.await_outcome(*KEY)]
    several = gateway.subscriptions.open()
    gateway.subscriptions.follow(several, *KEY)
    gateway.view.streams.loaded(asked[0], BrokerUnavailable("away"))
    for client in clients:
        with pytest.raises(BrokerUnavailable):
            await client.next_frame()
    frame = await several.next_frame()
    assert frame is not None
    assert (frame.type, frame.to_json()["error"]["code"]) == ("error", "broker_unavailable")
    gateway.subscriptions.follow(several, *KEY)
    give(gateway, asked[1])
    assert heard(several) == ["ab", "result"]


def test_who_waits_for_the_outcome_alone_hears_it_though_it_refers_to_its_text(gateway: Gateway) -> None:
    large = ArtifactRef(artifact_id="large", uri="u", media_type="application/json", size_bytes=1, sha256="s")
    asked = ended_before(gateway, piece("a", 0), outcome("", text_generation=None, output_artifact=large))
    client = gateway.subscriptions.await_outcome(*KEY)
    give(gateway, asked[0])
    gateway.fill()
    assert heard(client) == ["result"]


def test_a_request_that_is_forgotten_while_its_outcome_is_read_may_come_again(gateway: Gateway) -> None:
    ended_before(gateway, outcome("ab"))
    client = gateway.subscriptions.subscribe(*KEY)
    gateway.store.prune(1 << 60)
    gateway.read(outcome("ab"))
    assert heard(client)[-1:] == ["result"]


# -- whose pieces they are


def test_what_ends_is_no_other_tenant_s_stream_of_that_id(gateway: Gateway) -> None:
    gateway.request()
    gateway.read(piece("q", 0, tenant="other"))
    reader = gateway.subscriptions.subscribe(*KEY)
    gateway.read(piece("a", 0), piece("b", 1))
    gateway.read(outcome("q", tenant="other"))
    gateway.read(piece("c", 2), piece("d", 3))
    assert heard(reader)[1:] == ["a", "b", "c", "d"]


def test_a_piece_of_another_record_that_stands_first_is_not_read_again(gateway: Gateway) -> None:
    """Of two records with one id readers follow that which was heard of first."""
    gateway.request()
    other = replace(ORIGIN, topic="inference.request.high")
    gateway.read(replace(PIECE, kind="preview"), piece("X", 0, origin=other), piece("a", 0))
    reader = gateway.subscriptions.subscribe(*KEY)
    gateway.fill()
    assert (gateway.entry().fold.text, heard(reader)[-1:]) == ("a", ["a"])


# -- who counts the pieces


def pieces_of(subscription: Subscription) -> list[tuple[str, int]]:
    """The pieces of the text that was told."""
    frames: list[Any] = []
    while told := subscription.take_nowait():
        frames += told
    return [one for frame in frames if isinstance(frame, ChunkFrame) for one in _told(frame)]


def _told(frame: ChunkFrame) -> list[tuple[str, int]]:
    """Its pieces. Where the tokens have log probabilities, each piece of the text has those of its characters."""
    pieces = [*frame.pieces()]
    for one in pieces:
        if frame.logprobs:
            assert [token["token"] for token in one.logprobs] == [*one.text]
            assert one.logprobs_offset == one.offset
    return [(one.text, one.offset) for one in pieces]


PIECES = [("a", 0), ("bb", 1), ("c", 3), ("ddd", 4)]


def scored(text: str, at: int) -> ResultEvent:
    """A piece whose characters are tokens with log probabilities."""
    tokens = [{"token": letter, "logprob": -1.0, "bytes": None, "top_logprobs": None} for letter in text]
    return piece(text, at, token_logprobs=tokens, first_logprob_index=at)


@pytest.mark.parametrize("before", range(5))
@pytest.mark.parametrize("filled", [True, False])
@pytest.mark.parametrize("piece", [piece, scored])
def test_the_pieces_are_the_same_for_whoever_comes_when(
    gateway: Gateway, before: int, filled: bool, piece: Callable[[str, int], ResultEvent]
) -> None:
    """A client comes after so many pieces; what it lacks is read again before the outcome, or after it."""
    gateway.request()
    gateway.read(*(piece(*one) for one in PIECES[:before]))
    client = gateway.subscriptions.replay(*KEY, resumed=True)
    assert pieces_of(client) == []
    if filled:
        gateway.fill()
    gateway.read(*(piece(*one) for one in PIECES[before:]))
    told = pieces_of(client)
    gateway.read(outcome("abbcddd"))
    gateway.fill()
    assert [*told, *pieces_of(client)] == PIECES
    late = gateway.subscriptions.replay(*KEY, resumed=True)
    gateway.fill()
    assert pieces_of(late) == PIECES
    assert not gateway.entry().fold.text, "it is not kept in memory"


def test_the_pieces_of_what_ended_before_a_restart_are_read_behind_its_outcome(gateway: Gateway) -> None:
    asked = ended_before(gateway, *(piece(*one) for one in PIECES), outcome("abbcddd"))
    client, other = gateway.subscriptions.replay(*KEY, resumed=True), gateway.subscriptions.subscribe(*KEY)
    give(gateway, asked[0])
    gateway.fill()
    assert (pieces_of(client), heard(other)) == (PIECES, ["abbcddd", "result"])


def test_a_text_that_goes_on_in_another_attempt_is_one_line_of_pieces(gateway: Gateway) -> None:
    gateway.request()
    since = {"since_epoch": 1, "since_attempt": 1}
    gateway.read(piece("a", 0), piece("b", 1, attempt=2, **since), outcome("abc", attempt=3, **since))
    client = gateway.subscriptions.replay(*KEY, resumed=True)
    gateway.fill()
    assert pieces_of(client) == [("a", 0), ("b", 1)]


@pytest.mark.parametrize(
    "later",
    [
        [piece("x", 0, attempt=2)],
        [piece("x", 0, attempt=2), outcome("xy", attempt=2)],
        [outcome("xy", attempt=2)],
    ],
)
async def test_who_has_text_that_was_begun_anew_is_not_told_another(gateway: Gateway, later: list[ResultEvent]) -> None:
    gateway.request()
    gateway.read(piece("a", 0), piece("b", 1), *later)
    resumed = gateway.subscriptions.replay(*KEY, resumed=True)
    anew = gateway.subscriptions.replay(*KEY, resumed=False)
    gateway.fill()
    with pytest.raises(StreamRestarted):
        await resumed.next_frame()
    assert pieces_of(anew) == ([("x", 0)] if later[0].kind == "chunk" else [])
