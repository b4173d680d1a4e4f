"""The history: the same in whatever order partitions are read, in whatever batches, wherever a gateway is killed."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.examples import examples
from kit.records import NAMES, command, outcome, request, status, worker
from kit.view_gateway import ViewGateway
from penstock.common.reader import RawMessage
from penstock.gateway.view import view as view_module
from penstock.gateway.view.buckets import ERROR, bucket_of, merged, no_counts, quantile
from penstock.gateway.view.history import KEPT_MINUTES, History, Minute
from penstock.gateway.view.history_series import Window, series
from penstock.gateway.view.request_state import RequestState
from penstock.schemas.codec import default_codec
from penstock.schemas.records import DeviceState, Origin, Timings, Usage
from penstock.schemas.topics import CLASSES, TP

MINUTE = 60_000
NOW_MS = 1_900_000_000_000 // MINUTE * MINUTE + 30_999
"""The end of a second: requests that wait are counted by the second."""
RANGE = 10
FROM_MS = NOW_MS - 12 * MINUTE
"""Some of what happens lies before the range that is asked for."""
REPORTS = range(FROM_MS, NOW_MS, MINUTE // 2)
"""When the worker reports. Devices say nothing about requests: their figures are null before the first of these."""
PRIORITIES = {"high": 1, "medium": 5, "low": 9}
CLASS_TOPICS = {NAMES.request("text_generation", priority) for priority in PRIORITIES.values()}
codec = default_codec()


@dataclass(frozen=True)
class Life:
    """What becomes of one request. Times are in ms, `accepted` since `FROM_MS`; None: it does not come to that.

    One that ran for 0 ms ended without a run.
    """

    klass: str
    accepted: int
    start_after: int | None
    waited: int | None
    ran: int | None
    completed: bool
    again: int | None
    """When another record with its id is appended on another topic; the results name the first."""
    erased: bool
    """Whether it is erased when it has ended."""

    @property
    def accepted_ms(self) -> int:
        return FROM_MS + self.accepted

    @property
    def since_ms(self) -> int:
        return self.accepted_ms + (self.start_after or 0)

    @property
    def started_ms(self) -> int | None:
        return None if self.waited is None else self.since_ms + self.waited

    @property
    def ended_ms(self) -> int | None:
        return None if self.started_ms is None or self.ran is None else self.started_ms + self.ran

    @property
    def ended_as(self) -> str:
        return "completed" if self.completed and self.ran else "failed"

    def messages(self, number: int) -> list[RawMessage]:
        """Its records, without their offsets."""
        key = f"r{number}"
        asked = request(key, priority=PRIORITIES[self.klass], start_after=self.since_ms if self.start_after else None)
        topic = NAMES.request("text_generation", PRIORITIES[self.klass])
        origin = Origin(topic=topic, partition=0, offset=number, append_time_ms=self.accepted_ms)
        told: dict[str, Any] = {"origin": origin}
        found = [RawMessage(topic, 0, number, self.accepted_ms, None, codec.encode(asked))]
        if self.again is not None:
            other = NAMES.request("embedding", 5)
            found.append(RawMessage(other, 0, number, self.accepted_ms + self.again, None, codec.encode(asked)))
        if self.started_ms is not None and self.ran != 0:
            for after_ms in (0, 1_500):  # the second says how far it is
                event = status("running", key, created_at=self.started_ms + after_ms, **told)
                found.append(RawMessage(NAMES.status, 0, 0, self.started_ms + after_ms, None, codec.encode(event)))
        if self.ended_ms is not None:
            times = Timings(run_ms=self.ran or 0, first_token_ms=7)
            done = {
                "status": self.ended_as,
                "usage": Usage(prompt_tokens=2, completion_tokens=3),
            }
            end = outcome(key, created_at=self.ended_ms, timings=times, **done, **told)
            found.append(RawMessage(NAMES.result, 0, 0, self.ended_ms, None, codec.encode(end)))
            if self.erased:
                found.append(RawMessage(NAMES.control, 0, 0, self.ended_ms, None, codec.encode(command("erase", key))))
        return found


SPAN = st.integers(1, 4 * MINUTE)
LIVES = st.lists(
    st.builds(
        Life,
        klass=st.sampled_from(CLASSES),
        accepted=st.integers(0, 11 * MINUTE),
        start_after=st.none() | SPAN,
        waited=st.none() | SPAN,
        ran=st.none() | st.just(0) | SPAN,
        completed=st.booleans(),
        again=st.none() | SPAN,
        erased=st.booleans(),
    ),
    max_size=6,
).map(lambda lives: sorted(lives, key=lambda life: life.accepted))


def logs_of(lives: Sequence[Life]) -> dict[TP, list[RawMessage]]:
    """Partitions in the order of time, with offsets; a request's origin keeps the offset that its results name."""
    reports = [
        RawMessage(NAMES.worker, 0, 0, at_ms, None, codec.encode(worker(updated_at=at_ms, devices=[device])))
        for at_ms in REPORTS
        for device in [DeviceState(device="d", kind="gpu", total_bytes=9, reserved_bytes=at_ms % 7, used_bytes=0)]
    ]
    logs: dict[TP, list[RawMessage]] = {}
    for message in [*(one for number, life in enumerate(lives) for one in life.messages(number)), *reports]:
        if message.timestamp_ms <= NOW_MS:
            logs.setdefault((message.topic, 0), []).append(message)
    for (topic, _), log in logs.items():
        log.sort(key=lambda message: message.timestamp_ms)
        if topic not in CLASS_TOPICS:
            for offset, message in enumerate(log):
                message.offset = offset
    return logs


