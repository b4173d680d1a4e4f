"""What a member of a consumer group may commit. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from penstock.schemas.topics import TP

T = TypeVar("T")


@dataclass(slots=True)
class _Partition:
    position: int = -1
    committed: int = -1
    held: dict[int, Any] = field(default_factory=dict[int, Any])
    """In the order of the offsets."""


class HeldOffsets(Generic[T]):
    """The partitions of a member. Of each may be committed what was read before the first offset that is held.

    Offsets are held in their order, each with what is to be done for it.
    """

    def __init__(self) -> None:
        self._partitions: dict[TP, _Partition] = {}

    def __contains__(self, tp: TP) -> bool:
        return tp in self._partitions

    def assign(self, partitions: Iterable[TP]) -> None:
        for tp in partitions:
            self._partitions.setdefault(tp, _Partition())

    def revoke(self, tp: TP) -> list[T]:
        """Another process has it now. What was held of it."""
        gone = self._partitions.pop(tp, None)
        return [] if gone is None else list(gone.held.values())

    def hold(self, tp: TP, offset: int, work: T) -> None:
        """Raises KeyError when the partition is not assigned."""
        self._partitions[tp].held[offset] = work

    def release(self, tp: TP, offset: int) -> None:
        """What was to be done for it is done, and durable."""
        if (partition := self._partitions.get(tp)) is not None:
            partition.held.pop(offset, None)

    def passed(self, tp: TP, position: int) -> None:
        """All before `position` was read."""
        if (partition := self._partitions.get(tp)) is not None:
            partition.position = max(partition.position, position)

    def position(self, tp: TP) -> int:
        """All before it was read; -1 if nothing was."""
        return self._partitions[tp].position

    def first(self, tp: TP) -> T | None:
        """What is held at the lowest offset."""
        partition = self._partitions.get(tp)
        return None if partition is None else next(iter(partition.held.values()), None)

    def commits(self) -> dict[TP, int]:
        """What may be committed and was not returned before."""
        due: dict[TP, int] = {}
        for tp, partition in self._partitions.items():
            offset = next(iter(partition.held), partition.position)
            if offset > partition.committed:
                partition.committed = due[tp] = offset
        return due
