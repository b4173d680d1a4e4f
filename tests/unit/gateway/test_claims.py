"""Claims of Idempotency-Keys: the first counts, for its time, and what is kept is bounded."""

from __future__ import annotations

from penstock.gateway.view.claims import CLAIM_MS, Claims
from penstock.schemas.records import KeyClaim

KEY = ("t", "r")


def claim(content: str, request_id: str = "r") -> KeyClaim:
    return KeyClaim(request_id=request_id, tenant="t", content=content, created_at=1)


def test_the_first_claim_counts_for_an_hour() -> None:
    claims = Claims()
    assert claims.content(KEY) is None
    claims.take(claim("a"), 10)
    claims.take(claim("b"), 11)
    claims.take(claim("b"), 10 + CLAIM_MS - 1)
    assert claims.content(KEY) == "a"
    claims.take(claim("c"), 10 + CLAIM_MS)
    claims.take(claim("b"), 11 + CLAIM_MS)
    assert claims.content(KEY) == "c", "its age is that of the first in the log"


def test_a_claim_is_forgotten_with_its_request_its_age_and_for_want_of_room() -> None:
    claims = Claims(most=2)
    claims.take(claim("a"), 1)
    claims.settle(KEY)
    claims.settle(KEY)
    assert claims.content(KEY) is None
    for number in range(3):
        claims.take(claim("a", f"{number}"), 1)
    assert [claims.content(("t", f"{number}")) for number in range(3)] == [None, "a", "a"]
    claims.take(claim("a"), 2 * CLAIM_MS + 1)
    assert claims.content(("t", "2")) is None
    assert claims.content(KEY) == "a"
