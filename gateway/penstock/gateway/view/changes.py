"""Which requests changed last, in the order of their changes: lists that are kept up to date ask for them. Pure."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from dataclasses import dataclass

from penstock.gateway.view.request_state import Key

MOST = 10_000
"""Requests whose newest change is remembered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Changed:
    """Requests that changed, the one that changed first in front. `cursor` continues behind them."""

    keys: list[Key]
    cursor: str
    has_more: bool


class Changes:
    """Each request is here once, at its newest change. A cursor is the number of a change of this gateway.

    All who ask within one second get what had changed when the first of them asked, so that they share cursors, and
    with these their answers.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._numbers: OrderedDict[Key, int] = OrderedDict()
        self._last = 0
        """The number of the newest change."""
        self._forgotten: dict[str, int] = {}
        """By tenant, that of the newest one that is not remembered."""
        self._mark = (-1, 0)
        """A second, and the newest change when somebody first asked within it."""
        self._at_mark: dict[Key, int] = {}
        """Of those that changed again behind the mark, the newest change in front of it."""
        self._name = secrets.token_hex(4)

    def note(self, key: Key) -> None:
        """What lists show of the request has changed."""
        if (number := self._numbers.get(key)) is not None and number <= self._mark[1]:
            self._at_mark[key] = number
        self._last += 1
        self._numbers[key] = self._last
        self._numbers.move_to_end(key)
        if len(self._numbers) > self._most:
            (tenant, _), self._forgotten[tenant] = self._numbers.popitem(last=False)

    def cursor(self, now_s: float) -> str:
        """Behind all changes that a list holds that is read from now on."""
        return self._text(self._marked(now_s))

    def since(self, cursor: str, tenant: str | None, most: int, now_s: float) -> Changed | None:
        """The first changes of a tenant, or of all, behind the cursor. None if it is of another gateway, or one is not
        remembered.
        """
        name, _, text = cursor.partition("-")
        if name != self._name or not text.isdecimal() or int(text) < self._last_forgotten(tenant):
            return None
        until = self._marked(now_s)
        found = [(n, key) for key, n in self._at_mark.items() if n > int(text) and tenant in (None, key[0])]
        for key, number in reversed(self._numbers.items()):
            if number <= int(text):
                break
            if number <= until and tenant in (None, key[0]):
                found.append((number, key))
        found.sort()
        has_more = len(found) > most
        last = found[most - 1][0] if has_more else until
        return Changed(keys=[key for _, key in found[:most]], cursor=self._text(last), has_more=has_more)

    def _last_forgotten(self, tenant: str | None) -> int:
        forgotten = self._forgotten
        return max(forgotten.values(), default=0) if tenant is None else forgotten.get(tenant, 0)

    def _marked(self, now_s: float) -> int:
        if int(now_s) != self._mark[0]:
            self._mark = (int(now_s), self._last)
            self._at_mark.clear()
        return self._mark[1]

    def _text(self, number: int) -> str:
        return f"{self._name}-{number}"
