"""Why a generation that was skipped ends running work: somebody else may have begun it in between.

A member can keep its partitions from generation 1 to 3 and never hear of its assignment in generation 2: it joined,
and the next rebalance began before the assignment reached it. Another member that heard of it in time had the
partitions. Kafka tells neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from flow_driver import MEDIUM, World, ready
from penstock.processors.core.commit.commit import Commit, Revocation
from penstock.processors.core.work.work import Work
from penstock.schemas.fold import ResultFold
from penstock.schemas.records import ResultEvent
from penstock.schemas.topics import TP

TP0 = (MEDIUM, 0)


def publish(reader: ResultFold, work: Work, kind: str) -> None:
    """As a worker's outcome or first words stand on the result topic, by the epoch of the work."""
    stream: dict[str, Any] = {"text": "a", "token_ids": [1], "first_token_index": 0, "text_offset": 0}
    reader.apply(
        ResultEvent(
            request_id=work.request_id,
            tenant="default",
            kind=kind,
            origin=work.first_place,
            attempt=work.attempt,
            epoch=work.epoch,
            task="text_generation",
            created_at=0,
            worker_id="w",
            status="completed" if kind == "terminal" else None,
            **(stream if kind == "chunk" else {}),
        )
    )


def run_through_a_skipped_generation() -> tuple[World, ResultFold]:
    """The first worker has it in generations 1 and 3, another one begins it in generation 2 and finishes nothing."""
    first, other, reader = ready(inline=True), ready(inline=True), ResultFold(request_id="r", tenant="default")
    work = first.submit("r", stream=True)
    publish(reader, work, "chunk")
    other.assigned(2, (MEDIUM,))
    again = other.submit("r", stream=True)
    assert again.epoch == 2
    publish(reader, again, "chunk")
    first.assigned(3, (MEDIUM,))
    if "r" not in first.running:
        first.offsets[TP0] = 0  # what is not committed is delivered again
        first.submit("r", stream=True)
    first.finish("r")
    publish(reader, first.ended_works[-1], "terminal")
    assert first.committed() == 1, "the outcome is durable, so its offset is committed"
    return first, reader


def test_the_outcome_of_work_that_begins_anew_is_seen() -> None:
    first, reader = run_through_a_skipped_generation()
    assert first.ended_works[-1].epoch == 3
    assert reader.terminal is not None
    assert first.started == ["r", "r"]


def test_kept_work_would_be_committed_without_an_outcome_that_readers_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same history with a gate that takes a skipped generation for the next one."""
    assign = Commit.assign

    def keep(
        self: Commit, committed: Mapping[TP, tuple[int, str]], generation: int, *, fenced: bool = False
    ) -> Revocation:
        if self.generation >= 0:
            self.generation = generation - 1
        return assign(self, committed, generation, fenced=fenced)

    monkeypatch.setattr(Commit, "assign", keep)
    first, reader = run_through_a_skipped_generation()
    assert first.started == ["r"]
    assert first.ended_works[-1].epoch == 1
    assert reader.terminal is None
