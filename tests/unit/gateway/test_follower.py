"""The follower of the view: how much it folds at once, the reasons it reports, and the ends of its partitions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.common import admin
from penstock.common.reader import RawMessage
from penstock.common.settings import KafkaSettings
from penstock.gateway.threads import Threads
from penstock.gateway.view import ends as ends_module
from penstock.gateway.view.ends import Ends
from penstock.gateway.view.follower import _public_reason
from penstock.gateway.view.pieces import BYTES_AT_ONCE, FOLDED_AT_ONCE, folds
from penstock.gateway.view.progress import Progress
from penstock.gateway.view.store import TP
from penstock.gateway.view.topics_read import MissingTopics
from penstock.schemas.errors import BrokerUnavailable, Forbidden, PenstockError


def size(messages: Sequence[RawMessage]) -> int:
    return sum(len(message.value or b"") for message in messages)


sizes = st.lists(st.sampled_from([None, 0, 1, 5_000, 100_000, BYTES_AT_ONCE, 3 * BYTES_AT_ONCE]), max_size=300)


@given(sizes)
def test_a_batch_is_folded_in_pieces_of_few_records_and_few_bytes(values: list[int | None]) -> None:
    batch = [
        RawMessage("t", 0, offset, 0, None, None if length is None else bytes(length))
        for offset, length in enumerate(values)
    ]
    pieces = list(folds(batch))
    assert [message.offset for piece in pieces for message in piece] == list(range(len(batch)))
    for piece in pieces:
        assert 0 < len(piece) <= FOLDED_AT_ONCE
        assert len(piece) == 1 or size(piece) <= BYTES_AT_ONCE, "a record alone may be larger"
    for piece, after in itertools.pairwise(pieces):
        assert len(piece) == FOLDED_AT_ONCE or size([*piece, after[0]]) > BYTES_AT_ONCE, "no piece is needless"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MissingTopics("missing topics: t; create them"), "missing topics: t; create them"),
        (Forbidden("look up topics: Kafka refuses this client: t"), "the broker refuses this client"),
        (BrokerUnavailable("reach Kafka at kafka.internal:9092: timed out"), "the broker does not answer"),
    ],
)
def test_a_probe_reads_why_the_topics_could_not_be_looked_up(error: PenstockError, reason: str) -> None:
    assert _public_reason(error) == reason


RESULT, REQUEST = ("inference.result", 0), ("inference.request.low", 0)


@pytest.mark.parametrize(
    ("offsets", "now_s", "text"),
    [
        ({}, 100.5, "0 of 1,000 records"),
        ({RESULT: 150}, 100.5, "50 of 1,000 records"),
        ({RESULT: 150}, 110, "50 of 1,000 records, about 3 min left"),
        ({RESULT: 300, REQUEST: 300}, 110, "500 of 1,000 records, about 10 s left"),
        ({RESULT: 9_999, REQUEST: 9_999}, 120, "1,000 of 1,000 records, about 0 s left"),
    ],
)
def test_a_view_that_catches_up_says_how_long_it_will_take(offsets: dict[TP, int], now_s: float, text: str) -> None:
    progress = Progress(begin={RESULT: 100}, goal={RESULT: 300, REQUEST: 800}, began_s=100)
    assert progress.text({RESULT: 100, REQUEST: 0, **offsets}, now_s) == text


def test_nothing_to_read_says_nothing() -> None:
    assert Progress().text({}, 10) == Progress(begin={RESULT: 5}, goal={RESULT: 5}).text({RESULT: 5}, 10) == ""


async def test_ends_that_were_read_beyond_are_not_believed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As its broker died, a gateway said `not_found` of a request that another one had just accepted."""
    now, told = [100.0], {RESULT: 40, REQUEST: 7}
    view: Any = SimpleNamespace(offsets=lambda: {RESULT: 50, REQUEST: 7})
    monkeypatch.setattr(admin, "end_offsets", lambda settings, partitions, timeout_s: dict(told))
    monkeypatch.setattr(ends_module.time, "monotonic", lambda: now[0])
    threads = Threads()
    ends = Ends(KafkaSettings(), view, threads)
    for _ in range(2):
        with pytest.raises(BrokerUnavailable, match=r"inference\.result that this gateway has read beyond"):
            await ends.of_now(2)
        now[0] += ends_module.SHORT_S - 1
        told[RESULT] = 50
        assert await ends.of_now(2) == told, "the broker knows its log again"
        told[RESULT] = 40
    now[0] += 3_600
    with pytest.raises(BrokerUnavailable):
        await ends.of_now(2)  # an hour later it is another time
    now[0] += ends_module.SHORT_S
    assert await ends.of_now(2) == told, "the log has lost its end"
    threads.close()
