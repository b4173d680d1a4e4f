"""Who runs a batch."""

from __future__ import annotations

from penstock.gateway.batches.keeping import Lease
from penstock.gateway.batches.leases import LEASE_S, Leases

KEY = ("default", "b")


def test_a_batch_that_nobody_ran_is_taken() -> None:
    assert Leases().to_take(KEY, None, 0) == 1


def test_a_lease_that_was_let_go_is_taken_at_once() -> None:
    assert Leases().to_take(KEY, Lease(3, ""), 0) == 4


def test_a_lease_that_changes_is_left_alone_and_one_that_does_not_is_taken() -> None:
    seen = Leases()
    for beat in range(10):
        assert seen.to_take(KEY, Lease(1, f"{beat}"), beat * LEASE_S) is None
    last = 9 * LEASE_S
    assert seen.to_take(KEY, Lease(1, "9"), last + LEASE_S - 0.1) is None
    assert seen.to_take(KEY, Lease(1, "9"), last + LEASE_S) == 2


def test_a_batch_that_is_gone_is_forgotten() -> None:
    seen = Leases()
    assert seen.to_take(KEY, Lease(1, "x"), 0) is None
    seen.keep_only(set())
    assert seen.to_take(KEY, Lease(1, "x"), LEASE_S) is None
