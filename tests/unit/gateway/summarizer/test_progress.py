"""The positions of a summarizer's group: a right that is missing is found at the start, without any conversation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from penstock.common.settings import KafkaSettings
from penstock.gateway.summarizer import progress
from penstock.gateway.summarizer.progress import Progress
from penstock.schemas.errors import Forbidden, PenstockError


@pytest.mark.parametrize(
    ("code", "error"), [(None, None), (KafkaError.GROUP_AUTHORIZATION_FAILED, "needs READ on the group summaries")]
)
def test_the_group_is_asked_for_before_there_is_a_conversation(
    monkeypatch: pytest.MonkeyPatch, code: int | None, error: str | None
) -> None:
    asked: list[str] = []

    def committed(partitions: Any, timeout_s: float) -> list[Any]:
        asked.extend(one.topic for one in partitions)
        if code is not None:
            raise KafkaException(KafkaError(code))
        return []

    monkeypatch.setattr(progress, "make_consumer", lambda *_, **__: SimpleNamespace(committed=committed))
    monkeypatch.setattr(progress.admin, "conversation_topics", lambda _: {})
    found: PenstockError | None = None
    try:
        Progress(KafkaSettings(), "summaries").check()
    except Forbidden as refused:
        found = refused
    assert (found is None) == (error is None)
    assert error is None or error in str(found)
    assert asked == [KafkaSettings().names.conversation_facts]
