"""The answer of `GET /v1/admin/history`: the minutes put together in steps. Pure; it runs on a thread."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.gateway.view.buckets import merged, quantile
from penstock.gateway.view.census import Wait
from penstock.gateway.view.history import KEPT_MINUTES, MINUTE_MS, TIMES, Minute, add_wait
from penstock.gateway.view.store import DeviceMinute
from penstock.schemas.times import rfc3339
from penstock.schemas.topics import CLASSES

QUANTILES = {"p50": 0.5, "p95": 0.95}
MOST_DEVICES = 64
"""Devices of one answer: the first by worker and name."""

SIZES = ("limit_bytes", "reserved_bytes", "foreign_bytes")
Figures = Sequence[int | float | None]


@dataclass(frozen=True, slots=True)
class Window:
    """Steps of so many minutes each, by number since the epoch; the last one holds the present."""

    now_ms: int
    first: int
    step: int

    @classmethod
    def of(cls, now_ms: int, range_minutes: int, step: int) -> Window:
        """At least so many minutes up to the present, but no step that began before the minutes that are kept."""
        now = now_ms // MINUTE_MS
        first_whole = -((KEPT_MINUTES - 1 - now) // step)
        return cls(now_ms, max((now - range_minutes + 1) // step, first_whole), step)

    @property
    def first_minute(self) -> int:
        return self.first * self.step

    @property
    def now(self) -> int:
        """The minute of the present."""
        return self.now_ms // MINUTE_MS

    @property
    def steps(self) -> range:
        return range(self.first, self.now // self.step + 1)


def series(
    window: Window,
    minutes: Mapping[int, Minute],
    waits: Iterable[Wait],
    devices: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """One list for each figure, with a value for each step: null before the first minute kept of any request.

    `waits`: of requests that have not ended. `devices`: as `device_series` has them.
    """
    by_step = defaultdict[int, list[Minute]](list)
    for number, minute in minutes.items():
        if number > window.now - KEPT_MINUTES:  # some gateways hold older ones
            by_step[number // window.step].append(minute)
    shown = [by_step.get(number, []) for number in window.steps]
    unknown = min([len(shown), *(max(0, step - window.first) for step in by_step)])

    def told(figures: Sequence[int | float]) -> Figures:
        return [*[None] * unknown, *figures[unknown:]]

    def sums(name: str) -> Figures:
        return told([sum(getattr(minute, name) for minute in group) for group in shown])

    statuses = sorted({status for group in shown for minute in group for status in tuple(minute.ended)})
    return {
        "object": "history",
        "step_s": window.step * MINUTE_MS // 1000,
        "until": rfc3339(window.now_ms),
        "times": [number * window.step * MINUTE_MS // 1000 for number in window.steps],
        "accepted": sums("accepted"),
        "ended": {
            one: told([sum(minute.ended.get(one, 0) for minute in group) for group in shown]) for one in statuses
        },
        "prompt_tokens": sums("prompt_tokens"),
        "completion_tokens": sums("completion_tokens"),
        "images": sums("images"),
        **{f"{name}_ms": _quantiles(name, shown) for name in TIMES},
        "queues": {
            klass: {"depth": told(depths), "oldest_age_s": told(ages)}
            for klass, depths, ages in _queues(window, minutes, waits)
        },
        "devices": devices,
    }


def _quantiles(name: str, shown: Sequence[Sequence[Minute]]) -> dict[str, Figures]:
    counted = [merged([minute.times[name] for minute in group if name in minute.times]) for group in shown]
    return {word: [quantile(counts, share) for counts in counted] for word, share in QUANTILES.items()}


def _queues(
    window: Window, minutes: Mapping[int, Minute], waits: Iterable[Wait]
) -> Iterator[tuple[str, list[int], list[int]]]:
    """By class: the most that waited at the end of a minute of the step, and the highest age in s of the oldest."""
    live = defaultdict[int, Minute](Minute)
    for one in waits:
        until = window.now + 1 if one.until_ms is None else one.until_ms // MINUTE_MS
        if one.since_ms <= window.now_ms:
            add_wait(live.__getitem__, one.klass, one.since_ms, until, one.requests)
    for klass in CLASSES:
        depths, ages = [0] * len(window.steps), [0] * len(window.steps)
        for minute, depth, age_s in _at_ends(klass, window, (minutes, live)):
            at = minute // window.step - window.first
            depths[at], ages[at] = max(depths[at], depth), max(ages[at], age_s)
        yield klass, depths, ages


def _at_ends(klass: str, window: Window, both: Sequence[Mapping[int, Minute]]) -> Iterator[tuple[int, int, int]]:
    """(minute, requests that wait at its end, age of the oldest in s), from the present back."""
    depth, now_s = 0, window.now_ms // 1000
    oldest_s = now_s
    last = max(window.now, *(max(minutes, default=0) for minutes in both))
    for number in range(last, window.first_minute - 1, -1):
        if number <= window.now:
            yield number, depth, max(0, min(now_s, (number + 1) * MINUTE_MS // 1000) - oldest_s) if depth else 0
        for minutes in both:
            if (minute := minutes.get(number)) is not None and klass in minute.net:
                depth += minute.net[klass]
                oldest_s = min(oldest_s, minute.oldest_s.get(klass, oldest_s))


def device_series(
    window: Window, names: Iterable[tuple[str, str]], reports: Iterable[DeviceMinute]
) -> list[dict[str, Any]]:
    """The memory of these devices by step, as it was last reported; `reports` are in the order of time."""
    last: dict[tuple[str, str, int], DeviceMinute] = {}
    for one in reports:
        last[one.worker, one.device, one.minute // window.step] = one
    found: list[dict[str, Any]] = []
    for worker, device in names:
        told = [last.get((worker, device, number)) for number in window.steps]
        sizes = {name: [one and getattr(one, name) for one in told] for name in SIZES}
        found.append({"worker_id": worker, "device": device, **sizes})
    return found
