"""Point 13: each order of an operator in each state of a model, with a restart behind it: all ends, no reason lies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from drill_truths import COMBINATIONS, FOLLOWERS
from operators_drill import LATE_S, Drill, run_drill
from system import System


@pytest.mark.slow
@pytest.mark.parametrize("follower", FOLLOWERS)
def test_each_order_in_each_state_followed_by(
    follower: str, tmp_path: Path, make_system: Callable[..., System]
) -> None:
    hold = tmp_path / "hold"
    system = make_system(
        models=[combination.entry(str(hold)) for combination in COMBINATIONS],
        worker_options={"state_interval_s": 1},
        gateway_options={"worker_late_s": LATE_S},
    )
    run_drill(Drill(system, hold), follower)
