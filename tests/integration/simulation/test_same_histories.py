"""The simulated log against a real broker: the same operations give the same histories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sides import RealSide, Side, SimulatedSide

History = list[Any]
Script = Callable[[Side], History]
PARTITIONS = 3


def produce_and_read(side: Side) -> History:
    """Offsets, a transaction's marker, positions behind it, metadata, and that a broker takes a lower offset."""
    history: History = [side.produce(0, value) for value in ("a", "b", "c")]
    side.transaction(0, ["d", "e"])
    history += [side.produce(0, "f"), side.produce(1, "g")]
    side.transaction(2, ["h"])
    side.join("a")
    history += [side.settle("a"), side.read("a", 8), side.positions("a")]
    history.append(side.commit("a", [(0, 4, "1bmap"), (1, 1, "")]))
    history.append(side.committed())
    history.append(side.commit("a", [(0, 4, "1banother")]))
    history.append(side.committed())
    history.append(side.commit("a", [(0, 2, "lower")]))
    history.append(side.committed())
    return history


def redelivery_after_a_crash(side: Side) -> History:
    """What was read and not committed is delivered again to whoever comes next."""
    for number in range(6):
        side.produce(0, f"v{number}")
    side.join("a")
    history: History = [side.settle("a"), side.read("a", 6), side.commit("a", [(0, 2, "m")])]
    side.kill("a")
    side.join("b")
    history += [side.settle("b"), side.read("b", 4), side.committed()]
    side.leave("b")
    side.join("c")
    history += [side.settle("c"), side.read("c", 4)]
    return history


def join_and_leave(side: Side) -> History:
    """The range assignor's shares, and generations that count up by one with each change."""
    history: History = []
    side.join("a")
    history.append(side.settle("a"))
    side.join("b")
    history.append(side.settle("a", "b"))
    history.append(side.commit("a", [(0, 0, "a's")]))
    side.join("c")
    history.append(side.settle("a", "b", "c"))
    side.leave("b")
    history.append(side.settle("a", "c"))
    history.append(side.committed())
    return history


def fenced_by_missed_heartbeats(side: Side) -> History:
    """A member that stands still is thrown out; what it commits afterwards is refused; it comes back as another."""
    for partition in range(PARTITIONS):
        side.produce(partition, f"v{partition}")
    side.join("a")
    history: History = [side.settle("a")]
    side.join("b")
    history += [side.settle("a", "b"), side.read("a", 2)]
    side.stop("a")
    history += [side.settle("b"), side.read("b", 3), side.commit("b", [(0, 1, "b's")])]
    side.commit_when_it_goes_on("a", [(0, 0, "a's")])
    history.append(side.go_on("a"))
    back = side.settle("a", "b")
    # One that was away joins again once or twice, as its client likes, so its generation is 4 or more.
    history += [{name: state["assigned"] for name, state in back.items()}, back["a"]["generation"] >= 4]
    history += [side.read("a", 1), side.committed(), side.commit("a", [(1, 1, "again")]), side.committed()]
    return history


SCRIPTS = (produce_and_read, redelivery_after_a_crash, join_and_leave, fenced_by_missed_heartbeats)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_the_simulated_log_has_the_real_ones_history(script: Script, kafka: Any) -> None:
    simulated = script(SimulatedSide(PARTITIONS))
    side = RealSide(kafka.bootstrap_servers, PARTITIONS)
    try:
        real = script(side)
    finally:
        side.close()
    assert simulated == real
