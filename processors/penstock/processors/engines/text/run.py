"""One run of the text backend: cumulative tokens in, text deltas and the outcome out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from penstock.processors.core.work.published_prefix import PublishedPrefix
from penstock.processors.engines.backend import Emit, Event
from penstock.processors.engines.base import Finished, RunSpec, usage_of
from penstock.processors.engines.batching.controls import Control
from penstock.processors.engines.guidance.calls import CallReader
from penstock.processors.engines.stops import StopMatcher
from penstock.processors.engines.text.detokenise import Detokeniser
from penstock.schemas.fold import new_pieces
from penstock.schemas.published_logprobs import PublishedLogprobs


class TextRun:
    """`over` once it has emitted its outcome, or has been cancelled."""

    def __init__(
        self,
        spec: RunSpec,
        prompt_tokens: int,
        detokeniser: Detokeniser,
        is_end: Callable[[int], bool],
        emit: Emit,
        *,
        run_id: str | None = None,
        calls: CallReader | None = None,
        logprobs: Callable[[int, int], list[dict[str, Any]]] | None = None,
        prompt_logprobs: Callable[[], list[dict[str, Any]]] | None = None,
    ) -> None:
        """`run_id` is that of one answer of several; `logprobs(begin, end)` gives those of its tokens in that range."""
        self.run_id = run_id or spec.run_id
        self.params = spec.params
        self.priority = spec.priority
        self.prompt: Sequence[int] = ()
        self.new_tokens = 0
        self.end_ids: list[int] = []
        self.min_tokens = 0
        """Stop strings are not looked for in so many tokens."""
        self.control: Control | None = None
        """What the loop was given: a run that memory ran out under is given to it again, with what it has said."""
        self.reused_tokens: int | None = None
        """Of the prompt, found in the cache; None when it cannot be known."""
        self.before: Sequence[int] = ()
        """Tokens from before it was given to the loop again."""
        self.streams = spec.stream
        stops: Sequence[str] = spec.params.get("stop") or ()
        self._stops = bool(stops)
        self._matcher = StopMatcher(stops)
        self._prompt_tokens = prompt_tokens
        self._detokeniser = detokeniser
        self._is_end = is_end
        self._emit = emit
        self._calls = calls
        self._is_chat = spec.messages is not None
        self._logprobs_of = logprobs
        self._logprobs = PublishedLogprobs()
        self._prompt_logprobs = prompt_logprobs
        self._text: list[str] = []
        self._ids: Sequence[int] = ()
        self._told = 0
        self.seen = 0

    @property
    def wants_steps(self) -> bool:
        """Whether tokens must be looked at as they come; else the whole comes at the end, for less work."""
        return self.streams or self._stops

    @property
    def stopped(self) -> bool:
        """A stop string has come: what follows is not wanted."""
        return self._matcher.stopped

    def rewind(self) -> None:
        """The loop has lost it: what was emitted stays, the rest is generated again."""
        self.before = list(self._ids)
        if self.control is not None:
            self.control.go_on_behind(len(self.before))

    def go_on_from(self, published: PublishedPrefix) -> bool:
        """Begin behind the published prefix of an earlier run, and emit the rest that its tokens decode to here.

        False when they do not make that text, or those calls: then the run cannot go on, and is of no use any more.
        """
        emit, made_here = self._emit, list[Event]()
        self._emit, logprobs_of = made_here.append, self._logprobs_of
        self._logprobs_of = None
        self.take(published.token_ids)
        self._logprobs_of = logprobs_of
        if published.logprobs is not None:
            self._logprobs = published.logprobs.copy()
        self._emit = emit
        text, known = "".join(self._text), [*published.call_chars]
        pieces, _ = new_pieces(known, (piece for event in made_here for piece in event[5]))
        made = [0] * len(known) if self._calls is None else self._calls.made_chars
        same = text.startswith(published.text) and known == made
        if logprobs_of is not None and self._logprobs.count != self._count_logprobs(published.token_ids):
            return False
        if not same or (self.control is not None and not self.control.begin_with(published.token_ids)):
            return False
        self.before = published.token_ids
        if pieces or text != published.text:
            self._emit(("delta", self.run_id, text[len(published.text) :], [], len(self.before), pieces, ()))
        return True

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to generate behind the published prefix."""
        return self.stopped or len(self.before) >= self.new_tokens or self._is_end(self.before[-1])

    def take(self, ids: Sequence[int], *, final: bool = False) -> None:
        """All tokens so far; of a `final` call nothing follows. Emits the new text."""
        # With stop strings a token at a time, so that the count of tokens does not depend on when they were looked at.
        first = self.seen + 1 if self._stops and len(ids) > self.seen else len(ids)
        text = ""
        for end in range(first, len(ids) + 1):
            last = end == len(ids)
            self._ids = ids if last else ids[:end]
            piece = self._detokeniser.feed(self._ids, final=final and last)
            text += piece if end <= self.min_tokens else self._matcher.feed(piece)
            if self._matcher.stopped:
                break
        self.seen = len(ids)
        if final and not self._matcher.stopped:
            text += self._matcher.flush()
        self._tell(text if self._calls is None else self._calls.feed(text))

    def _tell(self, text: str) -> None:
        pieces = () if self._calls is None else self._calls.take_pieces()
        if not text and not pieces:
            return
        if text:
            self._text.append(text)
        if self.streams:
            logprobs = self._take_logprobs()
            self._emit(("delta", self.run_id, text, list(self._ids[self._told :]), self._told, pieces, logprobs))
        self._told = len(self._ids)

    def _take_logprobs(self) -> Sequence[dict[str, Any]]:
        """Those that were not emitted yet, where they are wanted."""
        if self._logprobs_of is None:
            return ()
        first = self._logprobs.count
        new = self._logprobs_of(first, self._count_logprobs(self._ids))
        self._logprobs.add(new, first)
        return new

    def _count_logprobs(self, ids: Sequence[int]) -> int:
        """The token that ends a chat is no part of it. That of a plain prompt is emitted, as other servers do."""
        return len(ids) - (self._is_chat and len(ids) > 0 and self._is_end(ids[-1]))

    def finish(self) -> None:
        if self._calls is not None:
            self._tell(self._calls.flush())
        made = len(self._ids)
        ended = made > 0 and self._is_end(self._ids[-1])
        at_end = self._matcher.stopped or ended
        usage = usage_of(self._prompt_tokens, made)
        if self.reused_tokens is not None:
            usage["cached_tokens"] = min(self.reused_tokens, self._prompt_tokens)
        output: dict[str, Any] = {"text": "".join(self._text)}
        reason = "stop" if at_end else "length"
        if self._calls is not None and self._calls.calls:
            output["tool_calls"] = self._calls.calls
            reason = "tool_calls" if at_end else reason
        if self._logprobs_of is not None:
            self._take_logprobs()
            output["logprobs"] = self._logprobs.tokens()
        if self._prompt_logprobs is not None:
            output["prompt_logprobs"] = self._prompt_logprobs()
        finished = Finished(run_id=self.run_id, output=output, finish_reason=reason, usage=usage)
        self._emit(("finished", finished))
