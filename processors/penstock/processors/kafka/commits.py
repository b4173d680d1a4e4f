"""Commits on their way to the broker: one at a time, the newest of each partition, never lower than what is known.

Pure. `CommitQueue` says what to send next; the poll thread sends it and reports the answer.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.processors.kafka.batches import TP, Committed

logger = logging.getLogger(__name__)

Answered = Callable[[dict[TP, bool]], None]


@dataclass(slots=True, eq=False)
class _Question:
    """One call of `ask`, until each of its partitions has an answer."""

    left: set[TP]
    results: dict[TP, bool]
    answered: Answered

    def settle(self, tp: TP, taken: bool) -> None:
        self.left.discard(tp)
        self.results[tp] = taken
        if not self.left:
            self.answered(self.results)


_Questions = defaultdict[TP, list[_Question]]


@dataclass(slots=True, eq=False)
class Sent:
    """A commit on its way, and who waits for it."""

    offsets: dict[TP, Committed]
    questions: _Questions = field(default_factory=lambda: defaultdict(list))


class CommitQueue:
    """The commits of one assignment."""

    def __init__(self) -> None:
        self.known: dict[TP, Committed] = {}  # what the broker has
        self._newest: dict[TP, Committed] = {}  # what was sent last, whatever the answer was
        self._lowest: dict[TP, int] = {}  # nothing lower is sent
        self._waiting: dict[TP, Committed] = {}
        self._questions: _Questions = defaultdict(list)
        self._alone: list[TP] = []  # to be sent without others, because together they failed
        self.sent: Sent | None = None

    def begin(self, committed: Mapping[TP, Committed]) -> None:
        """A new assignment, with what the broker has; what was on its way is answered with False."""
        open_questions = [self._questions, *([self.sent.questions] if self.sent is not None else [])]
        self.known = dict(committed)
        self._newest = {}
        self._lowest = {tp: offset for tp, (offset, _) in committed.items()}
        self._waiting = {}
        self._questions = defaultdict(list)
        self._alone = []
        self.sent = None
        for questions in open_questions:
            for tp, waiting in questions.items():
                for question in waiting:
                    question.settle(tp, False)

    def ask(self, offsets: Mapping[TP, Committed], answered: Answered) -> None:
        """Commit these. `answered` is called once, perhaps at once, with what the broker took."""
        question = _Question(set(), {}, answered)
        for tp, wanted in offsets.items():
            lowest = self._lowest.get(tp)
            if lowest is None or wanted[0] < lowest:
                if lowest is not None:
                    logger.error("group.commit_refused partition=%s offset=%d known=%d", tp, wanted[0], lowest)
                question.results[tp] = False
            elif wanted == self.known.get(tp) and tp not in self._waiting and not self._on_its_way(tp):
                question.results[tp] = True
            else:
                self._waiting[tp] = wanted
                self._lowest[tp] = wanted[0]
                question.left.add(tp)
                self._questions[tp].append(question)
        if not question.left:
            answered(question.results)

    def _on_its_way(self, tp: TP) -> bool:
        return self.sent is not None and tp in self.sent.offsets

    def possible(self, tp: TP) -> frozenset[Committed]:
        """What the broker may have of a partition by this member's commits: an answer may have been lost."""
        return frozenset(one[tp] for one in (self.known, self._newest) if tp in one)

    def next(self) -> Sent | None:
        """What to send now; None while a commit is on its way, or when there is nothing."""
        if self.sent is not None or not self._waiting:
            return None
        tps = list(self._waiting)
        while self._alone:
            tp = self._alone.pop()
            if tp in self._waiting:
                tps = [tp]
                break
        sent = self.sent = Sent({tp: self._waiting.pop(tp) for tp in tps})
        self._newest.update(sent.offsets)
        for tp in tps:
            sent.questions[tp] = self._questions.pop(tp, [])
        return sent

    def all_open(self) -> dict[TP, Committed]:
        """Everything without an answer, the newest of each partition: to be sent once more before partitions go."""
        everything = {**(self.sent.offsets if self.sent is not None else {}), **self._waiting}
        self._newest.update(everything)
        return everything

    def answer(self, sent: Sent, results: Mapping[TP, bool], *, one_by_one: bool = False) -> None:
        """The broker's answer. `one_by_one`: a single partition may be to blame, so each is tried alone."""
        if sent is not self.sent:
            return  # of an earlier assignment
        self.sent = None
        if one_by_one and len(sent.offsets) > 1:
            for tp, wanted in sent.offsets.items():
                self._waiting.setdefault(tp, wanted)
                self._questions[tp] = sent.questions[tp] + self._questions[tp]
                self._alone.append(tp)
            return
        for tp, wanted in sent.offsets.items():
            taken = results.get(tp, False)
            if taken:
                self.known[tp] = wanted
            for question in sent.questions[tp]:
                question.settle(tp, taken)

    def answer_all(self, results: Mapping[TP, bool]) -> None:
        offsets, questions = self.all_open(), self._questions
        if self.sent is not None:
            for tp, waiting in self.sent.questions.items():
                questions[tp] = waiting + questions[tp]
        self._waiting, self._questions, self._alone = {}, defaultdict(list), []
        self.sent = Sent(offsets, questions)
        self.answer(self.sent, results)
