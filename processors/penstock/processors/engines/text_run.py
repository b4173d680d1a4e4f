"""One run of the text backend: cumulative tokens in, text deltas and the outcome out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from penstock.processors.core.stops import StopMatcher
from penstock.processors.engines.backend import Emit
from penstock.processors.engines.base import Finished, RunSpec
from penstock.processors.engines.detokenise import Detokeniser


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
        prompt: Sequence[int] = (),
        new_tokens: int = 0,
    ) -> None:
        self.prompt, self.new_tokens = prompt, new_tokens
        """What the loop was given: a run that memory ran out under is given to it again, with what it has said."""
        self.before: Sequence[int] = ()
        """Tokens from before it was given to the loop again."""
        self.run_id = spec.run_id
        self.params = spec.params
        self.streams = spec.stream
        stops: Sequence[str] = spec.params.get("stop") or ()
        self._stops = bool(stops)
        self._matcher = StopMatcher(stops)
        self._prompt_tokens = prompt_tokens
        self._detokeniser = detokeniser
        self._is_end = is_end
        self._emit = emit
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
        """The loop has lost it: what was told stands, the rest is made anew."""
        self.before = list(self._ids)

    def take(self, ids: Sequence[int], *, final: bool = False) -> None:
        """All tokens so far; of a `final` call nothing follows. Emits the new text."""
        # With stop strings a token at a time, so that the count of tokens does not depend on when they were looked at.
        first = self.seen + 1 if self._stops and len(ids) > self.seen else len(ids)
        text = ""
        for end in range(first, len(ids) + 1):
            last = end == len(ids)
            self._ids = ids if last else ids[:end]
            text += self._matcher.feed(self._detokeniser.feed(self._ids, final=final and last))
            if self._matcher.stopped:
                break
        self.seen = len(ids)
        if final and not self._matcher.stopped:
            text += self._matcher.flush()
        self._tell(text)

    def _tell(self, text: str) -> None:
        if not text:
            return
        self._text.append(text)
        if self.streams:
            self._emit(("delta", self.run_id, text, list(self._ids[self._told :]), self._told))
        self._told = len(self._ids)

    def finish(self) -> None:
        made = len(self._ids)
        at_end = self._matcher.stopped or (made > 0 and self._is_end(self._ids[-1]))
        usage = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": made,
            "total_tokens": self._prompt_tokens + made,
        }
        output: dict[str, Any] = {"text": "".join(self._text)}
        finished = Finished(
            run_id=self.run_id,
            output=output,
            finish_reason="stop" if at_end else "length",
            usage=usage,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=made,
        )
        self._emit(("finished", finished))
