"""The ledger never grants past a limit, nothing before it was observed, and takes each grant back once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.processors.core.fleet.ledger import DeviceCapacity, IllegalRelease, Ledger, MemoryGrant

DEVICES = (
    DeviceCapacity(device="cuda:0", kind="cuda", total_bytes=1000, reserve_bytes=100),
    DeviceCapacity(device="cuda:1", kind="cuda", total_bytes=700),
    DeviceCapacity(device="cpu", kind="cpu", total_bytes=500),
)
LIMITS = {found.device: found.limit_bytes for found in DEVICES}
NAMES = tuple(LIMITS)
NEEDS = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 1100), min_size=1)
OWNERS = st.sampled_from(("a", "b", "c"))
LONGEST_S = 8.0


class LedgerMachine(RuleBasedStateMachine):
    """Grants, measurements and reservations, against plain sums."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(DEVICES, longest_reservation_s=LONGEST_S)
        self.held: dict[int, tuple[MemoryGrant, dict[str, int], dict[str, int]]] = {}
        self.foreign: dict[str, int | None] = dict.fromkeys(NAMES)
        self.ours: dict[str, int] = dict.fromkeys(NAMES, 0)
        self.now = 0.0

    def reserved(self, device: str) -> int:
        return sum(needs.get(device, 0) for _, needs, _ in self.held.values())

    def taken(self, device: str) -> int:
        over = sum(max(0, used.get(device, 0) - needs.get(device, 0)) for _, needs, used in self.held.values())
        over = max(over, self.ours[device] - self.reserved(device))
        return self.reserved(device) + (self.foreign[device] or 0) + over

    def free(self, device: str, owner: str) -> int:
        if self.foreign[device] is None:
            return 0
        kept = self.ledger.reservation(device, self.now)
        for_others = 0 if kept is None or kept[0] == owner else kept[1]
        return max(0, LIMITS[device] - self.taken(device) - for_others)

    def given_back(self, device: str, less: int) -> None:
        self.ours[device] = max(0, self.ours[device] - max(0, less))

    def one(self, pick: int) -> tuple[MemoryGrant, dict[str, int], dict[str, int]] | None:
        return None if not self.held else list(self.held.values())[pick % len(self.held)]

    @rule(seconds=st.floats(0.1, 20))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(needs=NEEDS, owner=OWNERS)
    def grant(self, needs: dict[str, int], owner: str) -> None:
        fits = all(self.foreign[name] is not None and need <= self.free(name, owner) for name, need in needs.items())
        grant = self.ledger.grant(owner, needs, self.now)
        assert (grant is not None) == fits
        if grant is None:
            return
        assert self.ledger.fits_ever(needs)
        self.held[grant.number] = (grant, dict(needs), {})
        for device, need in needs.items():
            assert need == 0 or self.taken(device) <= LIMITS[device]
            kept = self.ledger.reservation(device, self.now)
            assert kept is None or kept[0] != owner, "what was reserved for it was granted"

    @rule(pick=st.integers(0, 50), device=st.sampled_from(NAMES), need=st.integers(0, 1100))
    def resize(self, pick: int, device: str, need: int) -> None:
        if (one := self.one(pick)) is None:
            return
        grant, needs, _ = one
        before = needs.get(device, 0)
        fits = need <= before or (self.foreign[device] is not None and need - before <= self.free(device, grant.owner))
        assert self.ledger.resize(grant, device, need, self.now) == fits
        if fits:
            needs[device] = need
            self.given_back(device, before - need)

    @rule(pick=st.integers(0, 50))
    def release(self, pick: int) -> None:
        if (one := self.one(pick)) is None:
            return
        del self.held[one[0].number]
        self.ledger.release(one[0])
        for device, need in one[1].items():
            self.given_back(device, need)
        with pytest.raises(IllegalRelease):
            self.ledger.release(one[0])
        with pytest.raises(IllegalRelease):
            self.ledger.resize(one[0], "cpu", 0, self.now)

    @rule(device=st.sampled_from(NAMES), used=st.integers(0, 1200), ours=st.integers(0, 600))
    def observe(self, device: str, used: int, ours: int) -> None:
        self.ledger.observe(device, used, ours)
        self.foreign[device], self.ours[device] = max(0, used - ours), ours

    @rule(pick=st.integers(0, 50), device=st.sampled_from(NAMES), used=st.integers(0, 900))
    def measure(self, pick: int, device: str, used: int) -> None:
        if (one := self.one(pick)) is not None:
            self.ledger.measure(one[0], device, used)
            one[2][device] = used

    @rule(device=st.sampled_from(NAMES), need=st.integers(0, 900), owner=OWNERS, seconds=st.floats(1, 60))
    def reserve(self, device: str, need: int, owner: str, seconds: float) -> None:
        before = self.ledger.reservation(device, self.now)
        kept = self.ledger.reserve(device, need, owner, self.now + seconds, self.now)
        after = self.ledger.reservation(device, self.now)
        assert kept == (after is not None and after[0] == owner)
        if need == 0:
            assert after == (None if before is None or before[0] == owner else before)
        elif before is not None:
            assert (after[0], after[2]) == (before[0], before[2]), "asking again keeps nobody out for longer"

    @invariant()
    def sums(self) -> None:
        assert sorted(grant.number for grant in self.ledger.grants()) == sorted(self.held)
        for device in NAMES:
            assert self.ledger.reserved_bytes(device) == self.reserved(device)
            assert sum(holder.bytes for holder in self.ledger.holders(device)) == self.reserved(device)
            assert self.ledger.foreign_bytes(device) == (self.foreign[device] or 0)
            assert self.ledger.over_bytes(device) == max(0, self.taken(device) - LIMITS[device])
            room = 0 if self.foreign[device] is None else max(0, LIMITS[device] - self.taken(device))
            assert self.ledger.free_bytes(device) == room
            assert self.ledger.observed(device) == (self.foreign[device] is not None)


