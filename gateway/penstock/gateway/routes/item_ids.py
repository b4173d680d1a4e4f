"""Ids of a conversation's items: they tell where the message stands. Pure."""

from __future__ import annotations

from penstock.schemas.errors import InvalidRequest


def offset_of(item_id: str, param: str) -> int:
    """Where the message of an item stands. Raises InvalidRequest for what is no item's id."""
    kind, _, place = item_id.partition("_")
    number = place.partition("_")[0]
    if kind not in ("msg", "fc", "fco") or not number.isdecimal():
        raise InvalidRequest(f"{param} must be the id of an item", param=param)
    return int(number)
