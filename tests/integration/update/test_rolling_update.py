"""All parts are replaced one after another, under load: an older release by this one, another file, and back.

Half of the parts get SIGTERM, half SIGKILL. Nothing that was accepted fails, and a client sees no more than a 503 with
`Retry-After` or a stream that it continues.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from statistics import quantiles

import pytest

from penstock.schemas.codec import default_codec
from penstock.schemas.records import InferenceRequest
from support import create_topics, wait_until
from system import System
from update_drill import (
    ADDED,
    BESIDE,
    CHAT,
    ECHO,
    GATEWAYS,
    KILL,
    LATE,
    SIDE,
    SUM,
    TERM,
    WORKERS,
    Drill,
    Step,
)

IN_ORDER = (*WORKERS, *GATEWAYS, *BESIDE)
"""As docs/runbook.md has it: workers first."""


def alternating(names: tuple[str, ...], first: str, second: str) -> dict[str, str]:
    return {name: (first, second)[number % 2] for number, name in enumerate(names)}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.alone
def test_a_rolling_update_of_everything(make_system: Callable[..., System]) -> None:
    with ExitStack() as stack:
        drill = Drill(make_system(), stack)
        drill.release(older=True)
        drill.start(*IN_ORDER)
        drill.clients.models = ["chat", "talker", "side", "leaving"]
        with drill.loaded():
            with drill.step("older release"):
                pass
            drill.release(older=False)
            drill.replace(alternating(IN_ORDER, TERM, KILL))
            change_the_file(drill)
            add_a_pool_and_remove_it(drill)
            drill.release(older=True)
            drill.replace(alternating(IN_ORDER[::-1], KILL, TERM))
        print(table(drill))
        check_clients(drill)
        check_records(drill)


def change_the_file(drill: Drill) -> None:
    """A model is added, a model and an alias are removed, a setting changes."""
    drill.clients.models = ["chat", "side"]  # first nobody asks for what goes
    drill.calls_are_answered()
    system = drill.system
    system.models = ({**CHAT, "aliases": []}, ECHO, SUM, SIDE, ADDED)
    system.worker_options = {**system.worker_options, "commit_interval_s": 0.3}
    drill.replace(alternating(WORKERS, KILL, TERM))
    drill.clients.models = ["chat", "side", "added"]
    drill.replace(alternating(GATEWAYS, TERM, KILL))


def add_a_pool_and_remove_it(drill: Drill) -> None:
    system, models = drill.system, drill.system.models
    with drill.step("pool added"):
        create_topics(system.bootstrap, system.prefix, pool="late")
        system.models = (*models, LATE)
        drill.start("w4")
        drill.clients.models = ["chat", "late", "added"]
    with drill.step("pool removed"):
        drill.clients.models = ["chat", "side", "added"]
        drill.calls_are_answered()
        drill.end("w4", TERM)
        system.models = models


def check_clients(drill: Drill) -> None:
    """They saw nothing worse than a 503 that says when to retry. Connections broke only under a killed gateway."""
    assert Counter(drill.seen.faults) == {}
    for step in drill.steps:
        cuts = count(drill, step, "cut")
        assert step.killed == "g" or not cuts, f"{step.name}: {cuts} connections broke"
    covered = [drill.clients.summaries(conversation) for conversation in drill.clients.conversations]
    assert any(covered)
    assert all(one == sorted({*one}) for one in covered), "no span is summed up twice"
    wait_until(lambda: {*drill.clients.called_back} <= {*drill.called}, 60, "each receiver is called")
    wait_until(lambda: answered(drill) == {*drill.asked}, 60, "each message of the queue is answered")


def answered(drill: Drill) -> set[str]:
    return {json.loads(message.value() or b"")["id"] for message in drill.system.read(f"{drill.queue}-results")}


def check_records(drill: Drill) -> None:
    """Each accepted request has one outcome, and completed."""
    system, codec = drill.system, default_codec()
    topics = [topic for pool in (None, "side", "late") for topic in system.names.request_topics(pool)]
    values = [message.value() or b"" for topic in topics for message in system.read(topic)]
    assert len({value[:5] for value in values}) == 2, "requests were written in the versions of both releases"
    accepted = {codec.decode(value, InferenceRequest).request_id for value in values}
    wait_until(lambda: accepted <= system.outcomes().keys(), 60, lambda: accepted - system.outcomes().keys())
    outcomes = system.outcomes()
    assert Counter(event.status for event in outcomes.values()) == {"completed": len(accepted)}
    assert system.dead_letters() == []
    assert any(event.since is not None for event in outcomes.values()), "no run was handed to another worker"
    assert sum(event.tenant == "team" for event in outcomes.values()) == len(drill.asked), "each message ran once"


def count(drill: Drill, step: Step, what: str) -> int:
    return sum(name == what and step.begin <= at < step.end for at, name in drill.seen.marks)


def table(drill: Drill) -> str:
    lines = ["step                  s    503  continued  cut  longest gap s  chats  p50 s  p99 s"]
    for step in drill.steps:
        chats = sorted(took for at, took in drill.seen.chats if step.begin <= at < step.end)
        hundredths = quantiles(chats, n=100, method="inclusive") if len(chats) > 1 else [0.0] * 99
        gap = max((gap for at, gap in drill.seen.gaps if step.begin <= at < step.end), default=0)
        marks = [count(drill, step, what) for what in ("503", "continued", "cut")]
        lines.append(
            f"{step.name:18} {step.end - step.begin:5.1f} {marks[0]:5} {marks[1]:10} {marks[2]:4} {gap:14.1f}"
            f" {len(chats):6} {hundredths[49]:6.1f} {hundredths[98]:6.1f}"
        )
    return "\n".join(lines)
