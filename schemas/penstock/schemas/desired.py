"""Desired state: what operators ordered of a model or class, its key on the topic, and how an order changes it.

The topic is compacted, so a record holds the whole state: an order is merged into the state that was there before.
"""

from __future__ import annotations

import dataclasses

from penstock.schemas.errors import InvalidRequest
from penstock.schemas.records import DesiredState
from penstock.schemas.topics import CLASSES

MODEL, CLASS = "model", "class"
MODEL_ORDERS = ("load", "unload", "pin", "unpin", "pause", "resume", "add", "remove")
CLASS_ORDERS = ("pause", "resume")


def desired_key(kind: str, name: str, pool: str | None) -> str:
    """`{kind}/{name}` for the common pool, `{kind}/{name}@{pool}` for others."""
    return f"{kind}/{name}" if pool is None else f"{kind}/{name}@{pool}"


def key_of(state: DesiredState) -> str:
    return desired_key(state.kind, state.name, state.pool)


def model_key(model: str, pool: str | None) -> str:
    """The key of a model's facts on `inference.model`: two pools may have models of one name."""
    return model if pool is None else f"{model}@{pool}"


def ordered(
    former: DesiredState | None,
    *,
    kind: str,
    name: str,
    pool: str | None,
    action: str,
    now_ms: int,
    entry: str | None = None,
    by: str | None = None,
) -> DesiredState:
    """The state after an order. `entry` is the `[[models]]` table of a model to `add`, as JSON.

    Raises InvalidRequest for an order that there is not.
    """
    if action not in (CLASS_ORDERS if kind == CLASS else MODEL_ORDERS if kind == MODEL else ()):
        raise InvalidRequest(f"a {kind} has no action {action}", param="action")
    if kind == CLASS and name not in CLASSES:
        raise InvalidRequest(f"the class {name} does not exist; there are {', '.join(CLASSES)}", param="class")
    if (action == "add") != (entry is not None):
        raise InvalidRequest("an entry goes with the order to add, and must be there", param="entry")
    state = former or DesiredState(kind=kind, name=name, pool=pool, action=action, created_at=now_ms)
    state = dataclasses.replace(state, action=action, created_at=now_ms, created_by=by)
    kept_loaded = None if state.loaded is False else state.loaded  # an earlier unload ends when it is to be served
    match action:
        case "load" | "unload":
            return dataclasses.replace(state, loaded=action == "load")
        case "pin":
            return dataclasses.replace(state, pinned=True, loaded=kept_loaded)
        case "unpin":
            return dataclasses.replace(state, pinned=False)
        case "pause" | "resume":
            return dataclasses.replace(state, paused=action == "pause")
        case "add":
            return dataclasses.replace(state, removed=False, entry=entry, loaded=kept_loaded)
        case _:  # orders about a model that is gone do not come back with another of its name
            return dataclasses.replace(state, removed=True, entry=None, loaded=None, pinned=None, paused=False)
