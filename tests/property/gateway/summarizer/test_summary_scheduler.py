"""A summarizer that is killed at any moment, over logs in which turns come and are erased: each due span is summed up
once, none is skipped."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from kit.examples import examples
from penstock.gateway.summarizer.summary_scheduler import Commit, Key, ReadWhole, Submit, SummaryScheduler
from penstock.schemas.limits import RECENT_TURNS
from penstock.schemas.records import ConversationFacts, ConversationFork, ConversationMessage, SummarizePolicy

EVERY = 2
POLICY = SummarizePolicy(every_turns=EVERY)

Record = tuple[int, str, ConversationMessage | None]
"""(offset, key, message); a tombstone has none"""


def message(direction: str, role: str, request_id: str, through: int | None = None) -> ConversationMessage:
    return ConversationMessage(
        tenant="t", conversation_id="c", direction=direction, role=role, content="word", created_at=0,
        request_id=request_id, covers_through=through,
    )  # fmt: skip


@dataclass
class Topic:
    """A conversation's log, and what workers do to it."""

    records: list[Record] = field(default_factory=list[Record])
    end: int = 0
    turns: list[str] = field(default_factory=list[str])

    def append(self, key: str, told: ConversationMessage | None) -> int:
        self.records.append((self.end, key, told))
        self.end += 1
        return self.end - 1

    def standing(self) -> list[tuple[int, ConversationMessage]]:
        gone = {key: offset for offset, key, told in self.records if told is None}
        return [(at, told) for at, key, told in self.records if told is not None and gone.get(key, -1) < at]

    def turn(self) -> None:
        name = f"turn{self.end}"
        self.turns.append(name)
        self.append(f"{name}/in", message("in", "user", name))
        self.append(f"{name}/out", message("out", "assistant", name))

    def summed_up(self, request_id: str, through: int) -> bool:
        """A worker adds the summary, once; it covers up to the last message that stands there."""
        told = [at for at, one in self.standing() if one.direction != "summary" and at <= through]
        if not told:
            return False
        if not any(one.request_id == request_id and one.direction == "summary" for _, one in self.standing()):
            self.append(f"{request_id}/summary", message("summary", "assistant", request_id, told[-1]))
        return True

    def erase(self, name: str) -> None:
        first = min((at for at, one in self.standing() if one.request_id == name), default=None)
        if first is None:
            return
        for _, one in self.standing():
            if one.direction == "summary" and (one.covers_through or 0) >= first:
                self.append(f"{one.request_id}/summary", None)
        self.append(f"{name}/out", None)
        self.append(f"{name}/in", None)

    def compact(self, *, tombstones: bool = False) -> None:
        """Kafka removes what tombstones name; the tombstones a day later, which no reader takes that long for."""
        alive = {at for at, _ in self.standing()}
        self.records = [one for one in self.records if one[0] in alive or (one[2] is None and not tombstones)]

    @property
    def covers(self) -> list[int]:
        return [one.covers_through or 0 for _, one in self.standing() if one.direction == "summary"]


