"""Times as callers read and write them: any number that a record can hold, any text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.refusals import refused
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.times import rfc3339, time_ms

LAST_MS = 253_402_300_799_999


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (1_700_000_000_123, "2023-11-14T22:13:20.123Z"),
        (LAST_MS, "9999-12-31T23:59:59.999Z"),
        (LAST_MS + 1, None),
        (1_700_000_000_123_456, None),  # microseconds
        (2**63 - 1, None),
        (0, None),
        (-(2**63), None),
    ],
)
def test_a_time_that_the_calendar_does_not_have_is_unknown(ms: int, text: str | None) -> None:
    assert rfc3339(ms) == text


@given(st.integers(-(2**63), 2**63 - 1) | st.integers(1, LAST_MS))
def test_what_is_written_is_read(ms: int) -> None:
    text = rfc3339(ms)
    assert (text is not None) == (0 < ms <= LAST_MS)
    assert text is None or time_ms(text, "since") == ms


@pytest.mark.parametrize("text", ["1700000000.123", "2023-11-14T22:13:20.123Z", "2023-11-15T00:13:20.123+02:00"])
def test_unix_seconds_and_any_offset_are_read(text: str) -> None:
    assert time_ms(text, "since") == 1_700_000_000_123


@pytest.mark.parametrize(
    "text", ["", "x", "9" * 12, "9" * 400, "1e5", "-1", "2023-11-14", "2023-11-14T22:13:20", "1.2.3"]
)
def test_a_time_that_is_none_is_refused(text: str) -> None:
    with refused(InvalidRequest, param="since"):
        time_ms(text, "since")
