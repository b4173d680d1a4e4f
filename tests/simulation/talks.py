"""Conversations: topics of messages, and the steps of a turn as `conversations/turns.py` takes them.

What counts in a log is the product's own `ConversationLog`; here are the log itself and the time between the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.processors.conversations.log import ConversationLog
from penstock.processors.conversations.messages import answer_message, input_messages
from penstock.processors.core.states import OVER, Stage
from penstock.processors.core.work import Run, Work
from penstock.schemas.records import ConversationMessage, conversation_message_key

if TYPE_CHECKING:
    from simulation.workers import Life


class Talks:
    """All conversation topics."""

    def __init__(self) -> None:
        self.topics: dict[str, list[tuple[bytes, ConversationMessage | None]]] = {}

    def log(self, line: str) -> ConversationLog:
        """The topic as it is now."""
        log = ConversationLog(line if line in self.topics else None)
        for offset, (key, message) in enumerate(self.topics.get(line, ())):
            log.apply(offset, key, message)
        return log

    def append(self, line: str, messages: list[ConversationMessage]) -> None:
        topic = self.topics.setdefault(line, [])
        topic.extend((conversation_message_key(message).encode(), message) for message in messages)

    def erase(self, line: str, request_id: str) -> None:
        for key in self.log(line).keys_of(request_id):
            self.topics[line].append((key, None))


class Turns:
    """One worker's turns. Nothing is written for a work that is not its own any more."""

    def __init__(self, life: Life, talks: Talks) -> None:
        self._life = life
        self._talks = talks

    def _ask(self, work: Work, label: str, at_broker: Callable[[], Any], then: Callable[[Any], None]) -> None:
        self._life.network.ask(f"turns {work.line}", f"{label} {work.request_id}", at_broker, then)

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
            self._talks.append(line, missing)
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
            self._talks.append(line, [answer])
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