TestLedger = LedgerMachine.TestCase


@given(needs=st.dictionaries(st.sampled_from(NAMES), st.integers(0, 2000), min_size=1))
def test_what_can_never_fit_names_need_and_capacity(needs: dict[str, int]) -> None:
    ledger = Ledger(DEVICES)
    assert ledger.grant("o", needs, 0.0) is None, "nothing is granted before the devices were observed"
    for device in NAMES:
        ledger.observe(device, 0)
    fits = all(need <= LIMITS[device] for device, need in needs.items())
    assert ledger.fits_ever(needs) == fits
    assert (ledger.grant("o", needs, 0.0) is not None) == fits
    details = ledger.insufficient("it", needs).details
    assert (details["need"] > details["capacity"]) == (not fits)
    assert details["unit"] == "bytes"


@given(
    run_s=st.floats(0.5, 100), gaps=st.lists(st.floats(0.05, 3), min_size=5, max_size=60), size=st.integers(100, 900)
)
def test_one_that_waits_for_much_runs_and_the_small_ones_have_half_of_the_time(
    run_s: float, gaps: list[float], size: int
) -> None:
    """A card of 900 under a steady stream of small runs that fill it; one of `size` comes."""
    ledger = Ledger(DEVICES[:1], longest_reservation_s=LONGEST_S)
    ledger.observe("cuda:0", 0)
    running: list[tuple[float, MemoryGrant]] = []
    now, held_back, turn, passed_s = 0.0, 0.0, 0, 0.0
    while True:
        gap = gaps[turn % len(gaps)]
        now, turn = now + gap, turn + 1
        for end, grant in [one for one in running if one[0] <= now]:
            ledger.release(grant)
            running.remove((end, grant))
        if now > 5 and ledger.grant("large", {"cuda:0": size}, now) is not None:
            break
        if now > 5:
            kept = ledger.reserve("cuda:0", size, "large", now + 1e9, now)
            held_back, passed_s = (held_back + gap, passed_s) if kept else (held_back, passed_s + gap)
            first = held_back <= LONGEST_S + 2 * max(gaps)
            assert first or passed_s >= 0.3 * held_back - 4 * max(gaps), "small ones have their part of the time"
        while (grant := ledger.grant("small", {"cuda:0": 50}, now)) is not None:
            running.append((now + run_s, grant))
        assert now < 5 + 30 * (run_s + LONGEST_S), "the large one waits for ever"


def test_a_grant_grows_once_a_reservation_has_ended_whoever_asked_last() -> None:
    ledger = Ledger(DEVICES, longest_reservation_s=LONGEST_S)
    ledger.observe("cpu", 0)
    grant = ledger.grant("a", {"cpu": 10}, 0.0)
    assert grant is not None
    assert ledger.reserve("cpu", 490, "b", float("inf"), 0.0)
    assert not ledger.resize(grant, "cpu", 50, LONGEST_S - 1)
    assert ledger.resize(grant, "cpu", 50, LONGEST_S)
