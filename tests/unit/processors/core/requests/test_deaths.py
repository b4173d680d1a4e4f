"""Requests under which workers died: they are known by their first record, wherever they stand now."""

from __future__ import annotations

from typing import Any

from flow_driver import World
from penstock.processors.core import effects as ask
from penstock.schemas.records import Origin

FIRST = ("medium", 1, 7)
PLACE = Origin(topic="medium", partition=1, offset=7, append_time_ms=1)


class Journaled(World):
    """What earlier workers left in the crash journal is given by hand."""

    def __init__(self, deaths: int) -> None:
        self._deaths = deaths
        super().__init__()

    def deaths(self, key: Any, request_id: str) -> int:
        return self._deaths if (key, request_id) == (FIRST, "r") else 0


def test_each_copy_of_a_moved_request_has_the_deaths_of_its_first_record() -> None:
    """A worker that dies before it commits moves the record again in its next life (seed 57085)."""
    world = Journaled(deaths=3)
    world.up(inline=True)
    world.submit("r", origin=PLACE)
    world.submit("another", origin=PLACE)
    world.submit("r", origin=PLACE)
    assert world.ended == [("r", "dead_lettered"), ("r", "dead_lettered")]
    assert world.started == ["another"]


def test_the_journal_hears_of_a_copy_under_its_first_record() -> None:
    world = Journaled(deaths=1)
    world.up(inline=True)
    world.submit("r", origin=PLACE)
    world.finish("r")
    told = [effect for effect in world.seen if isinstance(effect, ask.RunEnded | ask.ForgetDeaths)]
    assert told == [ask.RunEnded(FIRST, "r"), ask.ForgetDeaths(FIRST, "r")]
    (start,) = world.effects(ask.Start)
    assert start.subject.first_key == FIRST
