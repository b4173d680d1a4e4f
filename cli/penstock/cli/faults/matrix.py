"""Which rows the fault table has: parts that are struck, moments, controls, and pairs that do not exist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

from penstock.cli.faults.checker import CLEAN, LOST, UNPROVEN

PARTS: Mapping[str, str] = {
    "gateway": "kill -9 of the gateway",
    "worker": "kill -9 of the worker, and with it of its engines",
    "engine": "kill -9 of the process that holds a real model",
    "broker": "kill -9 of the only Kafka broker",
    "worker+gateway": "kill -9 of both, one right after the other",
    "worker+broker": "kill -9 of both, one right after the other",
    "webhooks": "kill -9 of the sender of webhooks",
    "store": "the store of artifacts answers every call with an error",
    "disk": "the disk under broker, worker and gateway has no byte left, until the broker has ended of it",
}
MOMENTS: Mapping[str, str] = {
    "accepted": "every request is acknowledged, no worker has taken one",
    "queued": "a worker holds every request, nearly all of them wait for a slot",
    "loading": "every request waits for its model, which is being loaded",
    "mid_stream": "every request is acknowledged, and most streams that can run at once have begun",
    "result_commit": "every request is acknowledged, the worker stands before the commit of an outcome",
    "retry_wait": "the model's server has refused each request, each waits for its next attempt",
    "drain": "the worker was told to stop, and lets its running requests end",
    "webhook": "a receiver of a webhook has been called and has not answered",
}
NOT_THERE: Mapping[tuple[str, str], str] = {
    ("engine", "accepted"): "no engine has work yet",
    ("engine", "result_commit"): "the engine has ended its work for these requests",
    ("engine", "retry_wait"): "what waits there has failed at a server of others; the worker runs no process for it",
    ("engine", "webhook"): "the engine has ended its work for these requests",
    **{
        ("webhooks", moment): "the sender follows outcomes only: before one there is nothing of it to lose"
        for moment in MOMENTS
        if moment != "webhook"
    },
    **{
        ("store", moment): "the store is asked when a run has ended, so this is the same as mid_stream"
        for moment in ("accepted", "queued", "loading", "retry_wait")
    },
    ("store", "result_commit"): "what goes to the store is there before the outcome is published",
    ("store", "webhook"): "a webhook's body refers to the store and is made without it",
    ("disk", "loading"): "a load writes nothing: the same as queued",
    ("disk", "retry_wait"): "the wait writes nothing: the same as queued",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One row that is to be run."""

    row: str
    """The part that is struck; `none` in a control."""
    moment: str
    control: str | None = None
    expected: str = CLEAN

    @property
    def name(self) -> str:
        return f"{self.row}:{self.moment}" if self.control is None else self.control.replace(" ", "-")

    @property
    def strikes(self) -> Sequence[str]:
        """The parts, in the order in which they are struck."""
        return [] if self.row == "none" else self.row.split("+")


CONTROLS = (
    Plan(row="none", moment="mid_stream", control="no fault"),
    Plan(row="worker", moment="mid_stream", control="wrong target", expected=UNPROVEN),
    Plan(row="worker", moment="result_commit", control="planted bug", expected=LOST),
)
ROWS = tuple(Plan(row=part, moment=moment) for part in PARTS for moment in MOMENTS if (part, moment) not in NOT_THERE)
_QUICK = ("gateway:mid_stream", "worker:mid_stream", "worker:result_commit", "broker:accepted", "engine:mid_stream")


def plans(*, quick: bool, patterns: Sequence[str] = ()) -> list[Plan]:
    """The rows that are asked for; `patterns` are those of a shell, over the rows' names."""
    chosen = [*CONTROLS, *ROWS]
    if patterns:
        return [plan for plan in chosen if any(fnmatch(plan.name, pattern) for pattern in patterns)]
    return [plan for plan in chosen if not quick or plan.control is not None or plan.name in _QUICK]
