"""The states of a request inside a worker, and every transition between them. What is not in the table is a fault.

Each transition is named by the event that causes it. `penstock.processors.core.flow` is the only place that makes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Stage(StrEnum):
    """Where a request is between its arrival and its commit."""

    NEW = "new"  # its record was read a moment ago
    QUEUED = "queued"  # in the scheduler, with its bytes
    PARKED = "parked"  # in the scheduler as facts only: its bytes are read again when its turn is near
    FETCHING = "fetching"  # in the scheduler; its bytes are being read again
    PREPARING = "preparing"  # in the scheduler; its conversation is read and its prompt counted
    READY = "ready"  # in the scheduler; its need is known
    BEGINNING = "beginning"  # granted; its turn's input is being appended to the conversation
    RUNNING = "running"  # granted; it is on the engine
    SCHEDULED = "scheduled"  # a fact only: its caller named a time to start that lies ahead
    RETRYING = "retrying"  # an attempt failed; the next one is not due yet
    STORING = "storing"  # it has finished; its answer or artifact is being kept
    AWAITING_STORE = (
        "awaiting_store"  # it has finished; the store of artifacts did not take its output, and will be asked again
    )
    CHECKING_FOR_ANSWER = "checking_for_answer"  # it shall end without an answer; its conversation may hold one already
    DEAD_LETTERING = "dead_lettering"  # its dead letter is under way to the broker
    PUBLISHING = "publishing"  # its terminal event is under way to the broker
    MOVING = "moving"  # its record is being published where its conversation belongs, or its model is served
    DONE = "done"  # the broker has what replaces it: its offset may be committed
    DROPPED = "dropped"  # its partition went elsewhere, or the worker stops: nothing of it may be published


NOT_DUE = frozenset({Stage.RETRYING, Stage.SCHEDULED})
"""Waiting for a time, outside of the scheduler."""

IN_SCHEDULER = frozenset({Stage.QUEUED, Stage.PARKED, Stage.FETCHING, Stage.PREPARING, Stage.READY})
"""Waiting for a grant."""

ON_LANE = frozenset({Stage.BEGINNING, Stage.RUNNING})
"""Holding a grant: a slot and tokens of a lane."""

ENDING = frozenset(
    {
        Stage.STORING,
        Stage.AWAITING_STORE,
        Stage.CHECKING_FOR_ANSWER,
        Stage.DEAD_LETTERING,
        Stage.PUBLISHING,
        Stage.MOVING,
    }
)
"""Its end is decided: neither a cancel nor a timeout changes it, but for one whose output the store does not take."""

OVER = frozenset({Stage.DONE, Stage.DROPPED})

_S = Stage
_END_WAITING: dict[str, tuple[Stage, ...]] = {
    # An end without a run. A conversation is looked at first: a worker that died may have appended the answer.
    "cancel": (_S.PUBLISHING, _S.CHECKING_FOR_ANSWER),
    "expire": (_S.PUBLISHING, _S.CHECKING_FOR_ANSWER),
    "drop": (_S.DROPPED,),
}

TABLE: Mapping[Stage, Mapping[str, tuple[Stage, ...]]] = {
    _S.NEW: {
        "arrive": (_S.QUEUED, _S.PARKED, _S.SCHEDULED),
        "arrive_ended": (_S.PUBLISHING, _S.CHECKING_FOR_ANSWER),  # invalid, cancelled or expired before it was taken
        "arrive_poison": (_S.DEAD_LETTERING, _S.CHECKING_FOR_ANSWER),
        "arrive_elsewhere": (_S.MOVING,),
    },
    _S.SCHEDULED: {
        "due": (_S.PARKED,),
        "fetch": (_S.FETCHING,),  # it ends, or its record is written again at the end of its partition
        "drop": (_S.DROPPED,),
    },
    _S.QUEUED: {
        "prepare": (_S.PREPARING,),
        "grant": (_S.RUNNING,),  # an engine that prepares as it begins
        "pass_on": (_S.MOVING,),  # its model can never be loaded here, and another worker serves it
        "park": (_S.PARKED,),  # the share of its class has no room for its bytes any more
        "lane_failed": (_S.PUBLISHING, _S.CHECKING_FOR_ANSWER),
        **_END_WAITING,
    },
    _S.PARKED: {
        "fetch": (_S.FETCHING,),
        "drop": (_S.DROPPED,),
    },
    _S.FETCHING: {
        "fetched": (_S.QUEUED,),
        "park": (_S.PARKED,),  # it has another class now, whose share has no room for its bytes
        "gone": (_S.DEAD_LETTERING, _S.CHECKING_FOR_ANSWER),  # its record was deleted, or another is in its place
        "fetched_to_end": (_S.PUBLISHING, _S.CHECKING_FOR_ANSWER),  # it was cancelled, or expired, as a fact
        "fetched_to_pass": (_S.MOVING,),  # another worker serves its model
        "drop": (_S.DROPPED,),
    },
    _S.PREPARING: {
        "prepared": (_S.READY,),
        "refused": (_S.PUBLISHING, _S.DEAD_LETTERING, _S.CHECKING_FOR_ANSWER, _S.RETRYING, _S.QUEUED),
        "answer_stands": (_S.PUBLISHING, _S.STORING),
        "elsewhere": (_S.QUEUED,),  # nothing new starts on the replica that prepares it
        "replica_down": (_S.QUEUED, _S.DEAD_LETTERING, _S.CHECKING_FOR_ANSWER, _S.RETRYING),
        **_END_WAITING,
    },
    _S.READY: {
        "grant": (_S.BEGINNING, _S.RUNNING),
        "elsewhere": (_S.QUEUED,),  # the replica that prepared it has no room, or takes no more
        "replica_down": (_S.QUEUED,),
        **_END_WAITING,
    },
    _S.BEGINNING: {
        "begun": (_S.RUNNING,),
        "log_moved": (_S.QUEUED,),
        "refused": (_S.PUBLISHING, _S.CHECKING_FOR_ANSWER),
        "replica_down": (_S.QUEUED,),
        "cancel": (_S.PUBLISHING, _S.CHECKING_FOR_ANSWER),
        "drop": (_S.DROPPED,),
    },
    _S.RUNNING: {
        "finished": (_S.PUBLISHING, _S.STORING),
        "failed": (_S.PUBLISHING, _S.DEAD_LETTERING, _S.RETRYING),
        "replica_down": (_S.QUEUED, _S.DEAD_LETTERING, _S.RETRYING),
        "cancel": (_S.PUBLISHING,),
        "timeout": (_S.DEAD_LETTERING, _S.RETRYING),
        "drop": (_S.DROPPED,),
    },
    _S.RETRYING: {
        "due": (_S.QUEUED, _S.PARKED),
        "fetch": (_S.FETCHING,),  # it ends, and its bytes are not here
        "lane_failed": (_S.PUBLISHING, _S.CHECKING_FOR_ANSWER),
        "cancel": (_S.PUBLISHING, _S.CHECKING_FOR_ANSWER),
        "drop": (_S.DROPPED,),
    },
    _S.STORING: {
        "stored": (_S.PUBLISHING,),
        "not_stored": (_S.AWAITING_STORE,),
        "store_failed": (
            _S.PUBLISHING,
            _S.CHECKING_FOR_ANSWER,
        ),  # what was to be appended may be in its conversation
        "drop": (_S.DROPPED,),
    },
    _S.AWAITING_STORE: {
        "store": (_S.STORING,),
        "cancel": (_S.PUBLISHING, _S.CHECKING_FOR_ANSWER),
        "expire": (_S.PUBLISHING, _S.CHECKING_FOR_ANSWER),
        "drop": (_S.DROPPED,),
    },
    _S.CHECKING_FOR_ANSWER: {"answer_checked": (_S.PUBLISHING, _S.STORING, _S.DEAD_LETTERING), "drop": (_S.DROPPED,)},
    _S.DEAD_LETTERING: {"dead_lettered": (_S.PUBLISHING, _S.DONE), "drop": (_S.DROPPED,)},
    _S.PUBLISHING: {"delivered": (_S.DONE,), "drop": (_S.DROPPED,)},
    _S.MOVING: {
        "moved": (_S.DONE,),
        "unmovable": (
            _S.DEAD_LETTERING,
            _S.PUBLISHING,
            _S.CHECKING_FOR_ANSWER,
        ),  # it cannot be written again, or there is no such pool
        "drop": (_S.DROPPED,),
    },
    _S.DONE: {},
    _S.DROPPED: {},
}
"""Stage → event → stages that may follow."""

Transition = tuple[str, str, str]
"""(stage, event, next stage)"""

TRANSITIONS: frozenset[Transition] = frozenset(
    (stage, event, after) for stage, events in TABLE.items() for event, follow in events.items() for after in follow
)


class IllegalTransition(RuntimeError):
    """An event met a request in a state where it cannot happen."""


def check(stage: Stage, event: str, after: Stage) -> None:
    """Raises IllegalTransition for what is not in the table."""
    if (stage, event, after) not in TRANSITIONS:
        raise IllegalTransition(f"{event} cannot bring a request from {stage} to {after}")