class Reader:
    """A gateway that reads the logs, with the next record to be read of each partition."""

    def __init__(self, logs: dict[TP, list[RawMessage]], path: Path) -> None:
        self.logs, self.gateway = logs, ViewGateway(path)
        self.at = dict.fromkeys(logs, 0)

    def read(self, tps: Sequence[TP]) -> None:
        """One batch, with one more record of each of these partitions."""
        batch: list[RawMessage] = []
        for tp in tps:
            if self.at[tp] < len(self.logs[tp]):
                batch.append(self.logs[tp][self.at[tp]])
                self.at[tp] += 1
        self.gateway.view.apply(batch)

    def kill(self) -> None:
        """What was not written is read again, and all reports of workers are."""
        self.gateway.restart()
        stored = self.gateway.store.offsets()
        for tp, log in self.logs.items():
            first = 0 if tp[0] == NAMES.worker else stored.get(tp, 0)
            self.at[tp] = sum(message.offset < first for message in log)

    def history(self, step: int = 1) -> dict[str, Any]:
        for tp, log in self.logs.items():
            self.read([tp] * len(log))
        self.gateway.flush()
        return self.gateway.view.history(NOW_MS, RANGE, step)()


def ended_by_now(lives: Sequence[Life]) -> list[Life]:
    return [life for life in lives if life.ended_ms is not None and life.ended_ms <= NOW_MS]


