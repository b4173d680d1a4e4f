"""The handler of an engine's process: every prompt is answered, whatever happens while it is built."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import Mock

import pytest

from engine_backends import Plain
from penstock.processors.core.fleet.ledger import OutOfMemory
from penstock.processors.engines.base import Prepared, RunSpec
from penstock.processors.engines.process.child import INLINE_CHARS, MessageHandler
from support import wait_until_async

LONG = "a" * (INLINE_CHARS + 1)


class Starved(Plain):
    def prepare(self, spec: RunSpec) -> tuple[Prepared, Any]:
        raise MemoryError


async def answer(handler: MessageHandler, told: list[Any], prompt: str) -> Any:
    handler.handle(("prepare", 7, RunSpec(run_id="r", task="text_generation", model="m", prompt=prompt)))
    await wait_until_async(lambda: told, 5, "an answer")
    return told.pop()


async def test_a_thread_that_the_system_refuses_fails_the_prompt_and_no_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Any] = []
    handler = MessageHandler(Plain("", {}, told.append), told.append)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        name, number, error = await answer(handler, told, LONG)
    assert (name, number, isinstance(error, OutOfMemory)) == ("prepared", 7, True)
    _, _, prepared = await answer(handler, told, LONG)
    assert isinstance(prepared, Prepared)


@pytest.mark.parametrize("prompt", ["short", LONG])
async def test_memory_that_runs_out_over_a_prompt_is_said_to_be_that(prompt: str) -> None:
    told: list[Any] = []
    _, _, error = await answer(MessageHandler(Starved("", {}, told.append), told.append), told, prompt)
    assert isinstance(error, OutOfMemory)
