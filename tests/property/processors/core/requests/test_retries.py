"""The retry policy for every error, attempt and deadline: who is tried again, how long after, and how it ends."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.processors.core.requests.retries import (
    BASE_DELAY_S,
    MAX_DELAY_S,
    DeadLetter,
    Fail,
    Retry,
    ask_store_again,
    decide,
)
from penstock.schemas.errors import (
    ERRORS_BY_CODE,
    BrokerUnavailable,
    EngineFailed,
    ExecutionTimeout,
    InvalidRequest,
    Overloaded,
    PenstockError,
)

MAX_RETRY_AFTER_S = 60.0
RETRYABLE = frozenset(
    {
        "tenant_limit",
        "overloaded",
        "broker_unavailable",
        "registry_unavailable",
        "source_unavailable",
        "store_unavailable",
        "stream_restarted",
    }
)
"""The codes that are worth another attempt, spelled out: an error that becomes one of them shows here."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What `decide` is asked about."""

    code: str
    retry_after_s: float | None
    attempt: int
    max_attempts: int
    now: float
    ttl_s: float | None

    @property
    def error(self) -> PenstockError:
        return ERRORS_BY_CODE[self.code]("x", retry_after_s=self.retry_after_s)

    @property
    def deadline(self) -> float | None:
        return None if self.ttl_s is None else self.now + self.ttl_s

    def decide(self, deadline: float | None) -> Retry | Fail | DeadLetter:
        return decide(self.error, self.attempt, self.max_attempts, self.now, deadline)


FAILURES = st.builds(
    Failure,
    code=st.sampled_from(sorted(ERRORS_BY_CODE)) | st.sampled_from(sorted(RETRYABLE | {"engine_failed"})),
    retry_after_s=st.none() | st.floats(0, 1_000),
    attempt=st.integers(1, 12),
    max_attempts=st.integers(1, 10),
    now=st.floats(0, 1e6),
    ttl_s=st.none() | st.floats(-10, 100),
)


@given(failure=FAILURES)
def test_what_ends_it(failure: Failure) -> None:
    """Only what another attempt can mend is tried again, and only while attempts are left."""
    decision = failure.decide(None)
    if failure.code not in RETRYABLE | {"engine_failed"}:
        assert decision == Fail(), "the caller's own error was tried again"
    elif failure.attempt < failure.max_attempts:
        assert isinstance(decision, Retry)
    else:
        assert decision == (DeadLetter() if failure.code == "engine_failed" else Fail())


@given(failure=FAILURES)
def test_no_retry_passes_the_deadline(failure: Failure) -> None:
    """A deadline turns a retry that would pass it into the end, and changes nothing else."""
    without, decision = failure.decide(None), failure.decide(failure.deadline)
    in_time = (
        failure.deadline is None or not isinstance(without, Retry) or (failure.now + without.delay_s < failure.deadline)
    )
    assert decision == (without if in_time else Fail())


@given(failure=FAILURES)
def test_the_delay_is_bounded_and_as_long_as_asked(failure: Failure) -> None:
    decision = failure.decide(None)
    if not isinstance(decision, Retry):
        return
    own_s = min(MAX_DELAY_S, BASE_DELAY_S * 2 ** (failure.attempt - 1))
    asked_s = min(failure.retry_after_s or 0.0, MAX_RETRY_AFTER_S)
    assert decision.delay_s in (own_s, asked_s)
    assert decision.delay_s >= own_s
    assert decision.delay_s >= asked_s


@given(retry_after_s=st.none() | st.floats(0, 1_000), max_attempts=st.integers(2, 10))
def test_delays_do_not_shrink(retry_after_s: float | None, max_attempts: int) -> None:
    error = EngineFailed("x", retry_after_s=retry_after_s)
    decisions = [decide(error, attempt, max_attempts, 0.0, None) for attempt in range(1, max_attempts + 1)]
    delays = [decision.delay_s for decision in decisions if isinstance(decision, Retry)]
    assert len(delays) == max_attempts - 1
    assert delays == sorted(delays)
    assert decisions[-1] == DeadLetter()


@pytest.mark.parametrize(
    ("error", "attempt", "deadline", "decision"),
    [
        (EngineFailed("x"), 1, None, Retry(0.1)),
        (EngineFailed("x"), 2, None, Retry(0.2)),
        (EngineFailed("x"), 7, None, Retry(6.4)),
        (EngineFailed("x"), 8, None, Retry(10.0)),
        (EngineFailed("x"), 10, None, DeadLetter()),
        (EngineFailed("x"), 1, 100.1, Fail()),
        (EngineFailed("x"), 1, 100.2, Retry(0.1)),
        (EngineFailed("x"), 10, 1.0, DeadLetter()),
        (Overloaded("x", retry_after_s=3), 1, None, Retry(3.0)),
        (Overloaded("x", retry_after_s=3), 8, None, Retry(10.0)),
        (Overloaded("x", retry_after_s=3), 1, 103.0, Fail()),
        (Overloaded("x", retry_after_s=300), 1, None, Retry(60.0)),
        (BrokerUnavailable("x"), 10, None, Fail()),
        (InvalidRequest("x"), 1, None, Fail()),
        (ExecutionTimeout("x"), 1, None, Fail()),
    ],
)
def test_by_table(
    error: PenstockError, attempt: int, deadline: float | None, decision: Retry | Fail | DeadLetter
) -> None:
    assert decide(error, attempt, 10, 100.0, deadline) == decision


def test_a_store_is_asked_again_however_often_it_gave_nothing() -> None:
    decisions = [ask_store_again(refusals) for refusals in (0, 1, 2, 3, 4, 5, 100_000)]
    assert [decision.delay_s for decision in decisions] == [0.5, 1, 2, 4, 8, 10, 10]
    assert not any(decision.spends for decision in decisions)