def by_the_book(lives: Sequence[Life]) -> dict[str, Any]:
    """The figures by their definitions."""
    starts = [(NOW_MS // MINUTE - RANGE + 1 + number) * MINUTE for number in range(RANGE)]
    happened = [life for life in lives if life.accepted_ms <= NOW_MS]
    ended = ended_by_now(lives)
    first = min((life.accepted_ms // MINUTE * MINUTE for life in happened), default=NOW_MS)

    def told(figures: Sequence[int]) -> list[int | None]:
        return [None if start < first else figure for start, figure in zip(starts, figures, strict=True)]

    def per_minute(times: Sequence[int]) -> list[int]:
        counts = Counter(at // MINUTE for at in times)
        return [counts[start // MINUTE] for start in starts]

    def waits(life: Life, at_ms: int) -> bool:
        return life.since_ms <= at_ms and (life.started_ms is None or at_ms < life.started_ms)

    queues: dict[str, Any] = {}
    for klass in CLASSES:
        depths: list[int] = []
        ages: list[int] = []
        for start in starts:
            end_ms = min(NOW_MS, start + MINUTE - 1)
            waiting = [life.since_ms for life in happened if life.klass == klass and waits(life, end_ms)]
            depths.append(len(waiting))
            ages.append(min(NOW_MS, start + MINUTE) // 1000 - min(waiting) // 1000 if waiting else 0)
        queues[klass] = {"depth": told(depths), "oldest_age_s": told(ages)}
    by_status = {word: [one.ended_ms or 0 for one in ended if one.ended_as == word] for word in ("completed", "failed")}
    return {
        "accepted": told(per_minute([life.accepted_ms for life in happened])),
        "ended": {word: told(counts) for word, times in by_status.items() if any(counts := per_minute(times))},
        "completion_tokens": told([3 * count for count in per_minute([life.ended_ms or 0 for life in ended])]),
        "queues": queues,
    }


@settings(max_examples=examples(200), deadline=None)
@given(LIVES, st.data())
def test_any_gateway_tells_the_same_by_the_definitions_of_its_figures(lives: list[Life], data: st.DataObject) -> None:
    logs = logs_of(lives)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(view_module, "now_ms", lambda: NOW_MS)
        one, other = (Reader(logs, Path(folder, name)) for name in ("one", "other"))
        for reader in (one, other):
            stack.callback(reader.gateway.close)
        steps = st.lists(st.sampled_from(sorted(logs)), max_size=6) | st.sampled_from(["flush", "kill"])
        for step in data.draw(st.lists(steps, max_size=12)):
            if not isinstance(step, str):
                one.read(step)
            elif step == "flush":
                one.gateway.flush()
            else:
                one.kill()
        first, second = one.history(), other.history()
        one.kill()
        again, coarse = one.history(), one.history(5)
    assert first == second == again
    book = by_the_book(lives)
    assert {name: first[name] for name in book} == book
    assert sum(filter(None, coarse["accepted"])) >= sum(filter(None, first["accepted"]))
    last = {at_ms // MINUTE: at_ms % 7 for at_ms in REPORTS}
    assert [one["reserved_bytes"] for one in first["devices"]] == [[last[at // 60] for at in first["times"]]]
    assert_near(first["wait_ms"], lives, lambda life: (life.started_ms or 0) - life.since_ms)
    assert_near(first["run_ms"], lives, lambda life: life.ran or 0)


def assert_near(found: dict[str, list[int | None]], lives: Sequence[Life], time_of: Callable[[Life], int]) -> None:
    """Quantiles by the minute of what ended after a run."""
    for number in range(RANGE):
        minute = NOW_MS // MINUTE - RANGE + 1 + number
        ended = [one for one in ended_by_now(lives) if one.ran and (one.ended_ms or 0) // MINUTE == minute]
        for word, share in (("p50", 0.5), ("p95", 0.95)):
            assert is_near(found[word][number], sorted(map(time_of, ended)), share)


def is_near(found: int | None, true: Sequence[int], share: float) -> bool:
    """Whether a quantile is as near as is said to that of sorted durations."""
    if found is None or not true:
        return found is None and not true
    exact = true[max(0, ceil(share * len(true)) - 1)]
    return abs(found - exact) <= max(1, ERROR * exact + 0.5)


@given(st.lists(st.integers(0, 10_000_000)), st.sampled_from([0.5, 0.95]))
def test_a_quantile_is_as_near_as_is_said_however_the_durations_were_counted(
    durations: list[int], share: float
) -> None:
    parts = [no_counts(), no_counts()]
    for number, duration_ms in enumerate(durations):
        parts[number % 2][bucket_of(duration_ms)] += 1
    assert is_near(quantile(merged(parts), share), sorted(durations), share)


@given(st.integers(NOW_MS // MINUTE, NOW_MS // MINUTE + KEPT_MINUTES), st.integers(1, 1_440))
def test_no_step_lacks_minutes_that_are_not_kept(now: int, step: int) -> None:
    window = Window.of(now * MINUTE, KEPT_MINUTES, step)
    kept = range(now - KEPT_MINUTES + 1, now + 1)
    assert window.first_minute in kept
    assert window.first_minute - step not in kept


def test_devices_of_clocks_that_run_far_ahead_are_not_kept() -> None:
    history, hour_ms = History(), 60 * MINUTE
    for at_ms in (NOW_MS, NOW_MS + hour_ms, NOW_MS + hour_ms + MINUTE, NOW_MS - 48 * hour_ms):
        device = DeviceState(device="d", kind="gpu", total_bytes=9, reserved_bytes=1, used_bytes=0)
        history.on_worker(worker(updated_at=at_ms, devices=[device]), NOW_MS)
    minutes = [minute for minute, *_ in history.drain()["device_minutes"]]
    assert minutes == [NOW_MS // MINUTE, NOW_MS // MINUTE + 60]


def test_what_ends_by_a_clock_that_runs_far_ahead_does_not_lower_the_depths_before_it_came() -> None:
    history, entry = History(), RequestState("default", "r", 0)
    origin = Origin(topic="t", partition=0, offset=0, append_time_ms=NOW_MS - 5 * MINUTE)
    entry.on_request(request(), origin)
    entry.on_result(outcome(created_at=NOW_MS + 120 * MINUTE, origin=origin), 0)
    history.note(entry, NOW_MS)
    assert [(one.accepted, one.net) for one in history.minutes().values()] == [(1, {})]


def test_images_of_outputs_are_counted_and_kept_with_what_earlier_files_have() -> None:
    history, entry = History(), RequestState("default", "r", 0)
    made = {"images": [{"artifact_id": "a"}, {"artifact_id": "b"}]}
    entry.on_result(outcome(created_at=NOW_MS, task="image_generation", image_generation=made), 0)
    history.note(entry, NOW_MS)
    ((_, text),) = history.drain()["minutes"]
    assert Minute.from_text(text).images == 2
    assert Minute.from_text("[1, 2, 3, {}, {}, {}, {}]").images == 0


def test_minutes_that_one_gateway_still_holds_change_no_answer() -> None:
    window, last = Window.of(NOW_MS, RANGE, 1), {NOW_MS // MINUTE: Minute(accepted=1)}
    older = {NOW_MS // MINUTE - KEPT_MINUTES: Minute(accepted=1)}
    assert series(window, {**older, **last}, (), ()) == series(window, last, (), ())
