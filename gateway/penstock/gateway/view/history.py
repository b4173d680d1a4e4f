"""The last 48 hours by the minute, counted from the requests of a view: what came, how it ended, how long it took.

Pure. A request counts by the times that its records carry, whenever they are read: all gateways count the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.gateway.view.buckets import Counts, bucket_of, counts_of, no_counts
from penstock.gateway.view.outputs import json_at_once
from penstock.gateway.view.request_state import RequestState
from penstock.schemas.records import WorkerState
from penstock.schemas.topics import priority_class

MINUTE_MS = 60_000
KEPT_MINUTES = 48 * 60
AHEAD_MINUTES = 60
"""Records of clocks that run ahead by more than this are not counted."""

TIMES = ("wait", "run", "first_token")

Row = tuple[Any, ...]


@dataclass(slots=True)
class Minute:
    """What happened in one minute. `times`: durations of what ended in it, by `wait`, `run` and `first_token`.

    `net` and `oldest_s` are by priority class, of requests that waited at the end of some minute: those that ceased to
    wait less those that began to, and since when the oldest waited of those that ceased to. So what waited at the end
    of a minute is the sum of `net` over all later ones.
    """

    accepted: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    ended: dict[str, int] = field(default_factory=dict[str, int])
    """By status."""
    times: dict[str, Counts] = field(default_factory=dict[str, Counts])
    net: dict[str, int] = field(default_factory=dict[str, int])
    oldest_s: dict[str, int] = field(default_factory=dict[str, int])
    images: int = 0

    def add_time(self, name: str, duration_ms: int) -> None:
        if (counts := self.times.get(name)) is None:
            counts = self.times[name] = no_counts()
        counts[bucket_of(duration_ms)] += 1

    def add(self, other: Minute) -> None:
        """What `other` counted was counted in this minute too."""
        self.accepted += other.accepted
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.images += other.images
        for counts, more in ((self.ended, other.ended), (self.net, other.net)):
            for name, count in more.items():
                counts[name] = counts.get(name, 0) + count
        for name, times in other.times.items():
            known = self.times.get(name)
            self.times[name] = times if known is None else counts_of(map(sum, zip(known, times, strict=True)))
        for klass, since_s in other.oldest_s.items():
            self.oldest_s[klass] = min(self.oldest_s.get(klass, since_s), since_s)

    def to_text(self) -> str:
        """As JSON; `from_text` reads it."""
        times = {name: counts.tolist() for name, counts in self.times.items()}
        plain = (self.accepted, self.prompt_tokens, self.completion_tokens, self.ended)
        return json_at_once([*plain, times, self.net, self.oldest_s, self.images]).decode()

    @classmethod
    def from_text(cls, text: str) -> Minute:
        accepted, prompt_tokens, completion_tokens, ended, times, net, oldest_s, *images = json.loads(text)
        counted = {name: counts_of(numbers) for name, numbers in times.items()}
        return cls(accepted, prompt_tokens, completion_tokens, ended, counted, net, oldest_s, *images)


def add_wait(minute_of: Callable[[int], Minute], klass: str, since_ms: int, until: int, count: int = 1) -> None:
    """So many requests waited from a time to some time in the minute `until`."""
    since = since_ms // MINUTE_MS
    if since < until:
        ceased, began = minute_of(until), minute_of(since)
        ceased.net[klass] = ceased.net.get(klass, 0) + count
        began.net[klass] = began.net.get(klass, 0) - count
        ceased.oldest_s[klass] = min(ceased.oldest_s.get(klass, since_ms // 1000), since_ms // 1000)


class History:
    """Tell it of each change of a request by `note`, and of the workers' reports. `drain` gives what is to be written.

    At most 48 hours of minutes are held, each of at most 3 kB.
    """

    def __init__(self, written: Iterable[tuple[int, str]] = ()) -> None:
        """`written`: the minutes as the file has them."""
        self._minutes = {number: Minute.from_text(text) for number, text in written}
        self._changed: set[int] = set()
        self._devices: dict[tuple[int, str, str], tuple[int, int, int | None]] = {}
        """Of reports that are not written: limit, granted and foreign bytes by (minute, worker, device)."""
        self._now = 0

    def minutes(self) -> dict[int, Minute]:
        """By number since the epoch. The minutes themselves go on changing."""
        return dict(self._minutes)

    # -- what changes

    def note(self, entry: RequestState, now_ms: int) -> None:
        """A request may have changed. What it was counted as already is not counted again."""
        before = entry.noted
        if entry.accepted_ms == before.accepted_ms and not entry.finished_ms:
            return  # as most changes are
        noted = entry.to_note
        if noted == before:
            return
        self._now = now_ms // MINUTE_MS
        entry.noted = noted
        if noted.accepted_ms != before.accepted_ms:
            if before.accepted_ms:
                self._minute(before.accepted_ms // MINUTE_MS).accepted -= 1
            self._minute(noted.accepted_ms // MINUTE_MS).accepted += 1
        if noted.ended and not before.ended:
            self._end(entry, self._minute(entry.finished_ms // MINUTE_MS))
        if noted.waited and not before.waited:
            self._wait(entry)

    def _end(self, entry: RequestState, minute: Minute) -> None:
        event = entry.terminal
        assert event is not None
        minute.ended[entry.ended_as] = minute.ended.get(entry.ended_as, 0) + 1
        minute.images += len((event.output or {}).get("images", ()))
        if event.usage is not None:
            minute.prompt_tokens += event.usage.prompt_tokens
            minute.completion_tokens += event.usage.completion_tokens
        if event.timings is not None and entry.started_ms:
            minute.add_time("run", event.timings.run_ms)
            if event.timings.first_token_ms is not None:
                minute.add_time("first_token", event.timings.first_token_ms)

    def _wait(self, entry: RequestState) -> None:
        """It has ended, and its own record says since when it waited and in which class."""
        since_ms, until_ms = entry.waits_from_ms, entry.started_ms or entry.finished_ms
        if entry.started_ms:
            self._minute(entry.finished_ms // MINUTE_MS).add_time("wait", until_ms - since_ms)
        if self._is_kept(until_ms // MINUTE_MS):  # else the end would be missing in the sum, but not the begin
            add_wait(self._minute, priority_class(entry.priority), since_ms, until_ms // MINUTE_MS)

    def on_worker(self, state: WorkerState, now_ms: int) -> None:
        """The last report of a minute counts."""
        self._now = now_ms // MINUTE_MS
        minute = state.updated_at // MINUTE_MS
        for one in state.devices if self._is_kept(minute) else ():
            limit = one.total_bytes if one.limit_bytes is None else one.limit_bytes
            self._devices[minute, state.worker_id, one.device] = (limit, one.reserved_bytes, one.foreign_bytes)

    def _is_kept(self, number: int) -> bool:
        return self._now - KEPT_MINUTES < number <= self._now + AHEAD_MINUTES

    def _minute(self, number: int) -> Minute:
        """One that is to be changed. What lies outside of the hours that are kept is counted nowhere."""
        if not self._is_kept(number):
            return Minute()
        self._changed.add(number)
        minute = self._minutes.get(number)
        if minute is None:
            minute = self._minutes[number] = Minute()
        return minute

    def forget(self, entry: RequestState) -> None:
        """Another record with its id counts: that it was accepted is not counted any more."""
        if entry.noted.accepted_ms:
            self._minute(entry.noted.accepted_ms // MINUTE_MS).accepted -= 1

    def add(self, minutes: Mapping[int, Minute]) -> None:
        """What other requests than those told of so far have counted for. The file has these minutes, as they are."""
        self._changed |= self._minutes.keys()
        for number, minute in minutes.items():
            if (known := self._minutes.get(number)) is None:
                self._minutes[number] = minute
            else:
                known.add(minute)

    # -- keeping

    def drain(self) -> Mapping[str, Sequence[Row]]:
        """Rows by table that are to be written in the same transaction as the requests."""
        if len(self._minutes) > KEPT_MINUTES + AHEAD_MINUTES:
            self._minutes = {at: one for at, one in self._minutes.items() if at > self._now - KEPT_MINUTES}
        minutes = [(at, self._minutes[at].to_text()) for at in self._changed if at in self._minutes]
        devices = [(*key, *sizes) for key, sizes in self._devices.items()]
        self._changed, self._devices = set(), {}
        return {"minutes": minutes, "device_minutes": devices}
