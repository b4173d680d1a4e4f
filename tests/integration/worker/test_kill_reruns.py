"""After kill -9 only that runs again which had not ended, or whose end the group could not know of yet (#14)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from load import KILL_OPTIONS, kill_under_load
from system import System
from worker_requests import engine


@pytest.mark.thorough
@pytest.mark.slow
def test_what_was_done_behind_an_unfinished_head_does_not_run_again(make_system: Callable[..., System]) -> None:
    """Requests run again ÷ (running at the kill + ended since the last commit) is at most 1.1."""
    system = make_system(
        models=[engine(**KILL_OPTIONS)], worker_options={"session_timeout_s": 6, "heartbeat_s": 1, "aging_s": 600}
    )
    found = kill_under_load(system)
    assert found["running"] >= 4, found
    assert found["ratio"] <= 1.1, found
