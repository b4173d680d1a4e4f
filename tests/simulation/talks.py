"""Conversations: topics of messages, and the steps of a turn as `conversations/turns.py` takes them.

What counts in a log is the product's own `ConversationLog`; here are the log itself and the time between the steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.common.forks import ForkRecord, deleted_record, fork_record, forked_record
from penstock.processors.conversations.log import ConversationLog, SummaryMark
from penstock.processors.conversations.messages import answer_message, as_summary, input_messages
from penstock.processors.core.work.states import OVER, Stage
from penstock.processors.core.work.work import Run, Work
from penstock.schemas.errors import Conflict, PenstockError, conversation_deleted
from penstock.schemas.records import ConversationFork, ConversationMessage, conversation_message_key
from penstock.schemas.topics import conversation_key
from simulation.copies import Copies
from simulation.layouts import Layout, View
from simulation.truth import Violation

if TYPE_CHECKING:
    from simulation.workers import Life

Later = Callable[[Callable[[], None]], None]
AGAIN_S = 0.05
NO_LOOK = "looks at its topic"
"""What is asked for after an append: the topic's id alone, not whether an answer stands."""
"""After an append to a topic that was deleted meanwhile."""


class ToSumUp(NamedTuple):
    mark: SummaryMark
    standing: str | None


