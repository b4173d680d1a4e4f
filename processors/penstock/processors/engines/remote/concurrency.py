"""How many requests a remote server gets at once, and how many tokens a minute. Time is passed in, in seconds.

`AdaptiveLimit` is additive increase, multiplicative decrease (Chiu and Jain, "Analysis of the Increase and Decrease
Algorithms for Congestion Avoidance in Computer Networks", 1989), as TCP has it in RFC 5681: one more per round of
answers while the limit is used, a share of it at the first refusal, and none for refusals of what was sent before that.
Netflix's concurrency-limits has the same as AIMDLimit.

`TokenBudget` is a token bucket that may go into debt (the generic cell rate algorithm's other form): a request begins
while the bucket is not empty, pays what it is estimated to use, and is settled by what it used.
"""

from __future__ import annotations

BACKOFF = 0.7
"""What a refusal leaves of the limit: harder than Netflix's 0.9, since requests here last seconds."""
USED_SHARE = 0.5
"""A limit of which less is in use is not what holds the server back, and does not grow."""


class AdaptiveLimit:
    """At least 1, at most `ceiling`, where it begins: a server is taken at its operator's word until it refuses."""

    def __init__(self, ceiling: int) -> None:
        if ceiling < 1:
            raise ValueError("a limit below one request lets nothing run")
        self.ceiling = ceiling
        self._limit = float(ceiling)
        self._shrunk_at = float("-inf")

    @property
    def limit(self) -> int:
        """Requests that the server may have at once."""
        return int(self._limit)

    def answered(self, in_flight: int) -> None:
        """The server took and answered one, while it had so many (that one counted)."""
        if in_flight >= self._limit * USED_SHARE:
            self._limit = min(float(self.ceiling), self._limit + 1 / self._limit)

    def refused(self, sent_at: float, now: float) -> bool:
        """It refused, or did not answer, what was sent at that time. Whether the limit has shrunk."""
        if sent_at < self._shrunk_at:
            return False
        before = self.limit
        self._shrunk_at = now
        self._limit = max(1.0, self._limit * BACKOFF)
        return self.limit < before


class TokenBudget:
    """`per_minute` tokens on average, at once those that ten seconds bring."""

    def __init__(self, per_minute: float) -> None:
        if per_minute <= 0:
            raise ValueError("a budget needs tokens")
        self._per_s = per_minute / 60
        self._burst = self._per_s * 10
        self._level = self._burst
        self._at: float | None = None

    def wait_s(self, now: float) -> float:
        """Seconds until a request may begin; 0 when it may now."""
        self._fill(now)
        return 0.0 if self._level > 0 else (1 - self._level) / self._per_s

    def spend(self, tokens: float, now: float) -> None:
        """A request that is estimated to use so many begins."""
        self._fill(now)
        self._level -= tokens

    def settle(self, estimated: float, used: float) -> None:
        """It has ended, and used so many."""
        self._level = min(self._burst, self._level + estimated - used)

    def _fill(self, now: float) -> None:
        if self._at is not None:
            self._level = min(self._burst, self._level + (now - self._at) * self._per_s)
        self._at = now if self._at is None else max(self._at, now)


FIRST_DELAY_S = 0.25
MAX_DELAY_S = 10.0


class RemoteGate:
    """What one remote server may be sent now, from what it said before.

    What it turns away has not begun: it goes back to the queue, so that the most urgent is sent when there is room
    again and low work is what waits. Once a server has turned everything away for `patience_s`, its requests
    wait for tries of their own.
    """

    def __init__(self, slots: int, *, patience_s: float, tokens_per_minute: float | None = None) -> None:
        self._limit = AdaptiveLimit(slots)
        self._budget = None if tokens_per_minute is None else TokenBudget(tokens_per_minute)
        self._patience_s = patience_s
        self._delay_s = 0.0
        self._round_at = float("-inf")
        self._refusing_since: float | None = None
        self._refused_at = float("-inf")

    @property
    def limit(self) -> int:
        """Requests that it may have at once."""
        return self._limit.limit

    def wait_s(self, now: float) -> float:
        """Seconds until the budget lets another begin; 0 when it does now."""
        return 0.0 if self._budget is None else self._budget.wait_s(now)

    def began(self, tokens: float, now: float) -> None:
        """A request of about so many tokens was sent."""
        if self._budget is not None:
            self._budget.spend(tokens, now)

    def ended(self, estimated: float, used: float) -> None:
        """A request that was sent is over, and has used so many tokens."""
        if self._budget is not None:
            self._budget.settle(estimated, used)

    def answered(self, in_flight: int) -> None:
        """It took one while it had so many, whatever came of it."""
        self._limit.answered(in_flight)
        self._refusing_since, self._delay_s = None, 0.0

    def timed_out(self, sent_at: float, now: float) -> None:
        """It did not answer what it was sent then."""
        self._limit.refused(sent_at, now)

    def turned_away(self, sent_at: float, now: float, retry_after_s: float | None) -> float | None:
        """It did not take what it was sent then. Seconds to send nothing; None when the patience is over."""
        if self._refusing_since is None or now - self._refused_at > self._patience_s:
            self._refusing_since = now
        self._refused_at = now
        if sent_at >= self._round_at:  # the first of those that were turned away together
            self._delay_s = min(2 * self._delay_s, MAX_DELAY_S) if self._delay_s else FIRST_DELAY_S
            self._round_at = now
        self._limit.refused(sent_at, now)
        wait_s = max(self._delay_s, retry_after_s or 0.0)
        return None if now + wait_s - self._refusing_since > self._patience_s else wait_s
