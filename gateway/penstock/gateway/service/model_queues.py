"""What waits by class, model and pool, as the scalers of workers need it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from penstock.common.labels import NONE, OTHER
from penstock.gateway.metrics import ModelQueue
from penstock.gateway.view.census import Waiting
from penstock.schemas.desired import CLASS, MODEL
from penstock.schemas.records import DesiredState, ModelInfo
from penstock.schemas.topics import CLASSES


def model_queues(
    models: Sequence[ModelInfo], waiting: Iterable[tuple[str, Waiting]], now_ms: int
) -> tuple[dict[ModelQueue, int], dict[ModelQueue, float]]:
    """(requests that wait, age in seconds of the oldest). A known model for which nothing waits has 0.

    Any name may stand on the topics: those that are not known are `other` together, models and pools.
    """
    named = {(name, one.pool): one.model for one in models for name in (one.model, *one.aliases)}
    pools = {one.pool for one in models} | {None}
    depths = {(klass, one.model, one.pool or ""): 0 for one in models for klass in CLASSES}
    ages = dict.fromkeys(depths, 0.0)
    for klass, one in waiting:
        model = NONE if one.model is None else named.get((one.model, one.pool), OTHER)
        queue = klass, model, (one.pool or "") if one.pool in pools else OTHER
        depths[queue] = depths.get(queue, 0) + one.requests
        age_s = 0.0 if one.since_ms is None else max(0, now_ms - one.since_ms) / 1000
        ages[queue] = max(ages.get(queue, 0.0), age_s)
    return depths, ages


def paused_queues(queues: Iterable[ModelQueue], orders: Iterable[DesiredState]) -> Set[ModelQueue]:
    """Those of which nothing starts, by an order about their class or model."""
    paused = {(one.kind, one.name, one.pool or "") for one in orders if one.paused}
    return {
        (klass, model, pool)
        for klass, model, pool in queues
        if not paused.isdisjoint(((CLASS, klass, pool), (MODEL, model, pool)))
    }
