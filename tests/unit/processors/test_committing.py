"""The committer: one commit at a time, what was refused is said again, an older generation's answer counts nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from penstock.processors.committing import Committer
from penstock.processors.core.commit.commit import Commit
from support import wait_until_async

TP = ("low", 0)
OTHER = ("low", 1)
Offsets = dict[tuple[str, int], tuple[int, str]]


class Group:
    """The broker's side: keeps what is asked, and answers when a test lets it."""

    def __init__(self) -> None:
        self.asked: list[Offsets] = []
        self.refused: set[tuple[str, int]] = set()
        self.error: Exception | None = None
        self.answers = asyncio.Event()
        self.answers.set()
        self.is_member = True
        self.asked_for_membership = 0

    def joined(self) -> bool:
        self.asked_for_membership += 1
        return self.is_member

    async def commit(self, offsets: Mapping[tuple[str, int], tuple[int, str]]) -> dict[tuple[str, int], bool]:
        self.asked.append(dict(offsets))
        await self.answers.wait()
        if self.error is not None:
            raise self.error
        return {tp: tp not in self.refused for tp in offsets}


def gate_of(*tps: tuple[str, int], records: int = 5) -> Commit:
    """A gate that holds some unfinished records of each partition."""
    gate = Commit(commit_span=100)
    gate.assign(dict.fromkeys(tps, (0, "")), 1)
    for tp in tps:
        gate.delivered(tp, 0, records, range(records))
        for offset in range(records):
            gate.arrive(tp, offset, f"{tp}{offset}")
    return gate


def committer(gate: Commit, group: Group) -> Committer:
    return Committer(gate, group.commit, group.joined, interval_s=0.001)


async def test_one_commit_at_a_time_and_the_next_carries_what_has_gathered() -> None:
    gate, group = gate_of(TP), Group()
    group.answers.clear()
    commits = committer(gate, group)
    gate.complete(TP, 0)
    first = asyncio.create_task(commits.commit_now())
    await wait_until_async(lambda: group.asked)
    second = asyncio.create_task(commits.commit_now())
    gate.complete(TP, 1)
    gate.complete(TP, 2)
    for _ in range(5):
        await asyncio.sleep(0)
    assert group.asked == [{TP: (1, "")}]
    group.answers.set()
    await asyncio.gather(first, second)
    assert group.asked == [{TP: (1, "")}, {TP: (3, "")}]


async def test_what_is_refused_or_raises_is_said_again_and_nothing_else() -> None:
    gate, group = gate_of(TP, OTHER), Group()
    for tp in (TP, OTHER):
        gate.complete(tp, 0)
    commits, both = committer(gate, group), {TP: (1, ""), OTHER: (1, "")}
    group.error = RuntimeError("the consumer is closed")
    await commits.commit_now()
    assert gate.commits() == both
    group.error, group.refused = None, {OTHER}
    await commits.commit_now()
    group.refused = set()
    await commits.commit_now()
    assert group.asked == [both, both, {OTHER: (1, "")}]
    assert gate.commits() == {}


async def test_an_answer_of_an_older_generation_is_not_believed() -> None:
    gate, group = gate_of(TP), Group()
    group.answers.clear()
    gate.complete(TP, 0)
    committing = asyncio.create_task(committer(gate, group).commit_now())
    await wait_until_async(lambda: group.asked)
    gate.assign({TP: (0, "")}, 2)  # the broker says that it has not taken the commit
    group.answers.set()
    await committing
    assert gate.commits() == {TP: (1, "")}


async def test_it_commits_now_and_then_but_only_in_a_group() -> None:
    gate, group = gate_of(TP), Group()
    group.is_member = False
    gate.complete(TP, 0)
    running = asyncio.create_task(committer(gate, group).run_forever())
    try:
        await wait_until_async(lambda: group.asked_for_membership >= 3)
        assert group.asked == []
        group.is_member = True
        await wait_until_async(lambda: group.asked == [{TP: (1, "")}])
        group.error = RuntimeError("away")
        gate.complete(TP, 1)
        await wait_until_async(lambda: len(group.asked) > 2)
        group.error = None
        await wait_until_async(lambda: gate.commits() == {}, describe="an error does not end it")
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
