"""The ledger never grants past a limit, and takes each grant back once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.processors.core.admission import DeviceCapacity, Grant, IllegalRelease, Ledger

DEVICES = (
    DeviceCapacity(device="cuda:0", kind="cuda", total_bytes=1000, reserve_bytes=100),
    DeviceCapacity(device="cpu", kind="cpu", total_bytes=500),
)
LIMITS = {found.device: found.limit_bytes for found in DEVICES}
NAMES = tuple(LIMITS)


class LedgerMachine(RuleBasedStateMachine):
    """Grants and what is measured, against plain sums."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(DEVICES)
        self.held: list[Grant] = []
        self.foreign: dict[str, int] = dict.fromkeys(NAMES, 0)

    def free(self, device: str) -> int:
        return max(0, LIMITS[device] - sum(g.bytes for g in self.held if g.device == device) - self.foreign[device])

    @rule(need=st.integers(0, 1100), device=st.none() | st.sampled_from(NAMES))
    def grant(self, need: int, device: str | None) -> None:
        room = {name: self.free(name) for name in NAMES if device in (None, name)}
        grant = self.ledger.grant("owner", need, device, 1.0)
        if grant is None:
            assert need > max(room.values())
            return
        assert room[grant.device] == max(room.values()) >= need == grant.bytes
        assert self.ledger.fits_ever(need, device)
        self.held.append(grant)

    @rule(pick=st.integers(0, 50))
    def release(self, pick: int) -> None:
        if self.held:
            grant = self.held.pop(pick % len(self.held))
            self.ledger.release(grant)
            with pytest.raises(IllegalRelease):
                self.ledger.release(grant)

    @rule(device=st.sampled_from(NAMES), used=st.integers(0, 1200), ours=st.integers(0, 600))
    def observe(self, device: str, used: int, ours: int) -> None:
        self.ledger.observe(device, used, by_grants_bytes=ours)
        self.foreign[device] = max(0, used - ours)

    @invariant()
    def sums(self) -> None:
        assert sorted(g.number for g in self.ledger.grants()) == sorted(g.number for g in self.held)
        for device in NAMES:
            reserved = sum(grant.bytes for grant in self.held if grant.device == device)
            assert self.ledger.reserved_bytes(device) == reserved <= LIMITS[device]
            assert self.ledger.free_bytes(device) == self.free(device)


TestLedger = LedgerMachine.TestCase


@given(need=st.integers(0, 2000), device=st.none() | st.sampled_from(NAMES))
def test_what_can_never_fit_names_need_and_capacity(need: int, device: str | None) -> None:
    ledger = Ledger(DEVICES)
    capacity = max(LIMITS[name] for name in NAMES if device in (None, name))
    assert ledger.fits_ever(need, device) == (need <= capacity)
    assert (ledger.grant("o", need, device, 0.0) is not None) == (need <= capacity)
    assert ledger.insufficient("it", need, device).details == {"need": need, "capacity": capacity, "unit": "bytes"}
