"""The retry policy: what follows a failed run. Pure, tested by a table."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.schemas.errors import EngineFailed, PenstockError

BASE_DELAY_S = 0.1
MAX_DELAY_S = 10.0
STORE_DELAY_S = 0.5
"""Before the store of artifacts is asked again for the first time."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Run it again, here, after `delay_s` seconds."""

    delay_s: float
    spends: bool = True
    """Whether the failed attempt counts against `max_attempts`."""


@dataclass(frozen=True, slots=True)
class Fail:
    """Its caller is told; nobody else can do anything about it."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Its attempts are used up by failures that are ours: an operator should see it."""


RetryDecision = Retry | Fail | DeadLetter


def decide(error: PenstockError, attempt: int, max_attempts: int, now: float, deadline: float | None) -> RetryDecision:
    """What follows attempt `attempt` (from 1). Delays double from 0.1 s; one that would pass the deadline ends it."""
    ours = error.retryable or isinstance(error, EngineFailed)
    if not ours:
        return Fail()
    if attempt >= max_attempts:
        return DeadLetter() if isinstance(error, EngineFailed) else Fail()
    delay_s = min(MAX_DELAY_S, BASE_DELAY_S * 2 ** (attempt - 1))
    if error.retry_after_s is not None:
        delay_s = max(delay_s, min(error.retry_after_s, 60.0))
    if deadline is not None and now + delay_s >= deadline:
        return Fail()
    return Retry(delay_s)


def ask_store_again(refusals: int) -> Retry:
    """What follows when the store of artifacts gave nothing, `refusals` times before this. Nothing ran.

    It is asked until the request's deadline. Delays double from 0.5 s.
    """
    return Retry(min(MAX_DELAY_S, STORE_DELAY_S * 2 ** min(refusals, 10)), spends=False)
