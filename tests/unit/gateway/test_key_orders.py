"""Orders about keys: two gateways over one log, and what a key may give."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kit.records import CODEC
from penstock.gateway.access.key_orders import KeyOrders
from penstock.gateway.edge.key_book import KeyBook
from penstock.gateway.edge.keys import KeyRing
from penstock.gateway.limits.allowances import Allowances
from penstock.schemas.errors import Conflict, Forbidden, NotFound
from penstock.schemas.records import KeyState
from penstock.schemas.topics import TopicNames

Log = list[tuple[str, bytes | None]]


class Gateway:
    """Its orders, which write to a shared log, and the book that it has read of it."""

    def __init__(self, log: Log, file: Path) -> None:
        self.log, self.book, self._read = log, KeyBook(), 0
        self.before_write: Callable[[], Awaitable[object]] | None = None
        parts: Any = (self, self, self.book, KeyRing(file, self.book), Allowances(), TopicNames(), CODEC)
        self.orders = KeyOrders(*parts)

    async def produce(self, topic: str, value: bytes | None, *, key: bytes, **_: Any) -> None:
        before, self.before_write = self.before_write, None
        if before is not None:
            await before()
        self.log.append((key.decode(), value))

    async def catch_up(self) -> None:
        for key, value in self.log[self._read :]:
            self.book.apply(key, None if value is None else CODEC.decode(value, KeyState))
        self._read = len(self.log)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.json"
    narrow = {"max_priority": 3, "limits": {"outstanding": 5}, "expires_at": 4_000_000_000}
    entries = [{"id": "narrow", "sha256": "x", "tenant": "ops", "scopes": ["admin"], **narrow}]
    path.write_text(json.dumps({"keys": entries}))
    return path


@pytest.fixture
async def made(file: Path) -> tuple[Gateway, Gateway, str]:
    """Two gateways, and the id of a lasting operator's key on the topic."""
    log: Log = []
    one, two = Gateway(log, file), Gateway(log, file)
    first = {"id": "first", "sha256": "x", "tenant": "ops", "scopes": ["admin"], "version": 1}
    state = KeyState(kind="key", id="first", updated_at=1, entry=json.dumps(first))
    log.append(("key/first", CODEC.encode(state)))
    await one.catch_up()
    return one, two, "first"


async def agreed(*gateways: Gateway) -> KeyBook:
    """What all gateways hold, and so does one that reads the log after its compaction."""
    log = gateways[0].log
    for gateway in gateways:
        await gateway.catch_up()
    fresh = KeyBook()
    for place, (key, value) in enumerate(log):
        if all(later != key for later, _ in log[place + 1 :]):
            fresh.apply(key, None if value is None else CODEC.decode(value, KeyState))
    assert all(gateway.book.keys == fresh.keys for gateway in gateways)
    return fresh


async def test_of_two_gateways_that_change_a_key_one_is_refused(made: tuple[Gateway, Gateway, str]) -> None:
    one, two, by = made
    key_id = (await one.orders.create({"tenant": "acme"}, by=by))["id"]
    one.before_write = lambda: two.orders.rotate(key_id, 0, by=by)
    with pytest.raises(Conflict, match="another gateway"):
        await one.orders.change(key_id, {"rate": 1}, by=by)
    rotated = two.book.get(key_id)
    await agreed(one, two)
    assert (one.orders.one(key_id)["rate"], one.book.keys[key_id].digest) == (None, rotated.digest)
    assert (await one.orders.change(key_id, {"rate": 1}, by=by))["updated_by"] == by
    assert (await agreed(one, two)).keys[key_id].rate == 1


@pytest.mark.parametrize("end", ["revoke", "change"])
async def test_two_gateways_do_not_end_the_last_two_operators(made: tuple[Gateway, Gateway, str], end: str) -> None:
    one, two, first = made
    second = (await one.orders.create({"tenant": "ops", "scopes": ["admin"]}, by=first))["id"]
    one.before_write = lambda: two.orders.revoke(second, by=first)
    with pytest.raises(Conflict, match="no other key"):
        await (
            one.orders.revoke(first, by=first)
            if end == "revoke"
            else one.orders.change(first, {"scopes": ["read"]}, by=first)
        )
    kept = await agreed(one, two)
    assert kept.keys.keys() == {first}
    assert kept.keys[first].is_lasting_admin()


async def test_a_revocation_is_repeated(made: tuple[Gateway, Gateway, str]) -> None:
    one, two, by = made
    key_id = (await one.orders.create({"tenant": "acme"}, by=by))["id"]
    assert await one.orders.revoke(key_id, by=by) == await two.orders.revoke(key_id, by=by)
    with pytest.raises(NotFound):
        await two.orders.revoke("none", by=by)
    with pytest.raises(NotFound):
        two.orders.one(key_id)


async def test_no_key_gives_more_than_it_has(made: tuple[Gateway, Gateway, str]) -> None:
    one, _, first = made
    within = {
        "tenant": "ops",
        "scopes": ["admin"],
        "max_priority": 3,
        "limits": {"outstanding": 5},
        "expires_at": 3_000_000_000,
    }
    own = await one.orders.create(within, by="narrow")
    assert (own["made_by"], own["updated_by"]) == ("narrow", None)
    for wider in ({"max_priority": 2}, {"limits": {}}, {"expires_at": None}):
        with pytest.raises(Forbidden, match=next(iter(wider)).replace("limits", "outstanding")):
            await one.orders.create({**within, **wider}, by="narrow")
        with pytest.raises(Forbidden):
            await one.orders.change(own["id"], wider, by=own["id"])
    with pytest.raises(Forbidden):
        await one.orders.rotate(first, 0, by="narrow")
    assert (await one.orders.change(first, {"name": "n"}, by="narrow"))["updated_by"] == "narrow"
    assert one.orders.one("narrow")["source"] == "file"
