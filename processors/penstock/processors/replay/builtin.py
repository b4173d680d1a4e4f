"""The built-in traces: three kinds of load, each from a seed, so that all policies and all runs see the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from penstock.processors.core.fleet.ledger import DeviceCapacity
from penstock.processors.replay.trace import ForeignUse, Request, Trace, TraceModel, checked

GB = 1 << 30
PRIORITIES = (1, 5, 9)


def cards(count: int, size_gb: int) -> tuple[DeviceCapacity, ...]:
    return tuple(
        DeviceCapacity(device=f"cuda:{n}", kind="cuda", total_bytes=size_gb * GB, reserve_bytes=2 * GB)
        for n in range(count)
    )


def turns(seed: int = 1, scale: float = 1.0) -> Trace:
    """One card of 80 GB and four models of which one fits at a time; an hour of all classes, in no order."""
    chance = random.Random(seed)
    models = tuple(
        TraceModel(model=name, bytes=size * GB, load_s=load_s, slots=8)
        for name, size, load_s in (("code", 60, 25), ("chat", 45, 18), ("vision", 50, 20), ("long", 70, 30))
    )
    requests = _poisson(chance, 3600 * scale, 0.45, models, (4, 3, 2, 1), (0.1, 0.6, 0.3), (2.0, 8.0))
    return checked(Trace(name="turns", devices=cards(1, 80), models=models, requests=requests))


def chat(seed: int = 2, scale: float = 1.0) -> Trace:
    """Two cards of 80 GB and twelve models, a few of them popular: people by day, batches of low work beside them.

    Other programs take memory of one card for a while.
    """
    chance = random.Random(seed)
    models = tuple(
        TraceModel(model=f"m{n:02}", bytes=chance.randint(14, 40) * GB, load_s=chance.randint(8, 20), slots=8)
        for n in range(12)
    )
    popular = [1 / (n + 1) for n in range(12)]
    people = _poisson(chance, 3600 * scale, 0.8, models, popular, (0.35, 0.65, 0.0), (1.0, 5.0))
    batches: list[Request] = []
    for _ in range(max(1, int(12 * scale))):
        at, model = chance.uniform(0, 3000 * scale), chance.choice(models)
        for _ in range(40):
            run_s = chance.uniform(2, 10)
            batches.append(Request(at_s=at, model=model.model, priority=9, run_s=run_s, tenant="batch", ttl_s=7200))
    foreign = (
        ForeignUse(at_s=900 * scale, device="cuda:1", foreign_bytes=12 * GB),
        ForeignUse(at_s=1800 * scale, device="cuda:1", foreign_bytes=0),
    )
    requests = tuple(sorted((*people, *batches), key=lambda one: one.at_s))
    return checked(Trace(name="chat", devices=cards(2, 80), models=models, requests=requests, foreign=foreign))


def batch(seed: int = 3, scale: float = 1.0) -> Trace:
    """Two cards of 80 GB, six models of 38 GB (four fit): 5,000 mixed requests within ten seconds."""
    chance = random.Random(seed)
    models = tuple(
        TraceModel(model=f"b{n}", bytes=size * GB, load_s=8 + n, slots=4, max_replicas=2)
        for n, size in enumerate((38, 38, 38, 38, 38, 38))
    )
    requests = _poisson(chance, 10, 5000 * scale / 10, models, (2, 2, 2, 2, 1, 1), (0.04, 0.56, 0.4), (1.0, 6.0))
    return checked(Trace(name="batch", devices=cards(2, 80), models=models, requests=requests))


TRACES: Mapping[str, Callable[..., Trace]] = {"turns": turns, "chat": chat, "batch": batch}


def _poisson(
    chance: random.Random,
    seconds: float,
    rate: float,
    models: Sequence[TraceModel],
    popular: Sequence[float],
    classes: Sequence[float],
    run_s: tuple[float, float],
) -> tuple[Request, ...]:
    """Arrivals that come independently; which model and which class by shares."""
    requests: list[Request] = []
    at = chance.expovariate(rate)
    while at < seconds:
        requests.append(
            Request(
                at_s=round(at, 3),
                model=chance.choices(models, popular)[0].model,
                priority=chance.choices(PRIORITIES, classes)[0],
                run_s=round(chance.uniform(*run_s), 3),
                tenant=f"t{chance.randint(1, 4)}",
                ttl_s=1800.0 if chance.random() < 0.5 else None,
            )
        )
        at += chance.expovariate(rate)
    return tuple(requests)
