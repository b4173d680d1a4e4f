"""Batches as the stock OpenAI client uses them, on real workers and gateways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest

from system import NOOP, System

from .conftest import CHAT, Batches, line


def test_a_batch_of_chats(make_system: Callable[..., System]) -> None:
    system = make_system(models=[NOOP])
    system.worker().wait_ready()
    batches = Batches.at(system.gateway().wait_ready())
    batch_id = batches.begin([line(n) for n in range(300)], metadata={"a": "b"})
    ended = batches.wait(batch_id)
    assert (ended.status, ended.request_counts.total, ended.request_counts.completed) == ("completed", 300, 300)
    assert (ended.metadata, ended.errors, ended.error_file_id) == ({"a": "b"}, None, None)
    answers = batches.lines(ended.output_file_id)
    assert sorted(one["custom_id"] for one in answers) == sorted(f"line-{n}" for n in range(300))
