"""Known defects of `penstock webhooks`, as small patches. Each must be found."""

# pyright: reportPrivateUsage=false, reportUnknownLambdaType=false

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from penstock.gateway.held_offsets import HeldOffsets
from penstock.gateway.webhooks import dispatcher
from penstock.gateway.webhooks.deliveries import Deliveries, Room, partition_of
from penstock.gateway.webhooks.dispatcher import Dispatcher
from penstock.gateway.webhooks.policy import FAILED, WAITING
from penstock.gateway.webhooks.results import ResultLog

Patch = tuple[Any, str, Any]


def commits_what_was_read(self: HeldOffsets[Any]) -> dict[Any, int]:
    """The offset passes over requests that have not ended."""
    due = {tp: one.position for tp, one in self._partitions.items() if one.position > one.committed}
    for tp, position in due.items():
        self._partitions[tp].committed = position
    return due


def settles_before_it_is_kept(self: Dispatcher, delivery: Any) -> Any:
    self._log.settle(partition_of(delivery), (delivery.tenant, delivery.request_id))
    return _PARK(self, delivery)


def any_terminal_event_counts(self: ResultLog, tp: Any, offset: int, at_ms: int, event: Any) -> bool:
    return _ON_EVENT(self, tp, offset, at_ms, event) or event.is_terminal


def loads_nothing(self: Deliveries, delivery: Any) -> bool:
    """Whoever gets a partition does not go on with what waits."""
    return delivery.attempts != [] or _ADD(self, delivery)


async def gives_away_at_once(self: Dispatcher, partitions: list[Any]) -> None:
    """Another gets the partitions while calls are under way."""
    self._owned.difference_update(partitions)
    self.work.commit()
    for tp in partitions:
        self._log.revoke(tp)
    self._deliveries.revoke(partitions)


async def fails_without_letter(self: Dispatcher, delivery: Any, outcome: Any, why: str) -> None:
    await self._end(delivery, FAILED)


def erasures_are_not_heard(self: Dispatcher, key: Any, at_ms: int) -> None:
    """The request stays as it is."""


def raises(delivery: Any, error: Exception) -> Any:
    raise error


def cannot_be_signed(*arguments: Any) -> Any:
    raise ValueError("as of a record that nobody can write out")


def gone_is_tried_again(answer: Any, attempts: int, now_ms: int, created_ms: int, rules: Any, chance: float) -> Any:
    if answer.status_code == 410:
        return WAITING, now_ms + 1_000
    return _DECIDE(answer, attempts, now_ms, created_ms, rules, chance)


def gives_up_early(answer: Any, attempts: int, now_ms: int, created_ms: int, rules: Any, chance: float) -> Any:
    return (FAILED, None) if attempts >= 4 else _DECIDE(answer, attempts, now_ms, created_ms, rules, chance)


_PARK, _ON_EVENT, _ADD, _DECIDE = Dispatcher._park, ResultLog.on_event, Deliveries.add, dispatcher.decide

PLANTS: dict[str, tuple[list[Patch], str, int]] = {
    "commits_what_was_read": ([(HeldOffsets, "commits", commits_what_was_read)], "committed_past", 0),
    "settles_before_it_is_kept": ([(Dispatcher, "_park", settles_before_it_is_kept)], "committed_past", 4),
    "any_terminal_event_counts": ([(ResultLog, "on_event", any_terminal_event_counts)], "early", 0),
    "loads_nothing": ([(Deliveries, "add", loads_nothing)], "lost", 1),
    "gives_away_at_once": ([(Dispatcher, "revoked", gives_away_at_once)], "repeated", 42),
    "fails_without_letter": ([(Dispatcher, "_fail_it", fails_without_letter)], "letter", 0),
    "erasures_are_not_heard": ([(Dispatcher, "erased", erasures_are_not_heard)], "erased", 30),
    "gone_is_tried_again": ([(dispatcher, "decide", gone_is_tried_again)], "repeated", 0),
    "gives_up_early": ([(dispatcher, "decide", gives_up_early)], "lost", 1),
    "left_to_the_topic_for_good": ([(Deliveries, "to_load", lambda self: set())], "lost", 3),
    "hosts_take_all_calls": ([(Room, "per_host", property(lambda self: self.in_flight))], "host", 1),
    "one_that_raises_ends_all": (
        [(dispatcher, "unsendable", raises), (dispatcher, "signed_headers", cannot_be_signed)],
        "over",
        1,
    ),
    "one_call_after_another": ([(Deliveries, "_is_full", lambda self: self.in_flight > 0)], "held_up", 1),
}
"""The patches, the promise that does not hold then, and a seed that shows it."""


@contextmanager
def planted(name: str | None) -> Generator[None]:
    patches = PLANTS[name][0] if name else []
    with ExitStack() as stack:
        for where, attribute, value in patches:
            stack.enter_context(patch.object(where, attribute, value))
        yield
