"""What becomes of a webhook after an attempt, as a table."""

from __future__ import annotations

import pytest

from penstock.gateway.webhooks.policy import Answer, RetryRules, decide

RULES = RetryRules(first_retry_s=5, give_up_s=86_400)
T0 = 1_700_000_000_000
DAY = 86_400_000


@pytest.mark.parametrize(
    ("answer", "attempts", "age_ms", "state", "wait_ms"),
    [
        (Answer(status_code=200), 1, 0, "delivered", None),
        (Answer(status_code=299), 9, DAY * 2, "delivered", None),
        (Answer(status_code=410), 1, 0, "failed", None),
        (Answer(error="private", final=True), 1, 0, "failed", None),
        (Answer(status_code=199), 1, 0, "waiting", 5_000),
        (Answer(status_code=302), 1, 0, "waiting", 5_000),
        (Answer(status_code=404), 2, 0, "waiting", 10_000),
        (Answer(status_code=500), 3, 0, "waiting", 20_000),
        (Answer(error="no answer"), 11, 0, "waiting", 3_600_000),
        (Answer(error="no answer"), 1_000, 0, "waiting", 3_600_000),
        (Answer(status_code=429, retry_after_s=60), 1, 0, "waiting", 60_000),
        (Answer(status_code=503, retry_after_s=1), 1, 0, "waiting", 5_000),
        (Answer(status_code=503, retry_after_s=80_000), 1, 0, "waiting", 80_000_000),
        (Answer(status_code=503, retry_after_s=90_000), 1, 0, "waiting", 3_600_000),
        (Answer(status_code=503, retry_after_s=90_000), 1, DAY - 60_000, "waiting", 30_000),
        (Answer(status_code=500), 3, DAY - 20_000, "waiting", 20_000),
        (Answer(status_code=500), 3, DAY - 19_999, "failed", None),
    ],
)
def test_decide(answer: Answer, attempts: int, age_ms: int, state: str, wait_ms: int | None) -> None:
    next_ms = None if wait_ms is None else T0 + age_ms + wait_ms
    assert decide(answer, attempts, T0 + age_ms, T0, RULES, 0.0) == (state, next_ms)


def test_jitter_shortens_a_wait_by_up_to_a_half() -> None:
    found = [decide(Answer(status_code=500), 2, T0, T0, RULES, chance)[1] for chance in (0.0, 0.5, 1.0)]
    assert found == [T0 + 10_000, T0 + 7_500, T0 + 5_000]
