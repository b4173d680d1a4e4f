"""Which turns of a conversation another priority moves, so that turns keep the order of their log. Pure.

A worker starts turns of one class in the order of the log, and a turn of a more urgent class before others. So a turn
that is lifted takes the turns before it along, and one that is lowered those behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from penstock.gateway.view.request_state import RequestState
from penstock.schemas.topics import RANKS, priority_class

StateT = TypeVar("StateT", bound=RequestState)


def in_line(entry: RequestState) -> bool:
    """Whether its conversation has an order that it must keep. A summary is no turn."""
    return entry.conversation_id is not None and entry.task != "summarization"


def rank_of(priority: int) -> int:
    """Of its class: lower starts first."""
    return RANKS[priority_class(priority)]


def moved_turns(turns: Iterable[StateT], is_chosen: Callable[[StateT], bool], priority: int) -> list[StateT]:
    """The turns to move, in the order of their commands: after each of these the turns are in the log's order too.

    Lifted ones go from the first on, lowered ones from the last on.
    """
    rank = rank_of(priority)
    line = sorted((turn for turn in turns if turn.may_move and in_line(turn)), key=_place)
    chosen = [turn for turn in line if turn.priority != priority and is_chosen(turn)]
    ids = {turn.request_id for turn in chosen}
    last = max((_place(turn) for turn in chosen if rank_of(turn.priority) > rank), default=None)
    first = min((_place(turn) for turn in chosen if rank_of(turn.priority) < rank), default=None)
    lifted = [
        turn
        for turn in line
        if rank_of(turn.priority) > rank and (turn.request_id in ids or (last is not None and _place(turn) < last))
    ]
    lowered = [
        turn
        for turn in reversed(line)
        if rank_of(turn.priority) < rank and (turn.request_id in ids or (first is not None and _place(turn) > first))
    ]
    return [*lifted, *lowered, *(turn for turn in chosen if rank_of(turn.priority) == rank)]


def _place(turn: RequestState) -> tuple[int, int]:
    return (turn.accepted_ms, 0 if turn.origin is None else turn.origin.offset)