@dataclass
class World:
    """Two conversations of two tenants, a worker that runs each request once, and a summarizer."""

    topics: dict[Key, Topic]
    committed: dict[Key, Commit] = field(default_factory=dict[Key, Commit])
    requests: dict[str, Submit] = field(default_factory=dict[str, Submit])
    """Sent, by id, and not run yet."""
    outcomes: dict[str, bool] = field(default_factory=dict[str, bool])
    sent: int = 0

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A new process: it knows what is committed and what stands in the topics."""
        self.scheduler = SummaryScheduler(lambda _: POLICY, most=1)
        self.at = dict[Key, int]()
        self.whole = list[Key]()
        self.waiting = list[tuple[Submit, bool]]()
        """What it follows: requests, and whether it would see an end that came before."""
        for key, topic in self.topics.items():
            self.at[key] = self.committed.get(key, Commit(key, 0)).offset
            self.scheduler.follow(key, f"id-{key.tenant}", self.committed.get(key, Commit(key, 0)), topic.end)

    def do(self, effect: Commit | ReadWhole | None) -> None:
        if isinstance(effect, Commit):
            self.committed[effect.key] = effect
        elif effect is not None:
            self.whole.append(effect.key)

    def read_whole(self) -> None:
        if self.whole:
            key = self.whole.pop(0)
            self.do(self.scheduler.read_whole(key, self.topics[key].standing(), self.topics[key].end))

    def end(self, submit: Submit) -> None:
        failed = not self.outcomes[submit.request_id]
        self.do(self.scheduler.ended(submit, self.topics[submit.key].end, failed=failed))

    def read(self, key: Key, most: int) -> None:
        topic = self.topics[key]
        for at, _, told in [one for one in topic.records if one[0] >= self.at[key]][:most]:
            self.at[key] = at + 1
            self.do(self.scheduler.record(key, at, told))
        if not any(one[0] >= self.at[key] for one in topic.records):
            self.at[key] = topic.end
            self.do(self.scheduler.reached(key, topic.end))

    def submit(self) -> None:
        while (submit := self.scheduler.next()) is not None:
            self.waiting.append((submit, submit.maybe_sent))
            self.sent += 1
            if submit.request_id not in self.outcomes:  # workers drop the repeat of a request that they have
                self.requests[submit.request_id] = submit

    def run(self, *, fails: bool = False) -> None:
        """A worker runs a request, and its end is told."""
        if self.requests:
            request_id, submit = next(iter(self.requests.items()))
            del self.requests[request_id]
            self.outcomes[request_id] = not fails and self.topics[submit.key].summed_up(request_id, submit.through)
            for waiting in [one for one in self.waiting if one[0].request_id == request_id]:
                self.waiting.remove(waiting)
                self.end(waiting[0])
        for waiting in [one for one in self.waiting if one[1] and one[0].request_id in self.outcomes]:
            self.waiting.remove(waiting)
            self.end(waiting[0])

    def drain(self) -> None:
        for _ in range(500):
            before = (dict(self.at), self.sent, len(self.outcomes), self.scheduler.running)
            for key in self.topics:
                self.read(key, 1_000)
            while self.whole:
                self.read_whole()
            self.submit()
            self.run()
            if before == (dict(self.at), self.sent, len(self.outcomes), self.scheduler.running):
                return
        raise AssertionError("it never comes to an end")


KEYS = (Key("a", "c"), Key("b", "c"))
ACTS = ["turn"] * 6 + ["read"] * 4 + ["whole"] * 2 + ["submit"] * 3 + ["run"] * 2 + ["kill", "compact"]
STEPS = st.lists(st.sampled_from(ACTS), min_size=30, max_size=150)
WITH_ERASURES = st.lists(st.sampled_from([*ACTS, "erase"]), min_size=30, max_size=150)
WITH_FAILURES = st.lists(st.sampled_from([*ACTS, "erase unseen", "fail"]), min_size=30, max_size=150)


def played(steps: list[str], seed: int) -> World:
    chance = random.Random(seed)
    world = World({key: Topic() for key in KEYS})
    for step in steps:
        key = chance.choice(KEYS)
        topic = world.topics[key]
        match step:
            case "turn":
                topic.turn()
            case "read":
                world.read(key, chance.randint(1, 5))
            case "submit":
                world.submit()
            case "run" | "fail":
                world.run(fails=step == "fail")
            case "whole":
                world.read_whole()
            case "kill":
                if chance.random() < 0.3:  # it was away for days
                    topic.compact(tombstones=True)
                world.begin()
            case "compact":
                topic.compact()
            case "erase unseen":
                if topic.turns:
                    topic.erase(chance.choice(topic.turns))
            case _ if topic.turns:
                # What is run, or found due, without knowing of an erasure may tell again up to where one told already.
                while world.requests:
                    world.run()
                topic.erase(chance.choice(topic.turns))
                world.read(key, 1_000)
                while world.whole:
                    world.read_whole()
            case _:
                pass
    world.drain()
    return world


@given(STEPS, st.integers(0, 1_000))
@settings(max_examples=examples(300))
def test_each_due_span_is_summed_up_once_and_none_is_skipped(steps: list[str], seed: int) -> None:
    for topic in played(steps, seed).topics.values():
        ends = [at for at, one in topic.standing() if one.direction == "out"]
        due = max(0, len(ends) - RECENT_TURNS) // EVERY
        assert topic.covers == [ends[EVERY * (number + 1) - 1] for number in range(due)]


@given(WITH_ERASURES, st.integers(0, 1_000))
@settings(max_examples=examples(300))
def test_what_is_erased_is_summed_up_anew(steps: list[str], seed: int) -> None:
    for topic in played(steps, seed).topics.values():
        assert len(set(topic.covers)) == len(topic.covers)
        covered = max(topic.covers, default=-1)
        left = [at for at, one in topic.standing() if one.direction == "in" and at > covered]
        assert len(left) < EVERY + RECENT_TURNS


@given(WITH_FAILURES, st.integers(0, 1_000))
@settings(max_examples=examples(300))
def test_nothing_is_passed_over_whatever_fails_and_is_erased_unseen(steps: list[str], seed: int) -> None:
    world = played(steps, seed)
    for key, topic in world.topics.items():
        behind = max(max(topic.covers, default=-1), world.committed.get(key, Commit(key, 0)).failed)
        left = [at for at, one in topic.standing() if one.direction == "in" and at > behind]
        assert len(left) < EVERY + RECENT_TURNS
        for _ in range(EVERY + RECENT_TURNS):  # with them turns are told of that could not be
            topic.turn()
    world.drain()
    for topic in world.topics.values():
        left = [at for at, one in topic.standing() if one.direction == "in" and at > max(topic.covers, default=-1)]
        assert len(left) < EVERY + RECENT_TURNS


def told(scheduler: SummaryScheduler, key: Key, topic: Topic) -> list[Commit | ReadWhole | None]:
    return [scheduler.record(key, at, one) for at, _, one in topic.records]


def test_a_fork_is_summed_up_by_the_offsets_of_the_conversation() -> None:
    key, parent, fork = Key("t", "fork"), Topic(), Topic()
    for _ in range(4):
        parent.turn()
    first = ConversationFork(conversation_id="c", through=5)
    fork.append("fork/1", replace(message("fork", "system", "r"), fork=first))
    for _ in range(3):
        fork.turn()
    scheduler = SummaryScheduler(lambda _: POLICY, most=1)
    scheduler.follow(key, "id", Commit(key, 0), fork.end)
    assert told(scheduler, key, fork)[0] == ReadWhole(key)
    assert scheduler.next() is None
    inherited = [one for one in parent.standing() if one[0] <= 5]
    whole = [*inherited, *((6 + at, one) for at, one in fork.standing())]
    assert scheduler.read_whole(key, whole, fork.end) == Commit(key, 0, 6)
    submit = scheduler.next()
    assert submit.through == 3, "in what it inherited"
    fork.append("r/summary", message("summary", "assistant", "r", 3))
    scheduler.ended(submit, fork.end, failed=False)
    assert scheduler.record(key, fork.end - 1, fork.records[-1][2]) == Commit(key, 0, 6)
    for _ in range(2):
        fork.turn()
    for at, _, one in fork.records[-4:]:
        scheduler.record(key, at, one)
    submit = scheduler.next()
    assert submit.through == 6 + 2, "the third inherited turn, and the fork's first"
    fork.append("s/summary", message("summary", "assistant", "s", 8))
    assert scheduler.record(key, fork.end - 1, fork.records[-1][2]) == Commit(key, 3, 6)
    again = SummaryScheduler(lambda _: POLICY, most=1)
    again.follow(key, "id", Commit(key, 3, 6), fork.end)
    found = [again.record(key, at, one) for at, _, one in fork.records if at >= 3]
    assert not any(isinstance(one, ReadWhole) for one in found)
    assert again.next() is None
    fork.turn()
    fork.turn()
    for scheduler_ in (scheduler, again):
        scheduler_.ended(submit, fork.end, failed=False)
        for at, _, one in fork.records[-4:]:
            scheduler_.record(key, at, one)
    two = [one and one.request_id for one in (scheduler.next(), again.next())]
    assert two[0] == two[1] is not None


def test_tenants_take_turns_and_at_most_so_many_are_summed_up_at_once() -> None:
    scheduler = SummaryScheduler(lambda _: POLICY, most=3)
    keys = [Key("a", "1"), Key("a", "2"), Key("a", "3"), Key("b", "1")]
    for key in keys:
        topic = Topic()
        for _ in range(EVERY + RECENT_TURNS):
            topic.turn()
        scheduler.follow(key, "id", Commit(key, 0), topic.end)
        told(scheduler, key, topic)
    chosen = [scheduler.next() for _ in range(4)]
    assert [one and one.key for one in chosen] == [Key("a", "1"), Key("b", "1"), Key("a", "2"), None]
    assert chosen[0] is not None
    assert scheduler.due == 1
    scheduler.ended(chosen[0], 0, failed=False)
    again = scheduler.next()
    assert again.key == Key("a", "3")


def test_a_policy_of_its_own_counts_for_the_topic_that_it_was_set_for() -> None:
    scheduler = SummaryScheduler(lambda tenant: SummarizePolicy(every_turns=9 if tenant == "a" else None), most=1)
    key = Key("a", "c")
    own = ConversationFacts(
        tenant="a", conversation_id="c", updated_at=0, topic_id="old", summarize=SummarizePolicy(every_turns=0)
    )
    assert scheduler.wants(key)
    assert not scheduler.wants(Key("b", "c"))
    scheduler.set_facts(key, own)
    assert scheduler.wants(key), "the topic that is there may be another one"
    assert scheduler.policy(key, "old").every_turns == 0
    assert scheduler.policy(key, "new").every_turns == 9
    scheduler.set_facts(key, None)
    assert scheduler.wants(key)
