"""Pages of a list to which others write while it is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.routes.paging import number, read_part


class Growing:
    """Items by their time; `added` come with each read."""

    def __init__(self, items: int, added: int) -> None:
        self.items, self.added = list(range(items)), added

    async def read(self, after: str | None, limit: int, newest_first: bool) -> Sequence[int]:
        self.items += range(len(self.items), len(self.items) + self.added)
        items = sorted(self.items, reverse=newest_first)
        if after is not None:
            items = items[items.index(int(after)) + 1 :]
        return items[:limit]


@given(st.integers(0, 12), st.integers(0, 5), st.integers(1, 4), st.sampled_from(["asc", "desc"]))
async def test_pages_end_with_what_stood_there_at_the_first_one(
    items: int, added: int, limit: int, order: Literal["asc", "desc"]
) -> None:
    growing, seen, pages, after = Growing(items, added), list[int](), list[dict[str, Any]](), None
    while not pages or pages[-1]["has_more"]:
        part = await read_part(growing.read, number, after, limit, order)
        pages.append(part.page([{"id": str(one)} for one in part.items]))
        seen, after = [*seen, *part.items], pages[-1]["last_id"]
        assert len(pages) <= items + 2 * added + 1, "the pages do not end"
    assert seen == sorted(seen, reverse=order == "desc")
    assert set(range(items)) <= set(seen) <= set(range(items + 2 * added))


@pytest.mark.parametrize(("after", "shown"), [("3", [4, 5, 6]), (f"3@{number(4)}", [4]), (f"4@{number(4)}", [])])
async def test_an_id_alone_begins_behind_it(after: str, shown: list[int]) -> None:
    part = await read_part(Growing(7, 0).read, number, after, 5, "asc")
    assert (part.items, part.page([{"id": "x"}])["last_id"]) == (shown, "x")
