"""Who is computed first in an engine."""

from penstock.processors.engines.batching.alike import AlikeBatches
from penstock.processors.engines.batching.turns import PATIENCE_S, turn_of


def test_who_is_more_urgent_is_first_unless_the_other_came_long_before() -> None:
    low = turn_of(8, 100.0)
    assert turn_of(2, 100.0 + 5 * PATIENCE_S) < low
    assert turn_of(2, 100.0 + 7 * PATIENCE_S) > low
    assert turn_of(8, 100.1) > low
    assert turn_of(2, 100.0 + 9 * PATIENCE_S) > turn_of(1_000, 100.0), "the least urgent do not wait for ever"


def test_an_urgent_image_is_in_the_next_batch_with_those_that_are_like_it() -> None:
    batches: AlikeBatches[str] = AlikeBatches(lambda item: item.split()[1])
    for number in range(10):
        batches.add(f"low {'xy'[number % 2]} {number}", turn_of(8, 100.0 + number))
    batches.add("urgent y", turn_of(1, 110.0))
    assert batches.take(2) == ["urgent y", "low y 1"]
    assert batches.take(2) == ["low x 0", "low x 2"]
