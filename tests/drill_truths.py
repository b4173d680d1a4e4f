"""What is true of a model and its requests in the operator's drill: outcomes, reasons to wait, facts in lists. Pure.

A combination is an order that meets a model in a state. `operators_drill.py` brings it about, and holds what the
gateway says against this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ORDERS = ("load", "unload", "pause", "resume", "replace", "remove", "pin")
STATES = ("idle", "waiting", "running", "loading", "turns")
FOLLOWERS = ("nothing", "worker restart", "gateway restart")

TOKEN_MS = 50
LONG, SHORT = 100, 4
"""Tokens of a run that is on the engine at the order, and of another."""

ROLES = {
    "idle": (),
    "waiting": ("runs", "waits", "waits behind"),
    "running": ("runs",),
    "loading": ("waits",),
    "turns": ("runs", "second turn"),
}
"""The requests of a state, in the order of their acceptance. The one that `runs` is on the engine at the order."""


@dataclass(frozen=True, slots=True)
class Combination:
    """An order that meets a model in a state. Each has a model of its own."""

    order: str
    state: str

    @property
    def model(self) -> str:
        return f"{self.order}-{self.state}"

    @property
    def conversation(self) -> str | None:
        return f"talk-{self.order}" if self.state == "turns" else None

    @property
    def was_asked_before(self) -> bool:
        """Whether somebody had it loaded by a request. To pin it is then the only reason to load it after a restart."""
        return (self.order, self.state) == ("pin", "idle")

    @property
    def is_preloaded(self) -> bool:
        return self.state != "loading" and (self.order, self.state) not in (("load", "idle"), ("pin", "idle"))

    def entry(self, hold: str) -> dict[str, Any]:
        """Its `[[models]]` table. While the file `hold` exists, what runs does not end, and in `loading` no load does.

        Nothing but the order loads it in `load`, `idle`.
        """
        options = {"tokens": LONG, "delay_ms": TOKEN_MS, "slots": 1 if self.state == "waiting" else 4}
        if self.state in ("waiting", "running", "loading", "turns"):
            options["hold"] = hold
        return self._table(preload=self.is_preloaded, options=options)

    def replacement(self) -> dict[str, Any]:
        """What `replace` puts in its place: it answers with what it was asked, so that the answer names its engine."""
        return self._table(preload=True, options={"echo": True, "delay_ms": 1, "slots": 4, "load_ms": 300})

    def _table(self, **fields: Any) -> dict[str, Any]:
        return {"id": self.model, "source": "noop", "engine": "noop", "tasks": ["text_generation"], **fields}


COMBINATIONS = tuple(Combination(order, state) for order in ORDERS for state in STATES)


@dataclass(slots=True)
class World:
    """What the drill knows of the system at a moment."""

    worker_up: bool = True
    worker_was_killed: bool = False
    ordered: bool = False
    """The orders were acknowledged."""
    paused: set[str] = field(default_factory=set[str])
    """Models that are paused now."""


@dataclass(frozen=True, slots=True)
class Outcome:
    status: str
    engine: str | None = None
    """`old` or `new`: which engine made the answer."""
    code: str | None = None


def outcome_of(combination: Combination, role: str, world: World) -> Outcome:
    """What runs at the order ends where it runs, unless its worker is killed. All others meet what was ordered."""
    ends_where_it_runs = role == "runs" and not world.worker_was_killed
    if combination.order == "remove" and not ends_where_it_runs:
        return Outcome("failed", code="model_not_found")
    if combination.order == "replace" and not ends_where_it_runs:
        return Outcome("completed", engine="new")
    return Outcome("completed", engine="old")


def reasons_of(
    combination: Combination, role: str, open_roles: Mapping[str, str], state: str | None, world: World
) -> set[str]:
    """Which reasons to wait are true of a request. None of them is: it must start, or end.

    `open_roles`: the statuses of the model's requests that have no outcome. `state`: the model's, as the list says.
    """
    if not world.worker_up:
        return {"no_worker"}
    behind_turn = role == "second turn" and "runs" in open_roles
    if combination.model in world.paused:
        return {"paused", "conversation"} if behind_turn else {"paused"}
    if behind_turn:
        return {"conversation"}
    if world.ordered and combination.order == "remove":
        return set()
    if state != "ready":
        return {"model_loading"}
    return {"class"} if _slot_is_taken(combination, role, open_roles, world) else set()


STATUS_OF = {"memory": "waiting_for_memory", "model_loading": "loading_model"}


def fits(status: str | None, reason: str | None) -> bool:
    """Whether the status of a request that waits says nothing else than its reason. `queued` says nothing."""
    return status not in STATUS_OF.values() or STATUS_OF.get(reason or "") == status


def _slot_is_taken(combination: Combination, role: str, open_roles: Mapping[str, str], world: World) -> bool:
    """Only models of the state `waiting` have one slot. After these orders the long run is on an engine that ends."""
    if combination.state != "waiting":
        return False
    on_ending_engine = world.ordered and combination.order in ("unload", "replace") and not world.worker_was_killed
    others = {name for name in open_roles if name != role}
    return bool(others - {"runs"} if on_ending_engine else others)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """How a model must stand in the lists; None for `state`: any that fits its requests."""

    listed: bool
    paused: bool
    pinned: bool
    available: bool


def model_facts(combination: Combination, world: World) -> ModelFacts:
    return ModelFacts(
        listed=not (world.ordered and combination.order == "remove"),
        paused=combination.model in world.paused,
        pinned=world.ordered and combination.order == "pin",
        available=world.worker_up,
    )


def final_state(combination: Combination, world: World) -> str | None:
    """The state of the model once all its requests have ended; None: it is not listed any more."""
    if combination.order == "remove":
        return None
    if combination.order == "unload":
        asked_since = combination.state in ("waiting", "loading", "turns") or (
            combination.state == "running" and world.worker_was_killed
        )
        return "ready" if asked_since else "absent"
    return "ready"


def history_of(combination: Combination, answers: Mapping[str, str]) -> list[tuple[str, str]]:
    """The conversation of the state `turns`: each turn that was answered stands whole, in the order of acceptance."""
    turns: list[tuple[str, str]] = []
    for role in ROLES["turns"]:
        if role in answers:
            turns += [("user", question(combination, role)), ("assistant", answers[role])]
    return turns


def question(combination: Combination, role: str) -> str:
    return f"{combination.model}: {role}?"
