"""What becomes of a webhook after an attempt. Pure."""

from __future__ import annotations

from dataclasses import dataclass

DELIVERED, WAITING, FAILED, DROPPED = "delivered", "waiting", "failed", "dropped"
MAX_WAIT_S = 3_600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a receiver answered, or why it did not."""

    status_code: int | None = None
    error: str | None = None
    retry_after_s: float | None = None
    final: bool = False
    """No later attempt can end otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryRules:
    first_retry_s: float
    give_up_s: float


def decide(
    answer: Answer, attempts: int, now_ms: int, created_ms: int, rules: RetryRules, chance: float
) -> tuple[str, int | None]:
    """The new state, and when to try again.

    `attempts` is how many there were, this one included; `chance`, from 0 to 1, is the part of the jitter.
    """
    code = answer.status_code
    if code is not None and 200 <= code < 300:
        return DELIVERED, None
    if code == 410 or answer.final:
        return FAILED, None
    wait_s = min(MAX_WAIT_S, rules.first_retry_s * 2 ** min(attempts - 1, 30)) * (1 - chance / 2)
    left_s, asked_s = rules.give_up_s - (now_ms - created_ms) / 1000, answer.retry_after_s or 0.0
    if wait_s > left_s:
        return FAILED, None
    if asked_s > left_s:  # there is another attempt all the same
        asked_s = min(MAX_WAIT_S, left_s / 2)
    return WAITING, now_ms + round(1000 * max(wait_s, asked_s))
