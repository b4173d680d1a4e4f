"""Lists as pages: `after`, `limit` and `order` in, OpenAI's list shape out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import Query

Limit = Annotated[int, Query(ge=1, le=100, description="Items on a page.")]
After = Annotated[str | None, Query(description="The `last_id` of the page before.")]
Order = Annotated[Literal["asc", "desc"], Query(description="Oldest or newest first.")]


@dataclass(frozen=True, slots=True)
class Page:
    """One page; `has_more` when others follow."""

    items: Sequence[dict[str, Any]]
    has_more: bool
    id_field: str = "id"

    def to_json(self) -> dict[str, Any]:
        ids = [item.get(self.id_field) for item in self.items]
        return {
            "object": "list",
            "data": list(self.items),
            "has_more": self.has_more,
            "first_id": ids[0] if ids else None,
            "last_id": ids[-1] if ids else None,
        }


def page_of(items: Sequence[dict[str, Any]], *, limit: int, after: str | None, id_field: str = "id") -> Page:
    """A page out of a whole list that is in order already; an `after` that is not in it begins at the start."""
    start = 0
    if after is not None:
        start = next((at + 1 for at, item in enumerate(items) if item.get(id_field) == after), 0)
    chosen = items[start : start + limit]
    return Page(chosen, start + limit < len(items), id_field)
