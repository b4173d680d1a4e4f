"""Which regular expressions of schemas can be enforced: found by trial, and remembered. In an engine's process only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress

from penstock.processors.engines.guidance.forms import SchemaPart, json_rule, patterns_of
from penstock.processors.engines.guidance.grammars import Grammars
from penstock.schemas.errors import InvalidRequest

PATTERNS_TRIED = 64
"""How many patterns of one request are tried one by one when its grammar cannot be enforced."""
PATTERNS_KEPT = 65_536
"""Far more than all requests that wait can have tried: none loses its own before its plan is made."""


class Patterns:
    """Holds the patterns that cannot be enforced, as far as they are known; to ask for one keeps it remembered."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._known: OrderedDict[int, bool] = OrderedDict()
        """Whether it can be enforced, by its hash: patterns may be long."""

    def __contains__(self, pattern: object) -> bool:
        key = hash(pattern)
        with suppress(KeyError):  # plans are made in threads
            self._known.move_to_end(key)
        return self._known.get(key) is False

    async def find(self, parts: Sequence[SchemaPart]) -> None:
        """Try the patterns of one request. Raises InvalidRequest for one that a strict schema has."""
        found = [(part, *one) for part in parts for one in patterns_of(part.schema, part.param)]
        tried: set[str] = set()
        for part, place, pattern in found:
            if pattern not in tried:
                if len(tried) == PATTERNS_TRIED:
                    return
                tried.add(pattern)
                await self._try(pattern, place)
            if part.strict and pattern in self:
                raise InvalidRequest(
                    f"{place} cannot be enforced: look-around, back references and word boundaries are not supported",
                    param=place,
                )

    async def _try(self, pattern: str, place: str) -> None:
        if hash(pattern) in self._known:
            return
        rule = f"start: {json_rule({'type': 'string', 'pattern': pattern}, place)}"
        try:
            await self._grammars.tried(rule, place)
        except InvalidRequest:
            if self._grammars.was_too_complex(rule):
                raise
            self._known[hash(pattern)] = False
        else:
            self._known[hash(pattern)] = True
        if len(self._known) > PATTERNS_KEPT:
            self._known.popitem(last=False)
