"""What a remote run passes to its sink: text with its position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.processors.engines.base import Delta
from penstock.processors.engines.sinks import GuardedSink
from penstock.schemas.errors import InternalError


class Shown:
    """Text on its way to the sink, with its place.

    `holds_space`: white space waits for what follows it. Chat templates strip it from the end of a prefix. Log
    probabilities wait for the text of their tokens.
    """

    def __init__(self, run_id: str, sink: GuardedSink, *, holds_space: bool) -> None:
        self._run_id, self._sink, self._holds_space = run_id, sink, holds_space
        self._held, self._logprobs = "", list[dict[str, Any]]()
        self._pieces = 0

    def show(self, text: str, calls: Sequence[dict[str, Any]] = (), logprobs: Sequence[dict[str, Any]] = ()) -> None:
        self._logprobs += logprobs
        text = self._held + text
        ready = text.rstrip() if self._holds_space and not calls else text
        self._held = text[len(ready) :]
        self._tell(ready, calls)

    def end(self, text: str) -> None:
        text, self._held = self._held + text, ""
        self._tell(text, ())

    def _tell(self, text: str, calls: Sequence[dict[str, Any]]) -> None:
        if not text and not calls:
            return
        logprobs, self._logprobs = ([], self._logprobs) if self._held else (self._logprobs, [])
        delta = Delta(
            run_id=self._run_id,
            text=text,
            token_ids=[],
            first_token_index=self._pieces,
            calls=calls,
            logprobs=logprobs,
        )
        self._pieces += 1
        if not self._sink.delta(delta):
            raise InternalError("the run is over")  # the sink knows; this closes the stream
