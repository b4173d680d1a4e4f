"""Conversations: topics of messages, and the steps of a turn as `conversations/turns.py` takes them.

What counts in a log is the product's own `ConversationLog`; here are the log itself and the time between the steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.processors.conversations.log import ConversationLog
from penstock.processors.conversations.messages import answer_message, input_messages
from penstock.processors.core.requests.states import OVER, Stage
from penstock.processors.core.requests.work import Run, Work
from penstock.schemas.records import ConversationMessage, conversation_message_key
from simulation.truth import Violation

if TYPE_CHECKING:
    from simulation.workers import Life


class Talks:
    """All conversation topics."""

    def __init__(self, *, checks_questions: bool) -> None:
        self.checks_questions = checks_questions
        self.topics: dict[str, list[tuple[bytes, ConversationMessage | None]]] = {}
        self._deleted: Counter[str] = Counter()
        self._answered: dict[tuple[str, str], float] = {}
        """When the first answer of a request was appended."""
        self._erased: set[tuple[str, str]] = set()
        self.looked: dict[Work, float] = {}
        """When a worker last looked for the answer of a request, and heard what stands."""

    def log(self, line: str) -> ConversationLog:
        """The topic as it is now."""
        log = ConversationLog(self.topic_id(line))
        for offset, (key, message) in enumerate(self.topics.get(line, ())):
            log.apply(offset, key, message)
        return log

    def topic_id(self, line: str) -> str | None:
        """Another one when the conversation was deleted and made anew; None when there is none."""
        return None if line not in self.topics else f"{line}/{self._deleted[line]}"

    def delete(self, line: str) -> None:
        del self.topics[line]
        self._deleted[line] += 1
        for known in [known for known in self._answered if known[0] == line]:
            del self._answered[known]

    def answer_before(self, work: Work, now: float) -> str | None:
        """The answer that stood when the worker last looked for it, or stands now, if it never did."""
        line, request_id = work.line or "", work.request_id
        looked_at = self.looked.get(work, now)
        standing = self.log(line).answer(request_id)
        if standing is None or self._answered.get((line, request_id), now) >= looked_at:
            return None
        return standing.content

    def append(self, line: str, messages: list[ConversationMessage], now: float) -> None:
        for message in messages:
            known = (line, message.request_id or "")
            if message.direction == "out":
                self._answered.setdefault(known, now)
                asked = self.log(line).inputs(known[1]) or known in self._erased
                if self.checks_questions and not asked:
                    raise Violation(f"question: {known[1]} is answered in {line}, where its question is not")
        topic = self.topics.setdefault(line, [])
        topic.extend((conversation_message_key(message).encode(), message) for message in messages)

    def erase(self, line: str, request_id: str) -> None:
        self._erased.add((line, request_id))
        self._answered.pop((line, request_id), None)
        for key in self.log(line).keys_of(request_id):
            self.topics[line].append((key, None))


class Turns:
    """One worker's turns. Nothing is written for a work that is not its own any more."""

    def __init__(self, life: Life, talks: Talks) -> None:
        self._life = life
        self._talks = talks

    def _ask(self, work: Work, label: str, at_broker: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """`then` hears what was found; the checks know from then on that the worker has looked."""
        world, talks = self._life.world, self._talks

        def look() -> tuple[float, Any]:
            return world.now, at_broker()

        def told(found: tuple[float, Any]) -> None:
            talks.looked[work] = found[0]
            then(found[1])

        self._life.network.ask(f"turns {work.line}", f"{label} {work.request_id}", look, told)

    def read(self, work: Work, run: Run, then: Callable[[str | None, Any], None]) -> None:
        """`then` is told the answer that stands, or the mark of the history."""
        line, request_id = work.line or "", work.request_id

        def look() -> tuple[str | None, Any]:
            log = self._talks.log(line)
            answer = log.answer(request_id)
            return (None if answer is None else answer.content), log.mark(request_id)

        def told(found: tuple[str | None, Any]) -> None:
            if _goes_on(work, run):
                then(*found)

        self._ask(work, "reads the turn", look, told)

    def begin(self, work: Work, run: Run, then: Callable[[bool], None]) -> None:
        """Append the input; `then` is told whether the history is still the one that was read."""
        line, request_id, mark = work.line or "", work.request_id, run.mark

        def look() -> list[ConversationMessage] | None:
            log = self._talks.log(line)
            if log.answer(request_id) is not None or not log.agrees(mark, request_id):
                return None
            own = log.inputs(request_id)
            return [one for one in input_messages(work.request, work.epoch, 0) if one.index not in own]

        def append(missing: list[ConversationMessage]) -> bool:
            self._talks.append(line, missing, self._life.world.now)
            return self._talks.log(line).agrees(mark, request_id)

        def told(missing: list[ConversationMessage] | None) -> None:
            if not _goes_on(work, run):
                return
            if missing is None:
                then(False)
            else:
                self._ask(
                    work, "writes its input", lambda: append(missing), lambda same: _goes_on(work, run) and then(same)
                )

        self._ask(work, "begins the turn", look, told)

    def finish(self, work: Work, text: str, then: Callable[[str], None]) -> None:
        """Append the answer unless one stands; `then` is told the one that counts."""
        line, request_id = work.line or "", work.request_id
        answer = answer_message(
            work.request,
            text,
            epoch=work.epoch,
            attempt=work.attempt,
            model=work.lane,
            finish_reason="stop",
            usage=None,
            now_ms=0,
        )

        def append() -> str:
            self._talks.append(line, [answer], self._life.world.now)
            winner = self._talks.log(line).answer(request_id)
            return text if winner is None else winner.content

        def told(standing: str | None) -> None:
            if work.stage is not Stage.KEEPING:
                return
            if standing is not None:
                then(standing)
            else:
                self._ask(
                    work, "writes its answer", append, lambda winner: work.stage is Stage.KEEPING and then(winner)
                )

        self._ask(work, "finishes the turn", lambda: self._standing(line, request_id), told)

    def answer(self, work: Work, then: Callable[[str | None], None]) -> None:
        line, request_id = work.line or "", work.request_id

        def told(standing: str | None) -> None:
            if work.stage is Stage.LOOKING:
                then(standing)

        self._ask(work, "looks for an answer", lambda: self._standing(line, request_id), told)

    def _standing(self, line: str, request_id: str) -> str | None:
        answer = self._talks.log(line).answer(request_id)
        return None if answer is None else answer.content


def _goes_on(work: Work, run: Run) -> bool:
    return work.run is run and work.stage not in OVER
