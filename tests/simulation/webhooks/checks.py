"""What is promised of webhooks, checked at each call, record and commit."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, NoReturn

from penstock.gateway.webhooks.bodies import webhook_id
from penstock.schemas.records import ResultEvent, WebhookDelivery
from penstock.schemas.topics import TP
from simulation.truth import Violation
from simulation.webhooks.plan import CANARY, Plan

if TYPE_CHECKING:
    from simulation.webhooks.group import Process
    from simulation.webhooks.world import Key, Topics

SOON_S = 5.0


class Checks:
    """PublishedPrefix what happens, and by whom."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.violation: str | None = None
        """The first one. Who caused it may not pass on what is raised."""
        self.topics: Topics
        self.calls: Counter[Key] = Counter()
        self.accepted: dict[Key, tuple[Process, float]] = {}
        """Receivers that answered for good, whose process has not kept that yet; and when they were called."""
        self.answers: dict[Key, list[str]] = defaultdict(list)
        self.settled: dict[Key, str] = {}
        """Webhooks of which the broker has a record that they ended; and how."""
        self.known: set[Key] = set()
        """Webhooks of which the broker has a record."""
        self._flying: Counter[tuple[str, str]] = Counter()
        self._first_calls: dict[Key, float] = {}
        self.disturbed: list[tuple[float, float]] = []
        """Times in which nobody need be called soon: a process had to be replaced, or the broker was away."""

    def _violated(self, text: str) -> NoReturn:
        self.violation = self.violation or text
        raise Violation(text)

    def process_failed(self) -> None:
        self.violation = self.violation or "over: a fault ended a process"

    # -- calls

    def call_begins(self, process: Process, key: Key, number: str, host: str) -> None:
        outcome = self.topics.outcomes.get(key)
        if outcome is None or outcome.offset is None:
            self._violated(f"early: {key} is called before it has ended")
        value = self.topics.results[outcome.tp][outcome.offset].value
        if number != webhook_id(self._decoded(value)):
            self._violated(f"identity: {key} is called as {number}")
        if (ended := self.settled.get(key)) is not None and not process.behind(key):
            self._violated(f"repeated: {key} is called by {process.name}, and had {ended}")
        before = self.accepted.get(key)
        if before is not None and before[0].is_well_since(before[1]):
            self._violated(f"repeated: {process.name} calls {key}, of which {before[0].name} had the last answer")
        if key in process.heard_erased:
            self._violated(f"erased: {key} is called by {process.name}, which heard that it was erased")
        self._flying[process.name, host] += 1
        if self._flying[process.name, host] > max(1, self._plan.in_flight // 8):
            self._violated(f"host: {self._flying[process.name, host]} calls of {host} at once")
        self.calls[key] += 1
        if self.calls[key] == 1:
            self._first(key, outcome.at_s)

    def call_ends(self, process: Process, key: Key, host: str, began_s: float, answer: str) -> None:
        self._flying[process.name, host] -= 1
        self.answers[key].append(answer)
        if answer in ("well", "gone"):
            self.accepted[key] = process, began_s

    def _first(self, key: Key, ended_s: float) -> None:
        """The canary is called soon: slow receivers of others have a part of the calls only, each for its time."""
        now = asyncio.get_running_loop().time()
        if key[0] != CANARY or any(begin < now and end > ended_s for begin, end in self.disturbed):
            return
        if now - ended_s > self._plan.timeout_s + SOON_S:
            self._violated(f"held_up: {key} ended at {ended_s:.1f} s and was called at {now:.1f} s")

    @staticmethod
    def _decoded(value: bytes | None) -> ResultEvent:
        from simulation.webhooks.world import CODEC

        return CODEC.decode(value or b"", ResultEvent)

    # -- what is kept

    def kept(self, delivery: WebhookDelivery, by: str) -> None:
        key = (delivery.tenant, delivery.request_id)
        self.known.add(key)
        if delivery.state != "waiting":
            self.settled[key] = f"{delivery.state} by {by}"
            self.accepted.pop(key, None)
        if delivery.state == "failed" and key not in self.topics.letters:
            self._violated(f"letter: {key} has failed, and has no dead letter")
        if delivery.state == "dropped" and delivery.url:
            self._violated(f"erased: what is kept of {key} names its URL")

    def committed(self, tp: TP, offset: int) -> None:
        for key, outcome in self.topics.outcomes.items():
            if outcome.tp == tp and outcome.first_offset < offset and key not in self.known:
                self._violated(f"committed_past: {tp} at {offset}, and nothing is kept of {key}")

    # -- the end

    def at_end(self) -> None:
        newest = self.topics.newest()
        for key, outcome in self.topics.outcomes.items():
            answers, delivery = self.answers[key], newest.get(key)
            state = None if delivery is None else delivery.state
            erased = any(key == one for one, _ in self.topics.erased)
            allowed = {
                "delivered": "well" in answers,
                "failed": key in self.topics.letters and self._may_fail(key),
                "dropped": erased,
            }
            if not allowed.get(state or "", False):
                self._violated(f"lost: {key} is {state} after {len(answers)} calls, {answers[-3:]}, {outcome}")

    def _may_fail(self, key: Key) -> bool:
        """Its receiver said that it is gone, nobody could reach it while there was time, or it cannot be called."""
        answers = self.answers[key]
        if self.topics.outcomes[key].request.is_odd:
            return True
        receiver = self._plan.receivers[self.topics.outcomes[key].request.host]
        if "gone" in answers:
            return True
        back_s = receiver.ends_s - self.topics.outcomes[key].at_s
        return back_s > self._plan.give_up_s / 2 - 60.0
