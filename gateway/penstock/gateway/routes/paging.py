"""Lists as pages: `after`, `limit` and `order` in, OpenAI's list shape out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import Query

Limit = Annotated[int, Query(ge=1, le=100, description="Items on a page.")]
After = Annotated[str | None, Query(description="The `last_id` of the page before.")]
Include = Annotated[list[str] | None, Query(alias="include[]", description="Accepted; everything is there.")]
"""What stock clients of OpenAI ask to have shown of the items of a list."""
Order = Annotated[Literal["asc", "desc"], Query(description="Oldest or newest first.")]


def page(items: Sequence[dict[str, Any]], *, has_more: bool = False, id_field: str = "id") -> dict[str, Any]:
    """One page; `has_more` when others follow."""
    ids = [item.get(id_field) for item in items]
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
