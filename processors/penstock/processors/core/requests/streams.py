"""Pieces of running streams: the first goes out at once, later ones are gathered for a linger."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from penstock.processors.core.effects import Chunk
from penstock.processors.core.work.published_prefix import PublishedPrefix, count_calls
from penstock.processors.core.work.states import Stage
from penstock.processors.core.work.work import Run, Work
from penstock.schemas.published_logprobs import PublishedLogprobs

GATHERED_PIECES = 256
"""Pieces that leave together while chunks are slow to become durable."""


class Streams:
    """`emit` takes the chunks. Nothing is said for a work whose run has ended."""

    def __init__(self, emit: Callable[[Chunk], None], linger_s: float) -> None:
        self._emit = emit
        self._linger_s = linger_s
        self.slow = False
        """Whether many chunks have no acknowledgement: then fewer and larger ones are made."""
        self._gathering: deque[tuple[Work, Run]] = deque()

    def delta(
        self,
        work: Work,
        run: Run,
        text: str,
        token_ids: list[int],
        now: float,
        calls: Sequence[dict[str, Any]] = (),
        logprobs: Sequence[dict[str, Any]] = (),
    ) -> None:
        """New text of a run, with its tokens and their log probabilities; or pieces of the calls that it makes."""
        if run.first_token_at is None:
            run.first_token_at = now
        run.text.append(text)
        run.tokens.extend(token_ids)
        if not work.stream:
            return
        for piece in calls:
            _add_piece(run.calls, piece)
        if logprobs:
            run.logprobs.extend(logprobs)
        if run.sent_pieces == 0 and (text or calls):
            self.flush(work, run)
        elif run.buffered_at is None:
            run.buffered_at = now
            self._gathering.append((work, run))

    def flush(self, work: Work, run: Run) -> None:
        """Publish what has gathered."""
        run.buffered_at = None
        text = "".join(run.text[run.sent_pieces :])
        tokens = run.tokens[run.sent_tokens :]
        calls, run.calls = run.calls, []
        if not (text or tokens or calls):
            return
        logprobs, first_logprob = _take_logprobs(run)
        chunk = Chunk(
            work.subject, text, tokens, run.sent_tokens, run.sent_chars, calls, run.since, logprobs, first_logprob
        )
        run.sent_pieces = len(run.text)
        run.sent_chars += len(text)
        run.sent_tokens += len(tokens)
        count_calls(run.sent_calls, calls)
        self._emit(chunk)

    @staticmethod
    def go_on_from(run: Run, published: PublishedPrefix) -> None:
        """The run begins behind what earlier ones have published."""
        run.text, run.tokens, run.sent_calls = [published.text], [*published.token_ids], [*published.call_chars]
        run.sent_pieces, run.sent_chars, run.sent_tokens = 1, len(published.text), len(published.token_ids)
        run.sent_logprobs = None if published.logprobs is None else published.logprobs.copy()
        run.since = published.since

    def remember(self, work: Work) -> None:
        """The work's run ends without an outcome: what it made is published, and the next one may go on from that."""
        run = work.run
        if run is None or not work.stream:
            return
        self.flush(work, run)
        if run.sent_chars or run.sent_tokens or run.sent_calls:
            since = run.since or (work.epoch, work.attempt)
            text, tokens, calls = "".join(run.text), tuple(run.tokens), tuple(run.sent_calls)
            work.published = PublishedPrefix(work.lane, text, tokens, calls, since, run.sent_logprobs)

    def tick(self, now: float) -> None:
        gathering = self._gathering
        while gathering:
            work, run = gathering[0]
            if work.run is not run or work.stage is not Stage.RUNNING or run.buffered_at is None:
                gathering.popleft()
            elif now - run.buffered_at < self._linger_s:
                return
            else:
                gathering.popleft()
                if self.slow and len(run.text) - run.sent_pieces < GATHERED_PIECES:
                    run.buffered_at = now
                    gathering.append((work, run))
                else:
                    self.flush(work, run)

    def next_due(self) -> float | None:
        """When the oldest gathering piece goes out, at the latest."""
        if not self._gathering:
            return None
        at = self._gathering[0][1].buffered_at
        return None if at is None else at + self._linger_s


def _take_logprobs(run: Run) -> tuple[list[dict[str, Any]], int]:
    """Those to be sent, and how many were sent before."""
    if not run.logprobs:
        return [], 0
    logprobs, run.logprobs = run.logprobs, []
    run.sent_logprobs = run.sent_logprobs or PublishedLogprobs()
    first = run.sent_logprobs.count
    run.sent_logprobs.add(logprobs, first)
    return logprobs, first


def _add_piece(gathered: list[dict[str, Any]], piece: dict[str, Any]) -> None:
    """A piece that continues the last one becomes a part of it."""
    last = gathered[-1] if gathered else None
    if last is not None and piece["offset"] and last["index"] == piece["index"]:
        gathered[-1] = {**last, "arguments": last["arguments"] + piece["arguments"]}
    else:
        gathered.append(piece)
