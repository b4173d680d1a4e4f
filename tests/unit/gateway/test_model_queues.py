"""What waits by class, model and pool: what scalers of workers read."""

from __future__ import annotations

from kit.records import model_info
from penstock.gateway.metrics import GatewayMetrics, Gauges
from penstock.gateway.service.model_queues import model_queues
from penstock.gateway.view.census import Waiting

NOW = 100_000
MODELS = [model_info("m", aliases=["default"]), model_info("big", pool="gpu")]


def waiting(klass: str, model: str | None, pool: str | None, requests: int = 1, ago_s: int = 1) -> tuple[str, Waiting]:
    since_ms = NOW - 1000 * ago_s
    return klass, Waiting(task="text_generation", model=model, pool=pool, requests=requests, since_ms=since_ms)


def test_a_model_has_zeros_where_nothing_waits() -> None:
    depths, ages = model_queues(MODELS, [], NOW)
    every = {(klass, *model) for klass in ("high", "medium", "low") for model in (("m", ""), ("big", "gpu"))}
    assert depths == dict.fromkeys(every, 0)
    assert ages == dict.fromkeys(every, 0.0)


def test_names_that_are_not_known_are_counted_together() -> None:
    depths, ages = model_queues(
        MODELS,
        [
            waiting("high", "m", None, 2, ago_s=5),
            waiting("high", "default", None, 3, ago_s=7),  # the same model by its alias
            waiting("high", None, "gpu", ago_s=4),  # the pool's workers choose the model
            waiting("low", "m", "gpu"),  # no model of that pool
            waiting("low", "x", "nowhere", 4),
            waiting("low", "y", "nobody", 5, ago_s=9),
        ],
        NOW,
    )
    waits = {queue: (depth, ages[queue]) for queue, depth in depths.items() if depth}
    assert waits == {
        ("high", "m", ""): (5, 7.0),
        ("high", "none", "gpu"): (1, 4.0),
        ("low", "other", "gpu"): (1, 1.0),
        ("low", "other", "other"): (9, 9.0),
    }


def test_the_metrics_have_each_class_and_all_together() -> None:
    depths, ages = model_queues(MODELS, [waiting("high", "m", None, 2), waiting("low", "m", None, 3, ago_s=6)], NOW)
    page = GatewayMetrics(lambda: Gauges(model_depth=depths, model_oldest_age_s=ages, streams=4)).render().decode()
    assert {
        'penstock_model_depth{class="high",model="m",pool=""} 2.0',
        'penstock_model_depth{class="medium",model="big",pool="gpu"} 0.0',
        'penstock_model_oldest_age_seconds{class="low",model="m",pool=""} 6.0',
        'penstock_model_queue_depth{model="m",pool=""} 5.0',
        "penstock_streams 4.0",
    } <= {*page.splitlines()}