class Talks:
    """All conversations, as they stand on Kafka."""

    def __init__(self, layout: Layout, later: Later) -> None:
        """`later`: carries out the next step of a deletion, after a pause."""
        self.layout = layout
        self._later = later
        self._removing: set[tuple[str, str | None]] = set()
        """Conversations, with their ids, of which a removal is under way."""
        self._numbers = itertools.count()
        self._answered: dict[tuple[str, str], float] = {}
        """When the first answer of a request was appended, as far as it stands."""
        self._after_question: set[tuple[str, str]] = set()
        """Requests of which an answer was appended to a topic that holds the question, or held it before an erasure."""
        self._erased: set[tuple[str, str]] = set()
        self._summed: dict[tuple[str, str], str] = {}
        """The summary of a request that was appended first, as far as it stands."""
        self._origins: dict[str, tuple[str, bytes]] = {}
        """By fork: its parent, and the key of the record there that names it."""
        self.copies = Copies(layout)
        self.looked: dict[Work, float] = {}
        """When a worker last looked for the answer of a request, and heard what stands."""

    def log(self, line: str, view: View | None = None) -> ConversationLog:
        """The conversation as it is now, or as it is to the reader of a copy."""
        return self._log(line, None, view)

    def _log(self, line: str, limit: int | None, view: View | None) -> ConversationLog:
        """As a worker reads it, through all that it goes on from."""
        log = ConversationLog(self.topic_id(line, view), limit)
        for offset, key, message in (view or self.layout).records(line):
            if message is None or log.is_within(offset):
                log.apply(offset, key, message)
            else:
                log.skip(offset)
        if (fork := log.fork) is not None:
            parent = conversation_key(log.topic.tenant, fork.conversation_id)
            if self.topic_id(parent, view) != fork.topic_id:
                raise Violation(f"fork: {line} goes on from {parent}, whose topic is gone")
            log.inherit(self._log(parent, fork.through if limit is None else min(limit, fork.through), view))
        return log

    def identity(self, line: str, view: View | None = None) -> str | None:
        """What a turn must see again in order to write: the topic, and the newest deletion in it."""
        return None if (view or self.layout).topic_id(line) is None else self.log(line, view).identity

    def topic_id(self, line: str, view: View | None = None) -> str | None:
        """Another one when the conversation was deleted and made anew; None when there is none."""
        return (view or self.layout).topic_id(line)

    def open(self, line: str, seen: str | None) -> None:
        """Make the topic if there is none. `seen`: its id when the worker looked last."""
        self.layout.open(line, seen)

    def fork(self, tenant: str, parent_id: str, fork_id: str, where: float) -> None:
        """Through a message at some place of the parent, if both can be."""
        line, fork = conversation_key(tenant, parent_id), conversation_key(tenant, fork_id)
        counting = self.log(line).through(None)
        if not counting or self.layout.topic_id(fork) is not None or self._is_removed(line):
            return
        through = counting[int(where * len(counting))].offset
        holder = self.copies.holder(line, through)
        number = next(self._numbers)
        self.copies.copy(line, fork, through)
        goes_on_from = ConversationFork(
            conversation_id=holder.rpartition(".")[2], through=through, topic_id=self.topic_id(holder)
        )
        named = ConversationFork(conversation_id=fork_id, through=through)
        self._put(holder, forked_record(tenant, "", f"f{number}", named, 0))
        self.layout.begin(fork, fork_record(tenant, fork_id, f"f{number}", goes_on_from, 0))
        self._origins[fork] = holder, f"forked/f{number}".encode()

    def _is_removed(self, line: str) -> bool:
        return (line, self.layout.topic_id(line)) in self._removing

    def delete(self, line: str) -> None:
        """What it holds is gone for its turns. The topic goes, if there is one and no fork goes on from it; its name
        may be used again at once. Where it is shared the record `deleted` comes first, and turns go on meanwhile."""
        if self.layout.topic_id(line) is None:
            return
        if not self.layout.is_shared and not self._has_forks(line):
            self._begin_removal(line)
        else:
            self._put(line, deleted_record("", "", f"d{next(self._numbers)}", self.copies.base(line), 0))
            self.copies.end(line)
        if self.layout.is_shared:
            self._later(lambda: self._remove_if_empty(line))
        self._forget_answers(line)

    def _forget_answers(self, line: str) -> None:
        for known in [known for known in self._answered if known[0] == line]:
            del self._answered[known]

    def _remove_if_empty(self, line: str) -> None:
        """One that is deleted and not begun anew, and that no fork goes on from."""
        log = self.log(line)
        if log.topic.deletions and not log.entries() and not self._has_forks(line):
            self._begin_removal(line)

    def _begin_removal(self, line: str) -> None:
        life = line, self.layout.topic_id(line)
        if steps := self.layout.removal(line):
            self._removing.add(life)
            self._remove(life, steps)

    def _has_forks(self, line: str) -> bool:
        return any(parent == line for parent, _ in self._origins.values())

    def _remove(self, life: tuple[str, str | None], steps: Sequence[Callable[[], object]]) -> None:
        """Take the next step; turns go on between two."""
        steps[0]()
        line, topic_id = life
        if life in self._removing and self.layout.topic_id(line) != topic_id:
            self._removing.discard(life)
            self._gone(line)
        if steps[1:]:
            self._later(lambda: self._remove(life, steps[1:]))

    def _gone(self, line: str) -> None:
        """With it goes what it alone went on from, if that was deleted and is not begun anew."""
        self.copies.forget(line)
        self._forget_answers(line)
        if (origin := self._origins.pop(line, None)) is None:
            return
        parent, key = origin
        self.layout.append(parent, [(key, None)])
        self._remove_if_empty(parent)

    def _put(self, line: str, record: ForkRecord) -> None:
        self.layout.append(line, [(record.key.encode(), record.message)])

    def answer_before(self, work: Work, now: float) -> str | None:
        """The answer that stood when the worker last looked, or that it appended; what stands now, if neither."""
        line, request_id = work.conversation or "", work.request_id
        looked_at = self.looked.get(work, now)
        standing = self.log(line).answer(request_id)
        if standing is None or self._answered.get((line, request_id), now) > looked_at:
            return None
        return standing.content

    def append(self, line: str, messages: list[ConversationMessage], now: float) -> bool:
        """Append to the conversation that has the name now. False when there is no topic for it."""
        for message in messages if self.layout.topic_id(line) is not None else ():
            known = (line, message.request_id or "")
            if message.direction == "out":
                self._answered.setdefault(known, now)
                if self._stands_asked(line, known[1]):
                    self._after_question.add(known)
            elif message.direction == "summary":
                self._summed.setdefault(known, message.content)
        return self.layout.append(line, [(conversation_message_key(one).encode(), one) for one in messages])

    def erase(self, line: str, request_id: str) -> None:
        self._erased.add((line, request_id))
        first = self.log(line).first_of(request_id)
        self.take_back(line, request_id)
        if first is not None:
            self._forget_in_forks(line, first)

    def _forget_in_forks(self, line: str, offset: int) -> None:
        """Summaries of forks that tell of the message at an offset."""
        for fork in [fork for fork, (parent, _) in self._origins.items() if parent == line]:
            if self.copies.base(fork) > offset:
                told = self.log(fork).summaries_of_message(offset)
                self.layout.append(fork, [(key, None) for key in told])
                self._forget_sums(fork)
                self._forget_in_forks(fork, offset)

    def take_back(self, line: str, request_id: str, strays: Iterable[ConversationMessage] = ()) -> None:
        """Write tombstones for all messages of a request, and for `strays`, which may stand in no conversation."""
        self._answered.pop((line, request_id), None)
        if (line, request_id) not in self._erased:
            self._summed.pop((line, request_id), None)
        keys = self.log(line).keys_of(request_id)
        if self.layout.is_shared:
            keys = list(dict.fromkeys((*keys, *(conversation_message_key(one).encode() for one in strays))))
        self.layout.append(line, [(key, None) for key in keys])
        self._forget_sums(line)

    def _forget_sums(self, line: str) -> None:
        """Summaries that went because something of what they were made of went: their requests may add others."""
        log = self.log(line)
        for known in [known for known in self._summed if known[0] == line and known not in self._erased]:
            if log.summary_by(known[1]) is None:
                del self._summed[known]

    # -- checks

    def sees_all(self, line: str, log: ConversationLog) -> None:
        """Who reads a copy sees all that stands on Kafka."""
        if self.layout.is_shared:
            seen, standing = ([one.offset for one in some.through(None)] for some in (log, self.log(line)))
            if seen != standing:
                raise Violation(f"copy: a turn of {line} reads {seen}, and there stand {standing}")

    def completes(self, work: Work) -> None:
        """A turn's outcome is an answer that was written where its question stood."""
        if (work.conversation or "", work.request_id) not in self._after_question:
            raise Violation(f"question: {work} is completed, and its answer was never written behind its question")

    def sums_up(self, work: Work, text: str) -> None:
        """The outcome of a summary is the first that its request has added to the conversation."""
        added = self._summed.get((_line(work), work.request_id))
        if added != text:
            raise Violation(f"summary: {work} is completed with {text!r}, and its conversation has {added!r}")

    def at_end(self, erased: Collection[tuple[str, str]]) -> None:
        """Each answer stands where its question does, forks are what copies would be, nothing of `erased` stands."""
        self.layout.check()
        for line in self.copies:
            self.copies.check(line, self.log(line))
        for line in self.layout.lines():
            for message in (entry.message for entry in self.log(line).through(None)):
                request_id = message.request_id or ""
                if (line, request_id) in erased:
                    raise Violation(f"erasure: {message.direction} of {request_id} stands in {line}, and it was erased")
                if message.direction == "out" and not self._stands_asked(line, request_id):
                    raise Violation(f"question: {request_id} is answered in {line}, where its question is not")

    def _stands_asked(self, line: str, request_id: str) -> bool:
        if self.log(line).inputs(request_id) or (line, request_id) in self._erased:
            return True
        origin = self._origins.get(line)
        return origin is not None and self._stands_asked(origin[0], request_id)


