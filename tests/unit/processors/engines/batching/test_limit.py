"""Batches are halved when memory runs out, and grow again when many went well."""

from penstock.processors.engines.batching.limit import GROW_AFTER, BatchLimit


def well(limit: BatchLimit, batches: int) -> int:
    return sum(limit.went_well() for _ in range(batches))


def test_it_is_halved_down_to_the_least() -> None:
    limit = BatchLimit(10, 2)
    assert [limit.halve() for _ in range(4)] == [True, True, False, False]
    assert limit.size == 2


def test_what_was_in_use_is_halved_not_what_was_allowed() -> None:
    limit = BatchLimit(64)
    assert limit.halve(6)
    assert limit.size == 3
    assert BatchLimit(4, 32).size == 4, "a least that is larger than the largest changes nothing"


def test_it_grows_again_after_many_that_went_well_and_later_each_time() -> None:
    limit = BatchLimit(8)
    assert well(limit, 10 * GROW_AFTER) == 0
    limit.halve()
    assert well(limit, GROW_AFTER - 1) == 0
    assert well(limit, 1) == 1
    assert limit.size == 8
    limit.halve()
    assert well(limit, 2 * GROW_AFTER - 1) == 0
    assert well(limit, 1) == 1
    limit.halve(8)
    limit.halve()
    assert limit.size == 2
    assert well(limit, 8 * GROW_AFTER) == 1, "one step at a time"
    assert limit.size == 4
