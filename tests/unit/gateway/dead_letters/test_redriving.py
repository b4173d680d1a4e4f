"""A redrive whose key is revoked while it runs: the letters that are left are not skipped, and the reason is given."""

from __future__ import annotations

from random import Random

import pytest

from penstock.gateway.dead_letters.index import LetterFilter
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.limits.callers import Caller
from penstock.gateway.service import redriving
from penstock.gateway.service.redriving import Chosen
from penstock.schemas.errors import Unauthenticated
from simulation.redrives.world import Gateway, Topics, new_index

LETTERS = 7
OPERATOR = Caller(tenant="ops", key_id="k")


class World:
    """Seven letters, the fourth of which holds no request, and a key that is revoked once some were run again."""

    def __init__(self, holds: int) -> None:
        self.holds = holds
        self.topics = Topics(Random(1), strict=True, away=0.0, fails=0.0)
        for number in range(LETTERS):
            self.topics.add_letter(number, readable=number != 3)
        allowances = Allowances(renew=self.renew)
        self.redriving = Gateway(self.topics, new_index(), allowances).redriving

    def renew(self, caller: Caller) -> Caller:
        if len(self.topics.requests) >= self.holds:
            raise Unauthenticated("this key was revoked")
        return caller


@pytest.mark.parametrize("rate", [None, 10_000.0], ids=["together", "one by one"])
@pytest.mark.parametrize("ids", [True, False], ids=["by ids", "by filter"])
@pytest.mark.parametrize("holds", [1, 2, 4])
async def test_letters_that_a_revoked_key_left_are_not_skipped(
    monkeypatch: pytest.MonkeyPatch, holds: int, ids: bool, rate: float | None
) -> None:
    monkeypatch.setattr(redriving, "AT_ONCE", 2)
    world = World(holds)
    places = [f"{number % 2}/{number // 2}" for number in range(LETTERS)]
    after, run, skipped = None, list[str](), 0

    async def redrive() -> bool:
        nonlocal after, skipped
        chosen = Chosen(ids=places if ids else None, filter=None if ids else LetterFilter(), after=after)
        done = await world.redriving.redrive(OPERATOR, chosen, rate=rate, dry_run=False, again=False)
        run.extend(done.requests.values())
        skipped += len([one for one in done.skipped if one["code"] != "conflict"])
        after = str(done.cursor)
        assert isinstance(done.error, Unauthenticated) == (done.remaining > 0)
        return done.remaining > 0

    assert await redrive()
    assert holds <= len(run) < LETTERS - 1
    with pytest.raises(Unauthenticated):
        await redrive()
    world.holds = 100
    assert not await redrive()
    assert (len({*run}), len(run), skipped) == (LETTERS - 1, LETTERS - 1, 1)
    assert len(world.topics.requests) == LETTERS - 1


async def test_a_redrive_whose_key_is_revoked_before_its_first_letter_is_refused() -> None:
    world = World(0)
    with pytest.raises(Unauthenticated, match="revoked"):
        await world.redriving.redrive(OPERATOR, Chosen(filter=LetterFilter()), rate=None, dry_run=False, again=False)
    assert world.topics.requests == []
