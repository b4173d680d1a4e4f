"""Waits of tests: only a deadline that is promised ends one early."""

from __future__ import annotations

import asyncio
import time

import pytest

import support


def test_a_promised_deadline_is_not_extended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "GENEROUS_S", 3600.0)
    with pytest.raises(AssertionError, match="never"):
        support.wait_until(lambda: False, 0.01, "never", promised=True)


def test_any_other_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "GENEROUS_S", 0.2)
    began = time.monotonic()
    with pytest.raises(AssertionError, match="never"):
        support.wait_until(lambda: False, 0.01, "never")
    assert time.monotonic() - began >= 0.2


def test_a_wait_on_an_event_loop_is_extended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "GENEROUS_S", 30.0)
    looks: list[None] = []

    def later() -> bool:
        looks.append(None)
        return len(looks) > 5

    assert asyncio.run(support.wait_until_async(later, 0.001, "never", 0.01))
