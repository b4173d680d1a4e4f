"""What a tenant keeps: measured now and then, and counted between."""

from __future__ import annotations

import pytest

from penstock.gateway.limits.artifact_bytes import ArtifactBytes


def test_artifacts_are_measured_now_and_then_and_counted_between() -> None:
    now = 0.0
    kept = ArtifactBytes(measured_for_s=60, clock=lambda: now)
    assert kept.known("t") is None
    kept.measured("t", 100)
    with kept.adding("t", 20):
        assert kept.known("t") == 120
    now = 59.0
    assert kept.known("t") == 120
    now = 60.0
    assert kept.known("t") is None
    assert kept.known("u") is None


def test_what_a_measurement_may_have_missed_counts() -> None:
    kept = ArtifactBytes(clock=lambda: 0.0)
    before = kept.adding("t", 1)
    before.__enter__()
    kept.begin("t")
    with kept.adding("t", 20), kept.adding("u", 300):
        pass
    kept.measured("t", 100)
    assert kept.known("t") == 121
    before.__exit__(None, None, None)
    kept.begin("t")
    kept.measured("t", 121)
    assert kept.known("t") == 121


def test_what_was_not_kept_does_not_count() -> None:
    kept = ArtifactBytes(clock=lambda: 0.0)
    kept.measured("t", 100)
    with pytest.raises(OSError, match="full"), kept.adding("t", 20):
        raise OSError("full")
    assert kept.known("t") == 100


async def test_those_who_ask_at_once_share_a_measurement() -> None:
    kept = ArtifactBytes()
    listed: list[int] = []

    async def used() -> int:
        listed.append(1)
        return 7

    assert [await kept.used("t", used), await kept.used("t", used)] == [7, 7]
    assert listed == [1]
