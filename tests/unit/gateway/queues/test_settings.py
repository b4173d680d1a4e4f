"""`[[queues]]` is checked when a process starts."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from penstock.gateway.queues.settings import QueueSection


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"topic": "a b"}, "a name of a topic"),
        ({"tenant": "No!"}, "tenant"),
        ({"extra": {f"x-{n}": "v" for n in range(65)}}, "more than 64 entries"),
        ({"extra": {"x": "\ud800"}}, "surrogate"),
    ],
)
def test_what_no_request_could_have_is_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        QueueSection(**{"topic": "jobs", **setting})