class Turns:
    """One worker's turns. Nothing is written for a work that is not its own any more.

    What a turn writes belongs into the topic with one id. The topic is looked up after each append, and what came
    into another one is taken back.
    """

    def __init__(self, life: Life, talks: Talks) -> None:
        self._life = life
        self._talks = talks
        self._view = talks.layout.view()
        self._rng = life.world.stream(f"copy/{life.name}")
        self._writable: set[str] = set()
        """Ids of topics that this worker saw before it carried out all commands."""

    def _ask(self, work: Work, label: str, at_broker: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """`then` hears what was found; the checks know from then on that the worker has looked."""
        world, talks = self._life.world, self._talks

        def look() -> tuple[float, Any]:
            return world.now, at_broker()

        def told(found: tuple[float, Any]) -> None:
            behind_s = self._behind_s()
            if behind_s:
                world.at(behind_s, self._life, f"{self._life.name} has read its copy", heard, found)
            else:
                heard(found)

        def heard(found: tuple[float, Any]) -> None:
            if label != NO_LOOK and work.stage not in (
                Stage.DEAD_LETTERING,
                Stage.PUBLISHING,
            ):  # too late to change its end
                talks.looked[work] = found[0]
            then(found[1])

        self._life.network.ask(f"turns {_line(work)}", f"{label} {work.request_id}", look, told)

    def _behind_s(self) -> float:
        """How long the copy takes to get where the topic ended when the turn asked."""
        if self._view is None or not self._life.cluster.happens("slow_copy", self._rng, 0.1):
            return 0.0
        return self._rng.uniform(0.01, 1.0)

    def read(self, work: Work, run: Run, then: Callable[[str | None, Any], None]) -> None:
        """`then` is told the answer that stands, or the mark of the history."""
        line, request_id = work.conversation or "", work.request_id

        def look() -> tuple[str | None, Any]:
            log = self._talks.log(line, self._view)
            self._talks.sees_all(line, log)
            if line in self._talks.copies:
                self._talks.copies.check(line, log)
            answer = log.answer(request_id)
            return (None if answer is None else answer.content), log.mark(request_id)

        def told(found: tuple[str | None, Any]) -> None:
            if _goes_on(work, run):
                then(*found)

        self._ask(work, "reads the turn", look, told)

    def begin(self, work: Work, run: Run, then: Callable[[str | None], None]) -> None:
        """Append the input; `then` is told the topic's id, or None when the history is not the one that was read."""

        def attempt() -> None:
            if _begins(work, run):
                self._ask(work, "begins the turn", lambda: self._is_current(work, run.mark.topic_id), seen)

        def seen(current: bool) -> None:
            if _begins(work, run):
                if current:
                    self._make_writable(
                        work, run, lambda topic_id: self._write_input(work, run, topic_id, then, attempt)
                    )
                else:
                    then(None)

        attempt()

    def _make_writable(self, work: Work, run: Run, then: Callable[[str], None]) -> None:
        """A deletion is commanded before the topic goes: a worker sees a topic, or none, then reads the commands."""
        line = work.conversation or ""

        def look() -> None:
            self._ask(work, "looks for its topic", lambda: self._talks.identity(line, self._view), found)

        def found(topic_id: str | None) -> None:
            if not _begins(work, run):
                return
            if topic_id is not None and topic_id in self._writable:
                then(topic_id)
            else:
                self._life.network.ask(
                    "control", "reads commands to the end", lambda: None, lambda _: caught_up(topic_id)
                )

        def caught_up(topic_id: str | None) -> None:
            if not _begins(work, run):
                return
            if topic_id is not None:
                self._writable.add(topic_id)
            self._ask(work, "opens its topic", lambda: self._talks.open(line, topic_id), lambda _: look())

        look()

    def _write_input(
        self, work: Work, run: Run, topic_id: str, then: Callable[[str | None], None], again: Callable[[], None]
    ) -> None:
        line, request_id, mark = work.conversation or "", work.request_id, run.mark

        def is_open(log: ConversationLog) -> bool:
            return log.answer(request_id) is None and log.agrees(mark, request_id)

        def look() -> list[ConversationMessage] | None:
            log = self._talks.log(line, self._view)
            if not is_open(log):
                return None
            own = log.inputs(request_id)
            return [one for one in input_messages(work.request, work.epoch, 0) if one.index not in own]

        def told(missing: list[ConversationMessage] | None) -> None:
            if not _begins(work, run):
                return
            if missing is None:
                then(None)
            elif not missing:
                then(topic_id)
            else:
                self._append(work, topic_id, missing, lambda: _begins(work, run), appended, again)

        def appended(log: ConversationLog) -> None:
            then(topic_id if is_open(log) else None)

        self._ask(work, "reads before its input", look, told)

    def _append(
        self,
        work: Work,
        topic_id: str,
        messages: list[ConversationMessage],
        mine: Callable[[], bool],
        then: Callable[[ConversationLog], None],
        again: Callable[[], None],
    ) -> None:
        """`then` is told the log as it was behind the append; `again` follows when the topic was deleted."""
        line = _line(work)

        def append() -> ConversationLog | None:
            written = self._talks.append(line, messages, self._life.world.now)
            return self._talks.log(line, self._view) if written else None

        def written(log: ConversationLog | None) -> None:
            if log is None:
                if mine():
                    self._later(work, again)
            elif mine() or self._talks.layout.is_shared:  # lost work takes back what it wrote, too
                self._ask(work, NO_LOOK, look, lambda same: looked(log, same))

        def look() -> bool:
            same = self._talks.identity(line, self._view) == topic_id
            if not same:
                self._talks.take_back(line, work.request_id, messages)
            return same

        def looked(log: ConversationLog, same: bool) -> None:
            if not mine():
                return
            if same:
                then(log)
            else:
                self._later(work, again)

        self._ask(work, f"writes {messages[0].direction}", append, written)

    def _later(self, work: Work, again: Callable[[], None]) -> None:
        life = self._life
        life.world.at(AGAIN_S, life, f"{life.name} tries again to write for {work.request_id}", again)

    def finish(self, work: Work, text: str, then: Callable[[str], None], deleted: Callable[[], None]) -> None:
        """Append the answer unless one stands; `then` is told the one that counts. `deleted`: its topic is gone."""
        line, request_id = work.conversation or "", work.request_id
        topic_id = "" if work.run is None else work.run.topic_id or ""
        answer = _answer(work, text)

        def attempt() -> None:
            if keeps():
                self._ask(work, "finishes the turn", look, told)

        def keeps() -> bool:
            return work.stage is Stage.STORING

        def look() -> tuple[bool, str | None]:
            current = self._is_current(work, topic_id)
            return current, self._standing(line, request_id) if current else None

        def told(found: tuple[bool, str | None]) -> None:
            current, standing = found
            if not keeps():
                return
            if not current:
                deleted()
            elif standing is not None:
                then(standing)
            else:
                self._append(work, topic_id, [answer], keeps, appended, attempt)

        def appended(log: ConversationLog) -> None:
            winner = log.answer(request_id)
            then(text if winner is None else winner.content)

        attempt()

    def answer(self, work: Work, then: Callable[[str | None], None]) -> None:
        line, request_id = _line(work), work.request_id

        def told(standing: str | None) -> None:
            if work.stage is Stage.CHECKING_FOR_ANSWER:
                then(standing)

        def look() -> str | None:
            if work.conversation is not None:
                return self._standing(line, request_id)
            summary = self._talks.log(line, self._view).summary_by(request_id)
            return None if summary is None else summary.content

        self._ask(work, "looks for an answer", look, told)

    # -- summaries: of no turn

    def to_sum_up(self, work: Work, run: Run, then: Callable[[ToSumUp | None], None]) -> None:
        """`then` is told what there is to sum up, and the summary that the request has added; None: nothing."""
        line, request_id = _line(work), work.request_id

        def look() -> ToSumUp | None:
            log = self._talks.log(line, self._view)
            found = log.through(None)
            if log.topic_id is None or not found:
                return None
            standing = log.summary_by(request_id)
            mark = log.summary_mark(found[-1].offset)
            return ToSumUp(mark, None if standing is None else standing.content)

        def told(found: ToSumUp | None) -> None:
            if _goes_on(work, run):
                then(found)

        self._ask(work, "reads what to sum up", look, told)

    def add_summary(
        self,
        work: Work,
        text: str,
        made_of: SummaryMark,
        then: Callable[[str], None],
        failed: Callable[[PenstockError], None],
    ) -> None:
        """Append the summary unless the request has added one; `then` is told the one that counts."""
        line, request_id = _line(work), work.request_id
        summary = as_summary(_answer(work, text), made_of.through)

        def keeps() -> bool:
            return work.stage is Stage.STORING

        def attempt() -> None:
            if keeps():
                self._ask(work, "adds its summary", look, told)

        def look() -> ConversationLog | None:
            return self._talks.log(line, self._view) if self._is_current(work, made_of.topic_id) else None

        def told(log: ConversationLog | None) -> None:
            if not keeps():
                return
            if log is None:
                failed(conversation_deleted())
            elif (standing := log.summary_by(request_id)) is not None:
                then(standing.content)
            elif log.has(made_of):
                self._append(work, made_of.topic_id or "", [summary], keeps, appended, attempt)
            else:
                failed(Conflict("erased"))

        def appended(log: ConversationLog) -> None:
            if log.has(made_of):
                winner = log.summary_by(request_id)
                then(text if winner is None else winner.content)
            else:
                self._talks.take_back(line, request_id)
                failed(Conflict("erased"))

        attempt()

    def _is_current(self, work: Work, topic_id: str | None) -> bool:
        """Whether the topic is the one that the turn has seen. What of the turn came into another is taken back."""
        line = _line(work)
        if topic_id is None or self._talks.identity(line, self._view) == topic_id:
            return True
        self._talks.take_back(line, work.request_id)
        return False

    def _standing(self, line: str, request_id: str) -> str | None:
        answer = self._talks.log(line, self._view).answer(request_id)
        return None if answer is None else answer.content


def _answer(work: Work, text: str) -> ConversationMessage:
    return answer_message(
        work.request,
        text,
        epoch=work.epoch,
        attempt=work.attempt,
        model=work.lane,
        finish_reason="stop",
        usage=None,
        now_ms=0,
    )


def _line(work: Work) -> str:
    """The key of its conversation, also of what is no turn of it."""
    return work.conversation or conversation_key(work.tenant, work.conversation_id or "")


def _goes_on(work: Work, run: Run) -> bool:
    return work.run is run and work.stage not in OVER


def _begins(work: Work, run: Run) -> bool:
    return work.run is run and work.stage is Stage.BEGINNING
