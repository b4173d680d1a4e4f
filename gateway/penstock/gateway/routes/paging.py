"""Lists as pages: `after`, `limit` and `order` in, OpenAI's list shape out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar

from fastapi import Query

T = TypeVar("T")

Limit = Annotated[int, Query(ge=1, le=100, description="Items on a page.")]
After = Annotated[str | None, Query(description="The `last_id` of the page before.")]
Include = Annotated[list[str] | None, Query(alias="include[]", description="Accepted; everything is there.")]
"""What stock clients of OpenAI ask to have shown of the items of a list."""
Order = Annotated[Literal["asc", "desc"], Query(description="Oldest or newest first.")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part(Generic[T]):
    """What is on one page. `end`: where the list ends, as `last_id` carries it; None: the pages end by themselves."""

    items: Sequence[T]
    has_more: bool
    end: str | None

    def page(self, shown: Sequence[dict[str, Any]], ids: Sequence[str] | None = None) -> dict[str, Any]:
        made = page(shown, has_more=self.has_more, ids=ids)
        return {**made, "last_id": f"{made['last_id']}@{self.end}"} if self.end is not None and shown else made


def number(place: int) -> str:
    """A time or an offset in the order of text."""
    return f"{place:015d}"


async def read_part(
    read: Callable[[str | None, int, bool], Awaitable[Sequence[T]]],
    place: Callable[[T], str],
    after: str | None,
    limit: int,
    order: Literal["asc", "desc"],
    *,
    end_now: Callable[[], Awaitable[str]] | None = None,
) -> Part[T]:
    """One page of a list to which others write. Oldest first, the first page fixes the end: what is added later is on
    no further page, so that the pages end. Newest first it is in front of them.

    `read` gets (the id before, the number of items, newest first). `place` gives an item's place in the order of the
    list, `end_now` the place of the last item, which is read if it is None.
    """
    before, _, carried = (after or "").partition("@")
    end = carried or None
    found = await read(before or None, limit + 1, order == "desc")
    if order == "desc":
        end = None
    elif end is None and len(found) > limit:
        end = place((await read(None, 1, True) or found[-1:])[0]) if end_now is None else await end_now()
    if end is not None:
        found = [one for one in found if place(one) <= end]
    return Part(items=found[:limit], has_more=len(found) > limit, end=end if len(found) > limit else None)


def page(
    items: Sequence[dict[str, Any]], *, has_more: bool = False, ids: Sequence[str | None] | None = None
) -> dict[str, Any]:
    """One page; `has_more` when others follow. `ids` name the items, in place of their field `id`."""
    ids = [item.get("id") for item in items] if ids is None else ids
    return {
        "object": "list",
        "data": list(items),
        "has_more": has_more,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
    }


def first_page(items: Sequence[dict[str, Any]], *, limit: int) -> dict[str, Any]:
    """The first page of what is left of a list, in order already."""
    return page(items[:limit], has_more=limit < len(items))
