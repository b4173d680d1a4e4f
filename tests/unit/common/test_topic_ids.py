"""Ids of topics, from a broker that may have started a moment ago."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.common import admin
from penstock.common.settings import KafkaSettings
from penstock.common.shards.partitioning import partitions_in_use
from penstock.producers.replay_topics import ReplayTopics
from penstock.schemas.errors import BrokerUnavailable

SETTINGS = KafkaSettings(topic_prefix="p-")


def broker_with(monkeypatch: pytest.MonkeyPatch, *topics: str) -> list[int]:
    """The broker knows these topics. Returns the numbers of topics in each question."""
    asked: list[int] = []

    def descriptions(_: KafkaSettings, names: Sequence[str], timeout_s: float, *, missing_ok: bool) -> dict[str, Any]:
        assert len(set(names)) == len(names), "librdkafka refuses a question with one topic twice"
        asked.append(len(names))
        return {name: SimpleNamespace(topic_id=f"id of {name}") for name in names if name in topics}

    monkeypatch.setattr(admin, "_descriptions", descriptions)
    return asked


def test_topics_that_do_not_exist_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    broker_with(monkeypatch, "p-inference.result", "a")
    assert admin.topic_ids(SETTINGS, ["a", "b"]) == {"a": "id of a"}
    assert (admin.topic_id(SETTINGS, "a"), admin.topic_id(SETTINGS, "b")) == ("id of a", None)


@pytest.mark.parametrize("known", [[], ["a"]])
def test_a_broker_that_does_not_know_all_topics_yet_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, known: list[str]
) -> None:
    broker_with(monkeypatch, *known)
    with pytest.raises(BrokerUnavailable):
        admin.topic_ids(SETTINGS, ["a", "b"])
    with pytest.raises(BrokerUnavailable):
        admin.topic_id(SETTINGS, "b")


@pytest.mark.parametrize("started", [True, False])
def test_a_check_asks_a_broker_without_topics_again_and_not_for_long(
    monkeypatch: pytest.MonkeyPatch, started: bool
) -> None:
    known = {"p-inference.result": 4}
    answers = [{}, {}, known] if started else [dict[str, int]()] * 100
    monkeypatch.setattr(admin, "partition_counts", lambda _: answers.pop(0))
    assert admin.settled_counts(SETTINGS, within_s=60 if started else 0.3) == (known if started else {})


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        (lambda: partitions_in_use(SETTINGS), None),
        (lambda: list(ReplayTopics(SETTINGS, "default", "t*", 1.0).list()), [("p-conversation.trip", 0)]),
    ],
    ids=["whether conversations share a topic", "which conversations a replay has"],
)
def test_it_is_asked_again_about_conversations_too(
    ask: Callable[[], Any], answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: dict[str, int] = {}
    monkeypatch.setattr(admin, "partition_counts", lambda *_, **__: known)
    with pytest.raises(BrokerUnavailable):
        ask()
    known |= dict.fromkeys(("p-inference.result", "p-conversation.trip", "p-conversation.other"), 1)
    assert ask() == answer


def test_the_result_topic_itself_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    broker_with(monkeypatch, "p-inference.result")
    assert admin.topic_id(SETTINGS, "p-inference.result") == "id of p-inference.result"


def test_many_are_asked_for_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"t{number}" for number in range(1_200)]
    asked = broker_with(monkeypatch, "p-inference.result", *names)
    assert len(admin.topic_ids(SETTINGS, names)) == 1_200
    assert asked == [501, 501, 201]
