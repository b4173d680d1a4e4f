"""Known defects of redrives, as small patches. Each must be found."""

# pyright: reportPrivateUsage=false, reportUnknownLambdaType=false

from __future__ import annotations

import uuid
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from penstock.gateway.dead_letters.index import LetterIndex
from penstock.gateway.dead_letters.letters import PURGED, LetterCursor, LetterFacts
from penstock.gateway.service import redriving
from penstock.gateway.service.redriving import Redriving
from penstock.gateway.service.submitting import Submitter

_SUBMIT, _ACT, _MARK, _TAKE = Redriving._submit, LetterIndex._act, Redriving._mark, LetterIndex.take
_CURSOR = LetterCursor.of


async def sends_without_looking(self: Submitter, request: Any, traceparent: Any, keep: Any) -> None:
    await self._produce(request, traceparent, keep)


async def marks_first(self: Redriving, caller: Any, request: Any, trace: Any, give_up: float) -> None:
    """The letter is marked before its request stands on a topic."""
    place = next(
        row.place for row in self._index.page(redriving.LetterFilter(request_id=request.redriven_from), limit=1)
    )
    row = self._index.get(place)
    assert row is not None
    await _MARK(self, caller, row, redriving.REDRIVEN, request.request_id)
    await _SUBMIT(self, caller, request, trace, give_up)


async def only_submits(self: Redriving, caller: Any, row: Any, kind: str, request_id: str | None = None) -> None:
    if kind == PURGED:
        await _MARK(self, caller, row, kind, request_id)


def forgets_purges(self: LetterIndex, record: Any) -> None:
    if record.action.kind != PURGED:
        _ACT(self, record)


def forgets_letters(self: LetterIndex, records: Any) -> None:
    """One of five letters is not taken into the index."""
    _TAKE(self, [one for one in records if not isinstance(one, LetterFacts) or one.place[1] % 5 != 4])


def forgets_ends(text: str) -> LetterCursor:
    return replace(_CURSOR(text), ends=None)


PLANTS: dict[str, tuple[list[tuple[Any, str, Any]], str]] = {
    "a_new_id_each_time": ([(redriving, "redriven_request_id", lambda *of: str(uuid.uuid4()))], "twice"),
    "never_marks": ([(Redriving, "_mark", only_submits)], "unmarked"),
    "sends_without_looking": ([(Submitter, "_submit_as", sends_without_looking)], "twice"),
    "marks_first": ([(Redriving, "_submit", marks_first)], "unmarked"),
    "forgets_purges": ([(LetterIndex, "_act", forgets_purges)], "purged"),
    "forgets_ends": ([(LetterCursor, "of", forgets_ends)], "endless"),
    "forgets_letters": ([(LetterIndex, "take", forgets_letters)], "forgotten"),
}
"""The patches, and the promise that does not hold then."""


@contextmanager
def planted(name: str | None) -> Generator[None]:
    with ExitStack() as stack:
        for where, attribute, value in PLANTS[name][0] if name else []:
            stack.enter_context(patch.object(where, attribute, value))
        yield
