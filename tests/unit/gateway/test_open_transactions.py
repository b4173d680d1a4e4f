"""Open transactions: which partitions are told of, for how long they are held, and whose request stands behind one."""

from __future__ import annotations

from typing import Any, cast

import pytest

from kit.gateway_records import model_info, request, worker
from penstock.common.clock import now_ms
from penstock.common.settings import KafkaSettings
from penstock.gateway.service.facts import Facts
from penstock.gateway.service.open_transactions import HELD_MS, OpenTransactions
from penstock.gateway.threads import Threads
from penstock.gateway.view.hub import Hub
from penstock.gateway.view.view import View
from penstock.schemas.records import ModelState, Origin
from penstock.schemas.topics import TP

TOPIC = "inference.request.medium"
HERE, BESIDE = (TOPIC, 0), (TOPIC, 1)
Looks = list[tuple[dict[TP, int], dict[TP, int], int]]


def of_looks(view: View, *looks: tuple[dict[TP, int], dict[TP, int], int]) -> OpenTransactions:
    made = OpenTransactions(KafkaSettings(bootstrap_servers="x"), view, Threads())
    for look in looks:
        made.note(*look)
    return made


@pytest.mark.parametrize(
    ("looks", "partitions"),
    [
        ([({HERE: 5, BESIDE: 9}, {HERE: 5, BESIDE: 9}, 0)], []),
        ([({HERE: 5}, {HERE: 8}, 0)], []),
        ([({HERE: 5}, {HERE: 8}, 0), ({HERE: 5}, {HERE: 9}, HELD_MS)], [0]),
        ([({HERE: 5}, {HERE: 8}, 0), ({HERE: 6}, {HERE: 9}, HELD_MS)], []),
        ([({HERE: 5}, {HERE: 8}, 0), ({HERE: 5}, {HERE: 5}, 1), ({HERE: 5}, {HERE: 8}, HELD_MS)], []),
        ([({HERE: 5, BESIDE: 1}, {HERE: 8, BESIDE: 4}, at) for at in (0, HELD_MS)], [0, 1]),
    ],
)
def test_a_partition_is_told_of_once_it_is_held_for_long(looks: Looks, partitions: list[int], view: View) -> None:
    problem = of_looks(view, *looks).result().problem
    assert [number for number in (0, 1) if problem and f"{TOPIC} partition {number}" in problem.text] == partitions


def test_a_request_behind_one_says_so_and_no_other(view: View) -> None:
    ends, follower = ({HERE: 5}, {HERE: 8}), cast("Any", None)
    transactions = of_looks(view, (*ends, 0), (*ends, HELD_MS))
    facts = Facts(view, follower, Hub(), transactions=transactions)
    view.fleet.workers["w"] = worker("w", ModelState(model="a", state="ready"), updated_at=now_ms())
    view.fleet.models["a", "w"] = model_info("a")

    def reason(partition: int, offset: int) -> str | None:
        origin = Origin(topic=TOPIC, partition=partition, offset=offset, append_time_ms=1)
        shown = facts.waits_unseen(view.accepted(request(f"r-{partition}-{offset}"), origin))
        return (shown.get("waiting_for") or {}).get("reason")

    assert [reason(0, 4), reason(0, 5), reason(0, 7), reason(1, 7)] == [None, "transaction", "transaction", None]
