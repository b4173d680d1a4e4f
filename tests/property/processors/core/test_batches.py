"""Batches: equal shape, never above their size, in the scheduler's order; nobody waits for longer than the window."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.processors.core.batches import Batches, BatchSettings, shape_of

Waiting = list[tuple[int, str | None]]
WAITING = st.lists(st.sampled_from(["a", "b", None]), max_size=30).map(lambda shapes: list(enumerate(shapes)))


@given(WAITING, st.integers(1, 5), st.booleans())
def test_batches_part_those_who_wait(waiting: Waiting, size: int, at_once: bool) -> None:
    shapes = dict(waiting)
    batches = Batches[int](BatchSettings(max_batch_size=size, window_s=1.0)).plan(waiting, 0.0, at_once=at_once)
    assert sorted(item for batch in batches for item in batch.members) == [item for item, _ in waiting]
    assert [batch.members[0] for batch in batches] == sorted(batch.members[0] for batch in batches)
    for batch in batches:
        assert len(batch.members) <= (1 if batch.shape is None else size)
        assert {shapes[item] for item in batch.members} == {batch.shape}
        assert list(batch.members) == sorted(batch.members)
        assert batch.closed == (at_once or batch.shape is None or len(batch.members) == size)
    for shape in ("a", "b"):  # nobody is passed by who could join: only the last batch of a shape may be open
        of_shape = [item for batch in batches if batch.shape == shape for item in batch.members]
        assert of_shape == sorted(of_shape)


@given(st.lists(st.tuples(st.floats(0.01, 0.4), WAITING), min_size=1, max_size=20))
def test_a_window_is_over_in_time(steps: list[tuple[float, Waiting]]) -> None:
    found = Batches[int](BatchSettings(max_batch_size=4, window_s=0.5))
    now, since = 0.0, dict[str, float]()
    for seconds, waiting in steps:
        now += seconds
        batches = found.plan(waiting, now)
        present = {shape for _, shape in waiting if shape is not None}
        since = {shape: since.get(shape, now) for shape in present}
        for batch in batches:
            if isinstance(batch.shape, str) and now >= since[batch.shape] + 0.5:
                assert batch.closed
        due = found.next_due()
        assert (due is None) == (not present)
        for batch in batches:
            if batch.closed and isinstance(batch.shape, str):
                found.started(batch)
                since.pop(batch.shape, None)


def test_shapes() -> None:
    image = {"width": 512, "height": 512, "inference_steps": 20, "guidance_scale": 7.0, "prompt": "a"}
    same, larger = {**image, "prompt": "b", "seed": 3}, {**image, "width": 768}
    assert shape_of("image_generation", image, 1) == shape_of("image_generation", same, 1)
    assert shape_of("image_generation", image, 1) != shape_of("image_generation", larger, 1)
    assert shape_of("embedding", {}, 65) == shape_of("embedding", {}, 127) != shape_of("embedding", {}, 128)
    assert shape_of("text_generation", {}, 9) is None
