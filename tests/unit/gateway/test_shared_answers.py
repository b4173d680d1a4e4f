"""Answers that callers share: who gets one, how old it may be, and what a failure leaves."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from starlette.requests import Request

from penstock.gateway.edge import shared_answers
from penstock.gateway.edge.shared_answers import MOST, SharedAnswers
from penstock.gateway.limits.callers import Caller, Grant

NARROWED = Grant(scopes=frozenset({"read"}), user_id="u")


def asking(path: str = "/p", query: str = "", **headers: str) -> Request:
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "GET", "path": path, "query_string": query.encode(), "headers": named})


class Route:
    """Answers how often it was asked. `now_s` is the time."""

    def __init__(self) -> None:
        self.now_s, self.made, self.fails = 0.0, 0, False
        self.shared = SharedAnswers(lambda: self.now_s)

    async def make(self) -> bytes:
        self.made += 1
        content = str(self.made).encode()
        await asyncio.sleep(0)
        if self.fails:
            raise OSError("not now")
        return content

    async def ask(
        self, tenant: str = "all", path: str = "/p", query: str = "", grant: Grant | None = None, **headers: str
    ) -> Any:
        headers = headers or {"cache_control": "max-age=1"}
        return await self.shared.answer(asking(path, query, **headers), Caller(tenant=tenant, grant=grant), self.make)


@pytest.fixture
def route() -> Route:
    return Route()


async def test_all_who_ask_within_a_second_share_one_answer(route: Route) -> None:
    answers = await asyncio.gather(*(route.ask() for _ in range(5)))
    assert {bytes(one.body) for one in answers} == {b"1"}
    route.now_s = 0.9
    assert (await route.ask()).body == b"1"
    route.now_s = 1.0
    assert (await route.ask(cache_control="max-age=9")).body == b"1"
    assert (await route.ask()).body == b"2"
    route.now_s = 3.0
    assert (await route.ask(cache_control="max-age=9")).body == b"3"


@pytest.mark.parametrize("said", ["no-cache", "max-age=0", "max-age=00", "no-store", "x-max-age=5"])
async def test_who_does_not_ask_for_an_older_one_gets_its_own(route: Route, said: str) -> None:
    await route.ask()
    assert (await route.ask(cache_control=said)).body == b"2"
    assert (await route.ask()).body == b"1"


async def test_paths_queries_and_callers_are_told_apart(route: Route) -> None:
    apart: list[dict[str, Any]] = [
        {},
        {"tenant": "other"},
        {"path": "/q"},
        {"query": "a=1"},
        *[{"grant": NARROWED}] * 2,
    ]
    answers = await asyncio.gather(*(route.ask(**one) for one in apart))
    assert {int(one.body) for one in answers} == {1, 2, 3, 4, 5, 6}


async def test_a_table_and_json_of_the_same_are_held_apart(route: Route) -> None:
    csv, caller = {"cache_control": "max-age=1", "accept": "text/csv;q=1, */*"}, Caller(tenant="all")
    await route.ask()
    assert await route.shared.held(asking(**csv), caller) is None
    await route.shared.answer(asking(**csv), caller, route.make, "text/csv")
    for headers, body, kind in ((csv, b"2", "text/csv"), ({"cache_control": "max-age=1"}, b"1", "application/json")):
        held = await route.shared.held(asking(**headers), caller)
        assert (held.body, held.headers["content-type"].split(";")[0]) == (body, kind)
        assert held.headers["vary"] == "accept"


async def test_who_has_it_hears_so(route: Route) -> None:
    first = await route.ask()
    again = await route.ask(cache_control="max-age=1", if_none_match=first.headers["etag"])
    assert (again.status_code, again.body) == (304, b"")
    other = await route.ask(cache_control="max-age=1", if_none_match='"other"')
    assert (other.status_code, other.body) == (200, b"1")


async def test_a_failure_is_not_kept(route: Route) -> None:
    route.fails = True
    failed = await asyncio.gather(*(route.ask() for _ in range(3)), return_exceptions=True)
    assert [type(one) for one in failed] == [OSError] * 3
    assert route.made == 1
    route.fails = False
    assert (await route.ask()).body == b"2"


async def test_a_caller_that_goes_takes_the_answer_from_nobody(route: Route) -> None:
    gone, stays = asyncio.ensure_future(route.ask()), asyncio.ensure_future(route.ask())
    await asyncio.sleep(0)
    gone.cancel()
    assert (await stays).body == b"1"


async def test_what_takes_long_is_made_once(route: Route) -> None:
    first = asyncio.ensure_future(route.ask())
    await asyncio.sleep(0)
    route.now_s = 5.0
    assert [bytes(one.body) for one in await asyncio.gather(first, route.ask())] == [b"1", b"1"]
    assert (await route.ask()).body == b"2"


async def test_a_large_answer_is_not_kept(route: Route, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_answers, "MOST_BYTES", 0)
    together = await asyncio.gather(route.ask(), route.ask())
    assert {bytes(one.body) for one in together} == {b"1"}
    assert (await route.ask()).body == b"2"


async def test_an_old_answer_leaves_the_memory_though_nobody_asks_again(
    route: Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_answers, "FRESH_S", 0.01)
    await route.ask()
    await asyncio.sleep(0.05)
    assert await route.shared.held(asking(cache_control="max-age=1"), Caller(tenant="all")) is None


async def test_a_failure_that_nobody_waits_for_any_more_is_no_error_of_the_loop(route: Route) -> None:
    told: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    route.fails = True
    asked = asyncio.ensure_future(route.ask())
    await asyncio.sleep(0)
    asked.cancel()
    await asyncio.sleep(0.01)
    route.fails = False
    await route.ask()
    gc.collect()
    assert told == []


async def test_few_are_kept(route: Route) -> None:
    for number in range(MOST + 1):
        await route.ask(query=str(number))
    assert (await route.ask(query=str(MOST))).body == str(MOST + 1).encode()
    assert (await route.ask(query="0")).body == str(MOST + 2).encode()
