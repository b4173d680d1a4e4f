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


def page_of(items: Sequence[dict[str, Any]], *, limit: int) -> Page:
    """The first page of what is left of a list, in order already."""
    return Page(items[:limit], limit < len(items))
