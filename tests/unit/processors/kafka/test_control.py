"""The control book: bounded, within the horizon, and blind to foreign tenants."""

from __future__ import annotations

from penstock.processors.kafka.control import ControlBook
from penstock.schemas.records import ControlCommand

DAY_MS = 86_400_000


def command(kind: str, request_id: str = "r1", *, tenant: str = "default", at: int = 0, priority: int | None = None):
    return ControlCommand(kind=kind, request_id=request_id, tenant=tenant, created_at=at, priority=priority)


def book(remembered: int = 100) -> ControlBook:
    return ControlBook(horizon_s=86_400, remembered=remembered)


def test_a_cancel_is_remembered_for_its_own_tenant_only() -> None:
    control = book()
    assert control.apply(command("cancel"), now_ms=10)
    assert control.cancelled("default", "r1") is not None
    assert control.cancelled("other", "r1") is None
    assert control.cancelled("default", "r2") is None


def test_the_latest_priority_counts() -> None:
    control = book()
    control.apply(command("reprioritize", priority=1), now_ms=0)
    control.apply(command("reprioritize", priority=9), now_ms=0)
    assert control.priority("default", "r1") == 9


def test_old_and_unknown_commands_are_passed_over() -> None:
    control = book()
    assert not control.apply(command("cancel"), now_ms=DAY_MS + 1)
    assert not control.apply(command("UNKNOWN"), now_ms=0)
    assert len(control) == 0


def test_the_book_is_bounded_and_pruned() -> None:
    control = book(remembered=3)
    for number in range(5):
        control.apply(command("cancel", f"r{number}", at=number), now_ms=number)
    assert [control.cancelled("default", f"r{n}") is not None for n in range(5)] == [False, False, True, True, True]
    control.prune(DAY_MS + 3)
    assert [control.cancelled("default", f"r{n}") is not None for n in range(5)] == [False, False, False, True, True]


def test_erasures_are_kept_until_done() -> None:
    control = book()
    erase = command("erase")
    control.apply(erase, now_ms=0)
    assert control.erasures() == [erase]
    control.erased(erase)
    assert control.erasures() == []
