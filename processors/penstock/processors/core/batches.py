"""Who joins a batch: waiting requests of one model and one shape, up to a size, collected for a short window.

An engine that computes a batch in step (diffusion, embeddings) can take only requests of equal shape together. The
first request of a shape opens a batch. It closes when it is full or when its window is over. Batches stand in the order
of their most urgent members; within one the order of the scheduler is kept, so nobody is passed by who could join.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")

Shape = Hashable
"""What must be equal in a batch, e.g. (width, height, steps, guidance) of images; None runs by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """Of one model. A size of 1 or a window of 0 means that nothing is waited for."""

    max_batch_size: int = 1
    window_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Batch(Generic[T]):
    """`members` in the order of the scheduler. `due_at` is when the window ends; `closed`: it may start now."""

    shape: Shape
    members: tuple[T, ...]
    due_at: float
    closed: bool


IMAGE_SHAPE = ("width", "height", "inference_steps", "guidance_scale", "sampler", "strength")


def shape_of(task: str, payload: Mapping[str, Any], cost: int) -> Shape:
    """What must be equal for two requests of a model to be computed in step; None for tasks that are not batched so.

    `cost` is in tokens. Embeddings are padded to the longest, so costs of as many binary digits go together:
    at most half of a batch is padding. Diffusion takes equal steps, size and guidance only.
    """
    if task == "embedding":
        return (task, cost.bit_length())
    if task in ("image_generation", "image_editing"):
        return (task, *(payload.get(name) for name in IMAGE_SHAPE))
    return None


class Batches(Generic[T]):
    """Opened windows of one model. It keeps only when each shape's window began; who waits is passed in."""

    def __init__(self, settings: BatchSettings) -> None:
        self._settings = settings
        self._opened: dict[Shape, float] = {}

    def plan(self, waiting: Iterable[tuple[T, Shape]], now: float, *, at_once: bool = False) -> list[Batch[T]]:
        """The batches that those who wait form, the most urgent first. `at_once` closes all: nothing is waited for.

        Call it with the eligible requests in order, when somebody came, left, or a window is over.
        """
        settings = self._settings
        groups: list[tuple[Shape, list[T]]] = []
        last: dict[Shape, list[T]] = {}
        for item, shape in waiting:
            members = None if shape is None else last.get(shape)
            if members is None or len(members) >= settings.max_batch_size:
                members = []
                groups.append((shape, members))
                last[shape] = members
            members.append(item)
        self._opened = {shape: self._opened.get(shape, now) for shape in last if shape is not None}
        batches: list[Batch[T]] = []
        for shape, members in groups:
            due_at = self._opened.get(shape, now) + settings.window_s if shape is not None else now
            full = len(members) >= settings.max_batch_size
            batches.append(Batch(shape, tuple(members), due_at, at_once or full or due_at <= now))
        return batches

    def started(self, batch: Batch[T]) -> None:
        """The batch runs: who comes next with its shape opens a new window."""
        self._opened.pop(batch.shape, None)

    def next_due(self) -> float | None:
        """When the first window is over."""
        return min(self._opened.values()) + self._settings.window_s if self._opened else None
