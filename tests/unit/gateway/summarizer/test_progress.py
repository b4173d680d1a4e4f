"""The group of a summarizer: a right that is missing is found at the start, without any conversation."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from penstock.common import admin
from penstock.common.settings import KafkaSettings
from penstock.gateway.summarizer import progress
from penstock.gateway.summarizer.progress import Progress
from penstock.schemas.errors import Forbidden


@pytest.mark.parametrize("is_refused", [False, True])
def test_the_group_is_asked_before_there_is_a_conversation(monkeypatch: pytest.MonkeyPatch, is_refused: bool) -> None:
    groups: list[str] = []

    def describe(wanted: list[str], **_: Any) -> dict[str, Future[None]]:
        groups.extend(wanted)
        answer: Future[None] = Future()
        if is_refused:
            answer.set_exception(KafkaException(KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED)))
        else:
            answer.set_result(None)
        return {groups[-1]: answer}

    client = SimpleNamespace(describe_consumer_groups=describe)
    monkeypatch.setattr(admin, "asked", lambda _, ask, timeout_s: ask(client, timeout_s))
    monkeypatch.setattr(admin, "conversation_topics", lambda _: {})
    monkeypatch.setattr(progress, "make_consumer", lambda *_, **__: None)
    asking = Progress(KafkaSettings(), "summaries")
    if is_refused:
        with pytest.raises(Forbidden, match="needs READ on the group summaries"):
            asking.check()
    else:
        asking.check()
    assert groups == ["summaries"]
