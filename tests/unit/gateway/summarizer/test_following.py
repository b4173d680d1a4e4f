"""Which conversations are followed: what is begun anew between two looks is another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from penstock.common.settings import KafkaSettings
from penstock.gateway.summarizer import following
from penstock.gateway.summarizer.desk import Commit, Desk, Key
from penstock.gateway.summarizer.following import Following
from penstock.gateway.summarizer.sources import Place
from penstock.schemas.records import SummarizePolicy

KEYS = [Key("t", f"c{number}") for number in range(5)]


class Source:
    """Conversations by their ids, none of which tells of anything."""

    def __init__(self) -> None:
        self.current = {key: f"first {key.conversation_id}" for key in KEYS}
        self.begun: list[Key] = []
        self.asked = 0

    def there(self) -> set[Key]:
        return set(self.current)

    def ids(self, keys: Sequence[Key]) -> dict[Key, str]:
        self.asked += len(keys)
        return {key: self.current[key] for key in keys if key in self.current}

    def places(self, keys: Sequence[Key]) -> dict[Key, Place]:
        return {key: Place(self.current[key], 0, Commit(key, 0), 0) for key in keys}

    def begin(self, begin: Mapping[Key, int]) -> None:
        self.begun += begin

    def forget(self, key: Key) -> None:
        pass


@pytest.mark.parametrize("at_once", [2, 500])
async def test_one_that_is_begun_anew_unseen_is_followed_from_its_beginning(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was read on behind the end of the former one, and never summed up."""
    monkeypatch.setattr(following, "COMPARED_AT_ONCE", at_once)
    source, desk = Source(), Desk(lambda _: SummarizePolicy(every_turns=2), most=8)
    made = Following(KafkaSettings(), cast(Any, None), desk, cast(Any, None), 1.0, lambda: None)
    made._source = cast(Any, source)
    await made._look()
    assert sorted(source.begun) == KEYS
    source.begun.clear()
    source.current[KEYS[3]] = "second"
    for _ in range(-(-len(KEYS) // at_once) + 1):
        await made._look()
    assert source.begun == [KEYS[3]]
    assert made._topic_ids[KEYS[3]] == "second"
    before = source.asked
    await made._look()
    assert source.asked - before <= at_once, "a look stays cheap, however many are followed"
