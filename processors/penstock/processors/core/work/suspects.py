"""Who killed the engine: the runs that were on it are tried again in halves, each half by itself, until one is alone.

Group testing by halving (Dorfman 1943; Hwang's generalised binary splitting is the refined form): one culprit among n
is found after about log2(n) more deaths, and only the run that died alone has spent an attempt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class SuspectGroup:
    """Suspects that run together and with nobody else."""

    __slots__ = ("members",)

    def __init__(self, members: Sequence[Any]) -> None:
        self.members = set(members)

    def __len__(self) -> int:
        return len(self.members)


def suspect_all(victims: Sequence[Any]) -> Any | None:
    """The culprit, when there was only one victim; else None, and each victim is in the half in which it runs next.

    A victim leaves the group that it was in: what of that group was not running stays suspected by itself.
    """
    for victim in victims:
        clear_suspicion(victim)
        victim.deaths += 1
    if not victims:
        return None
    ordered = sorted(victims, key=lambda victim: victim.seq)
    if len(ordered) == 1:
        _form(ordered)
        return ordered[0]
    middle = (len(ordered) + 1) // 2
    _form(ordered[:middle])
    _form(ordered[middle:])
    return None


def clear_suspicion(work: Any) -> None:
    """It has ended, or is suspected in another group from now on."""
    if work.group is not None:
        work.group.members.discard(work)
        work.group = None


def set_apart(work: Any) -> None:
    """It is suspected in a group of its own from now on: it cannot run where the others of its group do."""
    clear_suspicion(work)
    _form([work])


def _form(members: Sequence[Any]) -> None:
    group = SuspectGroup(members)
    for member in members:
        member.group = group
