"""What waits by class, model and pool: what scalers of workers read."""

from __future__ import annotations

from kit.records import model_info
from penstock.gateway.metrics import GatewayMetrics, Gauges
from penstock.gateway.service.model_queues import model_queues, paused_queues
from penstock.gateway.view.census import Waiting
from penstock.schemas.records import DesiredState

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


def order(kind: str, name: str, pool: str | None = None, *, paused: bool = True) -> DesiredState:
    return DesiredState(kind=kind, name=name, pool=pool, action="pause", created_at=1, paused=paused)


def test_for_what_an_order_pauses_no_worker_is_wanted() -> None:
    """A worker that comes for it can start nothing of it. Its depth stays what it is."""
    lines = [waiting(klass, *where, 2) for klass in ("high", "low") for where in (("m", None), ("big", "gpu"))]
    depths, ages = model_queues(MODELS, [*lines, waiting("low", None, "gpu")], NOW)
    orders = [order("model", "m"), order("class", "low", "gpu"), order("class", "high", "gpu", paused=False)]
    paused = paused_queues(depths, orders)
    assert paused == {
        *((klass, "m", "") for klass in ("high", "medium", "low")),
        *(("low", model, "gpu") for model in ("big", "none")),
    }
    gauges = Gauges(model_depth=depths, model_oldest_age_s=ages, paused=paused)
    page = GatewayMetrics(lambda: gauges).render().decode()
    assert {
        'penstock_model_depth{class="high",model="m",pool=""} 2.0',
        'penstock_model_paused{class="high",model="m",pool=""} 1.0',
        'penstock_model_paused{class="high",model="big",pool="gpu"} 0.0',
        'penstock_model_paused{class="low",model="none",pool="gpu"} 1.0',
        'penstock_model_queue_depth{model="m",pool=""} 4.0',
    } <= {*page.splitlines()}
