"""The retry policy: for every error, count of attempts and deadline, what follows and when."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.processors.core.fleet.ledger import OutOfMemory
from penstock.processors.core.work.retries import (
    LONGEST_RETRY_AFTER_S,
    DeadLetter,
    EngineDied,
    Fail,
    Requeue,
    Retry,
    RetryDecision,
    RetrySettings,
    Tries,
    decide,
)
from penstock.processors.engines.base import EngineGone
from penstock.schemas.errors import (
    ERRORS_BY_CODE,
    BrokerUnavailable,
    EngineFailed,
    ExecutionTimeout,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PenstockError,
    SourceUnavailable,
    StoreUnavailable,
    TooLarge,
)

AWAY = {"broker_unavailable", "broker_refused", "registry_unavailable", "store_unavailable"}
PUT_BACK = frozenset({"tenant_limit", "overloaded", *AWAY})
RETRIED = frozenset({"engine_failed", "execution_timeout", "source_unavailable"})
"""The codes of each kind, spelled out: an error that becomes one of them shows here. All others are final."""
DOUBLING, FIXED = RetrySettings(), RetrySettings(backoff="fixed", first_s=2.0)
THREE = replace(DOUBLING, max_attempts=3)
NOW, HOUR = 100.0, 3_700.0


@dataclass(frozen=True, slots=True)
class Failure:
    """What `decide` is asked about."""

    code: str
    retry_after_s: float | None
    tries: Tries
    now: float
    ttl_s: float | None
    settings: RetrySettings

    @property
    def error(self) -> PenstockError:
        return ERRORS_BY_CODE[self.code]("x", retry_after_s=self.retry_after_s)

    @property
    def deadline(self) -> float | None:
        return None if self.ttl_s is None else self.now + self.ttl_s

    def decide(self) -> RetryDecision:
        return decide(self.error, self.tries, self.now, self.deadline, self.settings)


FAILURES = st.builds(
    Failure,
    code=st.sampled_from(sorted(ERRORS_BY_CODE)) | st.sampled_from(sorted(PUT_BACK | RETRIED)),
    retry_after_s=st.none() | st.floats(0, 1_000),
    tries=st.builds(
        Tries,
        request_id=st.text(st.characters(codec="utf-8"), min_size=1),
        ran=st.integers(1, 10_000),
        put_back=st.integers(1, 10_000),
        deaths=st.integers(0, 5),
    ),
    now=st.floats(0, 1e6),
    ttl_s=st.none() | st.floats(-10, 100_000),
    settings=st.builds(
        RetrySettings,
        backoff=st.sampled_from(["doubling", "fixed"]),
        first_s=st.floats(0, 100),
        longest_s=st.floats(0, 100),
        max_attempts=st.none() | st.integers(1, 10),
    ),
)


@given(failure=FAILURES)
def test_the_kind_of_the_error_decides(failure: Failure) -> None:
    """What is final fails at once, what is away is put back however often, and the rest ends with its attempts."""
    decision, most = failure.decide(), failure.settings.max_attempts
    if failure.code in PUT_BACK:
        assert isinstance(decision, Requeue)
        assert decision.reason == failure.code
    elif failure.code not in RETRIED:
        assert decision == Fail()
    elif most is not None and failure.tries.ran >= most:
        assert decision == DeadLetter()
    elif failure.deadline is None:
        assert isinstance(decision, Retry), "without a bound and a deadline it goes on"


@given(failure=FAILURES)
def test_nothing_is_scheduled_beyond_the_deadline(failure: Failure) -> None:
    """A retry starts before it; what was put back waits until it at most, and expires."""
    decision, deadline = failure.decide(), failure.deadline
    if isinstance(decision, Retry):
        assert deadline is None or decision.at < deadline
        assert decision.at >= failure.now
    elif isinstance(decision, Requeue):
        assert decision.at >= failure.now
        assert deadline is None or decision.at <= max(deadline, failure.now)


@given(failure=FAILURES)
def test_the_wait_is_bounded_and_as_long_as_a_server_asks(failure: Failure) -> None:
    decision = replace(failure, ttl_s=None, now=0.0).decide()
    if not isinstance(decision, Retry | Requeue):
        return
    settings = failure.settings
    times = failure.tries.ran if isinstance(decision, Retry) else failure.tries.put_back
    whole_s = settings.first_s * (2 ** min(times - 1, 30) if settings.backoff == "doubling" else 1)
    whole_s = min(whole_s, settings.longest_s)
    asked_s = min(failure.retry_after_s or 0.0, LONGEST_RETRY_AFTER_S)
    assert max(whole_s / 2, asked_s) <= decision.at <= max(whole_s, 1.2 * asked_s)
    assert decision == replace(failure, ttl_s=None, now=0.0).decide(), "the same in each history"


def test_those_that_failed_together_do_not_come_back_together() -> None:
    error = EngineFailed("x")
    times = {decide(error, Tries(request_id=f"r{n}", ran=8), 0.0, None, DOUBLING) for n in range(100)}
    assert len(times) == 100
    waits = [decision.at for decision in times if isinstance(decision, Retry)]
    assert max(waits) - min(waits) > 4.0, "spread over half of the ten seconds"


@pytest.mark.parametrize(
    ("error", "ran", "deaths", "deadline", "settings", "decision"),
    [
        # the outside is away or full
        (StoreUnavailable("x"), 9, 0, HOUR, THREE, Requeue),
        (BrokerUnavailable("x"), 9, 0, HOUR, THREE, Requeue),
        (Overloaded("remote 429", retry_after_s=3), 9, 0, HOUR, THREE, Requeue),
        (EngineGone("cannot be reached"), 9, 0, HOUR, THREE, Requeue),
        (OutOfMemory("x"), 9, 0, HOUR, THREE, Requeue),
        # spends an attempt
        (EngineFailed("remote 500"), 1, 0, HOUR, DOUBLING, Retry),
        (EngineFailed("remote 500"), 500, 0, HOUR, DOUBLING, Retry),
        (ExecutionTimeout("x"), 4, 0, HOUR, DOUBLING, Retry),
        (SourceUnavailable("x"), 4, 0, None, DOUBLING, Retry),
        (EngineFailed("remote 500"), 2, 9, HOUR, THREE, Retry),
        (EngineFailed("remote 500"), 3, 0, HOUR, THREE, DeadLetter),
        (ExecutionTimeout("x"), 1, 0, HOUR, replace(DOUBLING, max_attempts=1), DeadLetter),
        # the deadline
        (EngineFailed("x"), 1, 0, NOW + 0.05, DOUBLING, DeadLetter),
        (EngineFailed("x"), 1, 0, NOW + 0.1, DOUBLING, Retry),
        (EngineFailed("x"), 8, 0, NOW + 5.0, DOUBLING, DeadLetter),
        (EngineFailed("x", retry_after_s=30), 1, 0, NOW + 30, DOUBLING, DeadLetter),
        (EngineFailed("x"), 1, 0, NOW - 1.0, DOUBLING, DeadLetter),
        # poison
        (EngineDied("x"), 1, 1, HOUR, DOUBLING, Retry),
        (EngineDied("x"), 2, 2, HOUR, DOUBLING, Retry),
        (EngineDied("x"), 1, 3, HOUR, DOUBLING, DeadLetter),
        (EngineDied("x"), 1, 3, HOUR, replace(DOUBLING, max_attempts=10), DeadLetter),
        (EngineDied("x"), 1, 1, HOUR, replace(DOUBLING, max_attempts=1), DeadLetter),
        (EngineDied("x"), 1, 2, HOUR, replace(DOUBLING, max_attempts=2), DeadLetter),
        # final
        (InvalidRequest("x"), 1, 0, HOUR, DOUBLING, Fail),
        (TooLarge("x"), 1, 0, HOUR, DOUBLING, Fail),
        (ModelNotFound("x"), 1, 0, HOUR, DOUBLING, Fail),
    ],
)
def test_by_table(
    error: PenstockError,
    ran: int,
    deaths: int,
    deadline: float | None,
    settings: RetrySettings,
    decision: type[RetryDecision],
) -> None:
    tries = Tries(request_id="r", ran=ran, deaths=deaths)  # of "r" the first wait is 0.08 s
    assert type(decide(error, tries, NOW, deadline, settings)) is decision


@pytest.mark.parametrize(
    ("settings", "whole"),
    [
        (DOUBLING, [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]),
        (FIXED, [2.0] * 9),
        (replace(DOUBLING, first_s=1.0, longest_s=4.0), [1.0, 2.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0]),
    ],
)
def test_waits_double_or_stay(settings: RetrySettings, whole: list[float]) -> None:
    for times, whole_s in enumerate(whole, start=1):
        for error in (EngineFailed("x"), StoreUnavailable("x")):
            decision = decide(error, Tries(request_id="r", ran=times, put_back=times), 0.0, None, settings)
            assert isinstance(decision, Retry | Requeue)
            assert whole_s / 2 <= decision.at <= whole_s
