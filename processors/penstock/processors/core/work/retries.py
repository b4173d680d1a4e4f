"""The retry policy: what follows a failed attempt. Pure, tested by a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from zlib import crc32

from penstock.schemas.errors import EngineFailed, PenstockError, RetryKind

MOST_DEATHS = 3
"""Engines or workers that may die under one request, also where `max_attempts` is not set: then it is poison."""
LONGEST_RETRY_AFTER_S = 60.0
"""What a server's Retry-After counts at most."""

Backoff = Literal["doubling", "fixed"]


class EngineDied(EngineFailed):
    """The engine's process died under this request, which was on it alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrySettings:
    """`first_s`: the first delay. It doubles up to `longest_s`, or stays as it is."""

    backoff: Backoff = "doubling"
    first_s: float = 0.1
    longest_s: float = 10.0
    max_attempts: int | None = None
    """Attempts that may run; None: as many as fit before the deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tries:
    """What became of a request so far, its newest failure included."""

    request_id: str
    ran: int = 1
    """Attempts that were spent."""
    put_back: int = 1
    """How often in a row it was put back."""
    deaths: int = 0
    """Engines that died under it."""


@dataclass(frozen=True, slots=True)
class Requeue:
    """Put it back without spending an attempt; it may start from `at` on. `reason` is the error's code."""

    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class Retry:
    """Run it again, here, from `at` on. The failed attempt is spent."""

    at: float


@dataclass(frozen=True, slots=True)
class Fail:
    """The request fails at once: running it again cannot help."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Its attempts, or the time for them, are used up by failures that are ours: an operator should see it."""


RetryDecision = Requeue | Retry | Fail | DeadLetter


def decide(
    error: PenstockError, tries: Tries, now: float, deadline: float | None, settings: RetrySettings
) -> RetryDecision:
    """What follows an attempt that ended with `error`. Times are seconds of the flow's clock."""
    if error.retry_kind is RetryKind.FINAL:
        return Fail()
    if error.retry_kind is RetryKind.PUT_BACK:
        at = now + _delay_s(error, tries.put_back, tries.request_id, settings)
        return Requeue(error.code, at if deadline is None else max(now, min(at, deadline)))
    if isinstance(error, EngineDied) and tries.deaths >= most_deaths(settings):
        return DeadLetter()
    if settings.max_attempts is not None and tries.ran >= settings.max_attempts:
        return DeadLetter()
    at = now + _delay_s(error, tries.ran, tries.request_id, settings)
    return Retry(at) if deadline is None or at < deadline else DeadLetter()


def most_deaths(settings: RetrySettings) -> int:
    """How many engines or workers may die under a request before it gets a dead letter."""
    return min(MOST_DEATHS, settings.max_attempts or MOST_DEATHS)


def _delay_s(error: PenstockError, times: int, request_id: str, settings: RetrySettings) -> float:
    """The wait after the `times`-th failure: between half and the whole of the backoff, and at least Retry-After.

    The jitter comes from the request's id: who failed together does not come back together, and a simulated history
    repeats.
    """
    delay_s = settings.first_s
    if settings.backoff == "doubling":
        delay_s *= 2 ** min(times - 1, 30)
    jitter = crc32(f"{request_id}/{times}".encode()) / 2**32
    delay_s = min(delay_s, settings.longest_s) * (1 - jitter / 2)
    asked_s = min(error.retry_after_s or 0.0, LONGEST_RETRY_AFTER_S)
    return max(delay_s, asked_s * (1 + jitter / 5))
