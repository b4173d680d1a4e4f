"""Parts of routes: pages, lines in flight, filters, the order of a socket's news, bodies under other names."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostile_images import picture
from kit.refusals import refused
from penstock.gateway.limits.callers import Caller
from penstock.gateway.routes.native import submission
from penstock.gateway.routes.paging import number, read_part
from penstock.gateway.routes.request_filters import checked
from penstock.gateway.routes.submit_ordering import MAX_HELD, AcceptedMarker, SubmitOrdering
from penstock.gateway.routes.window import Budget, Window
from penstock.gateway.view.filters import ALL, RequestFilter
from penstock.gateway.view.frames import Frame, StatusFrame
from penstock.schemas.errors import InvalidRequest, PenstockError

# -- pages of a list to which others write while it is read


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


# -- lines in flight


async def takes(window: Window, size: int) -> bool:
    """Whether there is room at once."""
    taking = asyncio.ensure_future(window.take(size))
    await asyncio.sleep(0)
    taking.cancel()
    await asyncio.wait([taking])
    return not taking.cancelled()


async def test_lines_and_their_bytes_are_bounded() -> None:
    window = Window(lambda: 3, most_bytes=10)
    assert [await takes(window, size) for size in (20, 1)] == [True, False], "a single one always has room"
    assert not window.take_nowait(1)
    window.give(20)
    assert [await takes(window, size) for size in (1, 1, 9, 1, 1)] == [True, True, False, True, False]


async def test_windows_share_a_budget_and_each_has_room_for_one_line() -> None:
    budget = Budget(10)
    first, second = Window(lambda: 9, budget), Window(lambda: 9, budget)
    assert [await takes(first, 5), await takes(first, 5), await takes(second, 5)] == [True] * 3
    assert [await takes(first, 1), await takes(second, 1)] == [False] * 2
    first.close()
    assert await takes(second, 5)


# -- a filter by a value that no request can have is refused


@pytest.mark.parametrize(
    ("where", "param"),
    [
        (RequestFilter(status="running", task="embedding", klass="low", model="any", user_id="any"), None),
        (ALL, None),
        (RequestFilter(status="done"), "status"),
        (RequestFilter(status="UNKNOWN"), "status"),
        (RequestFilter(task="embeding"), "task"),
        (RequestFilter(klass="urgent"), "class"),
    ],
)
def test_an_impossible_value_is_refused_by_name(where: RequestFilter, param: str | None) -> None:
    with refused(None if param is None else InvalidRequest, param=param):
        assert checked(where) is where


# -- a socket's own submits


def status(request_id: str, name: str = "queued") -> StatusFrame:
    return StatusFrame(request_id=request_id, cursor=None, status=name, done=False)


def told(request_id: str) -> AcceptedMarker:
    return AcceptedMarker(request_id=request_id, cursor=None)


def test_held_frames_are_bounded() -> None:
    news = SubmitOrdering()
    news.hold("a")
    frames = [status("a") for _ in range(MAX_HELD + 1)]
    sent = [one for frame in frames for one in news.in_order(frame)]
    assert len(sent) == MAX_HELD + 1
    assert news.in_order(told("a")) == []


@given(st.lists(st.tuples(st.sampled_from(["hold", "news", "told"]), st.sampled_from("ab")), max_size=60))
def test_no_frame_is_lost_repeated_or_reordered(steps: list[tuple[str, str]]) -> None:
    news, came, sent = SubmitOrdering(), list[Frame](), list[Frame]()
    under_way = {"a": 0, "b": 0}
    for step, request_id in steps:
        if step == "hold":
            under_way[request_id] += 1
            news.hold(request_id)
        elif step == "news":
            frame = status(request_id)
            came.append(frame)
            taken = news.in_order(frame)
            assert (taken == []) == (under_way[request_id] > 0)
            sent += taken
        elif under_way[request_id]:
            under_way[request_id] -= 1
            sent += news.in_order(told(request_id))
    for request_id, count in under_way.items():
        for _ in range(count):
            sent += news.in_order(told(request_id))
    for request_id in "ab":
        mine = [id(frame) for frame in came if frame.request_id == request_id]
        assert [id(frame) for frame in sent if frame.request_id == request_id] == mine


# -- bodies of POST /v1/requests under the names of other services


EDIT = {"type": "image2image", "prompt": "snow", "parameters": {"steps": 4}}
DATA = f"data:image/png;base64,{base64.b64encode(picture(Random(1))).decode()}"
MESSAGE = json.loads((Path(__file__).parents[2] / "messages" / "image_editing_000.json").read_bytes())


@pytest.mark.parametrize("name", ["image", "inputImage", "input_image", "image_url"])
@pytest.mark.parametrize("wrap", [lambda body: body, lambda body: {"payload": body}], ids=["plain", "wrapped"])
def test_an_image_that_came_as_text_is_kept(name: str, wrap: Any) -> None:
    request, (image,), _ = submission(wrap({**EDIT, name: DATA}), Caller(tenant="acme"))
    assert request.payload["image"] == {"artifact_id": image.artifact_id}
    assert (request.task, request.payload["inference_steps"]) == ("image_editing", 4)


def test_a_message_of_another_service() -> None:
    request, images, given = submission(MESSAGE, Caller(tenant="acme"))
    assert (request.tenant, request.priority, request.conversation_id, images) == ("acme", 10, "789", [])
    assert request.payload["image"] == {"url": MESSAGE["payload"]["image"]}
    assert given["model"] == "payload.model"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"taskId": "t"}, "taskId"),
        ({"id": 5}, "id"),
        ({"payload": {"tenant": "other"}}, "payload.tenant"),
        ({"deadline": "9999999999"}, "deadline"),
        ({"inputImage": "data:image/png;base64,x"}, "inputImage"),
        ({"parameters": {"steps": 0}}, "parameters.steps"),
        ({"surprise": 1}, "surprise"),
        ({"priority": -1}, "priority"),
    ],
)
def test_what_is_refused_is_named_as_the_body_has_it(change: dict[str, Any], param: str) -> None:
    with refused(PenstockError, re.escape(param), param=param):
        submission({**EDIT, **change}, Caller(tenant="acme"))
