"""In which order what waits in an engine is computed: by priority, then by arrival. Pure."""

from __future__ import annotations

PATIENCE_S = 10.0
"""So much earlier must one have come to be computed before another whose priority is better by one."""
LOWEST = 10
"""Who is less urgent than this waits no longer."""


def turn_of(priority: int, now: float) -> float:
    """Of a run that comes now: the smaller one is first.

    None waits longer than PATIENCE_S for each step of priority, for those that come later.
    """
    return now + PATIENCE_S * min(priority, LOWEST)
