"""Purging in several calls, each with the `last_id` of the one before."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.common.settings import KafkaSettings
from penstock.gateway.dead_letters.index import LetterFilter, LetterIndex
from penstock.gateway.dead_letters.letters import LetterFacts
from penstock.gateway.limits.callers import Caller
from penstock.gateway.service import redriving
from penstock.gateway.service.redriving import Chosen, Redriving
from penstock.gateway.threads import Threads
from penstock.schemas.codec import default_codec
from penstock.schemas.records import DeadLetterAction

CALLER = Caller(tenant="t")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Redriving:
    """Seven letters, of which a call handles two. What is said of them is in the index at once."""
    monkeypatch.setattr(redriving, "MOST", 2)
    monkeypatch.setattr(Redriving, "_trim", lambda *_: None)
    index, codec = LetterIndex(tmp_path / "letters", "topic"), default_codec()
    index.take([LetterFacts(partition=0, offset=n, created_ms=n, reason="x", request_id=f"r{n}") for n in range(7)])

    class Topic:
        end = 7

        async def produce(self, topic: str, value: bytes, **_: Any) -> None:
            index.take([((0, self.end), codec.decode(value, DeadLetterAction))])
            self.end += 1

    letters: Any = SimpleNamespace(index=index, catch_up=lambda *_: None)
    topic: Any = Topic()
    unused: Any = None
    return Redriving(letters, unused, unused, topic, codec, KafkaSettings(), Threads())


async def purged(site: Redriving, *, after: str | None = None, dry_run: bool = False) -> list[list[str]]:
    found: list[list[str]] = []
    while True:
        done = await site.purge(CALLER, Chosen(filter=LetterFilter(), after=after), dry_run=dry_run)
        found.append(list(done.requests))
        if not done.has_more:
            return found
        after = done.last_id


async def test_the_next_call_goes_on_behind_letters_that_are_gone(site: Redriving) -> None:
    """The second call was 400: the letter that `after` names had just been purged."""
    pages = [["0/0", "0/1"], ["0/2", "0/3"], ["0/4", "0/5"], ["0/6"]]
    assert await purged(site, dry_run=True) == pages
    assert await purged(site) == pages


async def test_letters_before_the_first_after_are_kept(site: Redriving) -> None:
    assert await purged(site, after="0/2") == [["0/3", "0/4"], ["0/5", "0/6"]]
    assert await purged(site) == [["0/0", "0/1"], ["0/2"]]
