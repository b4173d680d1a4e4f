"""Which conversations are followed: what is begun anew between two looks is another one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from kit.gateway_readers import fake_readers
from penstock.common.settings import KafkaSettings
from penstock.gateway.summarizer import following
from penstock.gateway.summarizer.desk import Commit, Desk, Key
from penstock.gateway.summarizer.following import Following
from penstock.gateway.summarizer.sources import Place
from penstock.schemas.records import SummarizePolicy
from support import wait_until_async

KEYS = [Key("t", f"c{number}") for number in range(5)]


class Source:
    """Conversations by their ids, without any records. `compared`: how many each look asked about."""

    def __init__(self) -> None:
        self.current = {key: f"first {key.conversation_id}" for key in KEYS}
        self.begun: list[Key] = []
        self.compared: list[int] = []

    def there(self) -> set[Key]:
        return set(self.current)

    def ids(self, keys: Sequence[Key]) -> dict[Key, str]:
        self.compared.append(len(keys))
        return {key: self.current[key] for key in keys if key in self.current}

    def places(self, keys: Sequence[Key]) -> dict[Key, Place]:
        return {key: Place(self.current[key], 0, Commit(key, 0), 0) for key in keys}

    def begin(self, begin: Mapping[Key, int]) -> None:
        self.begun += begin

    failure = None

    def forget(self, key: Key) -> None: ...
    def stop(self) -> None: ...


@pytest.mark.parametrize("at_once", [2, 500])
async def test_a_conversation_that_is_made_again_unseen_is_followed_from_its_beginning(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "COMPARED_AT_ONCE", at_once)
    fake_readers(monkeypatch, following, {})
    source, desk = Source(), Desk(lambda _: SummarizePolicy(every_turns=2), most=8)
    made = Following(KafkaSettings(), cast(Any, None), desk, cast(Any, lambda *_: source), 0.001, lambda: None)
    running = asyncio.create_task(made.run())
    await wait_until_async(lambda: sorted(source.begun) == KEYS)
    source.begun.clear()
    source.current[KEYS[3]] = "second"
    await wait_until_async(lambda: source.begun == [KEYS[3]])
    compared = list(source.compared)
    await wait_until_async(lambda: len(source.compared) > len(compared) + 5)
    assert max(compared) <= at_once, "a look stays cheap, however many are followed"
    assert source.begun == [KEYS[3]]
    running.cancel()
    await asyncio.wait([running])
