"""When a request may start and when it expires."""

from __future__ import annotations

from typing import Any

import pytest

from kit.refusals import refused
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.lifetimes import deadline_of, waits_from, with_header
from penstock.schemas.records import InferenceRequest
from penstock.schemas.requests import content_hash, parse_request, request_to_json

NOW_MS = 1_800_000_000_000
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
BODY = {"task": "text_generation", "payload": {"prompt": "x"}}


def made(**fields: Any) -> InferenceRequest:
    return parse_request({**BODY, **fields}, now_ms=NOW_MS)


@pytest.mark.parametrize(
    ("fields", "start_ms", "deadline_ms"),
    [
        ({}, NOW_MS, NOW_MS + HOUR_MS),
        ({"start_after": "2027-01-15T10:00:00+01:00"}, NOW_MS + HOUR_MS, NOW_MS + 2 * HOUR_MS),
        ({"start_after": (NOW_MS + 7) / 1000}, NOW_MS + 7, NOW_MS + 7 + HOUR_MS),
        ({"start_after": f"{NOW_MS // 1000 + 60}"}, NOW_MS + 60_000, NOW_MS + 60_000 + HOUR_MS),
        ({"start_after": NOW_MS // 1000 - 60}, NOW_MS, NOW_MS + HOUR_MS),
        ({"start_after": (NOW_MS + DAY_MS - 1000) // 1000}, NOW_MS + DAY_MS - 1000, NOW_MS + DAY_MS),
        ({"start_after": NOW_MS // 1000 + 60, "ttl_ms": 5_000}, NOW_MS + 60_000, NOW_MS + 5_000),
        ({"start_after": NOW_MS // 1000 + 60, "deadline": NOW_MS // 1000 + 90}, NOW_MS + 60_000, NOW_MS + 90_000),
    ],
)
def test_the_default_time_to_live_counts_from_the_start_and_what_is_named_from_the_append(
    fields: dict[str, Any], start_ms: int, deadline_ms: int
) -> None:
    request = made(**fields)
    assert (waits_from(request, NOW_MS), deadline_of(request, NOW_MS)) == (start_ms, deadline_ms)
    again = parse_request(request_to_json(request), now_ms=NOW_MS)
    assert again.start_after == request.start_after


NO_TIMES = ["soon", "", True, [], {}, -1, 0, (NOW_MS + DAY_MS) // 1000, "2027-01-17T00:00:00Z"]


@pytest.mark.parametrize("value", NO_TIMES)
def test_what_is_no_time_or_lies_beyond_the_horizon_is_refused_by_name_in_a_header_too(value: Any) -> None:
    with refused(InvalidRequest, param="start_after"):
        made(start_after=value)
    for header in (b"\xff", str(value).encode()):
        with pytest.raises(InvalidRequest):
            with_header(made(), [("penstock-not-before", header)], NOW_MS)


def test_a_repeat_with_another_start_is_another_request() -> None:
    first, same, other = (made(start_after=NOW_MS // 1000 + at) for at in (5, 5, 6))
    assert content_hash(first) == content_hash(same) != content_hash(other)
    assert content_hash(made()) == content_hash(made(start_after=None))


@pytest.mark.parametrize(
    ("headers", "start_ms"),
    [
        ([("penstock-not-before", str(NOW_MS + 5).encode())], NOW_MS + 5),
        ([("other", b"1"), ("penstock-not-before", str(NOW_MS // 1000 + 60).encode())], NOW_MS + 60_000),
        ([("penstock-not-before", b"2027-01-15T09:00:00Z")], NOW_MS + HOUR_MS),
        ([("penstock-not-before", None)], None),
        ([], None),
    ],
)
def test_a_header_may_name_it_for_a_record_that_does_not(
    headers: list[tuple[str, bytes | None]], start_ms: int | None
) -> None:
    assert with_header(made(), headers, NOW_MS).start_after == start_ms
    own = made(start_after=NOW_MS // 1000 + 90)
    assert with_header(own, headers, NOW_MS) is own
