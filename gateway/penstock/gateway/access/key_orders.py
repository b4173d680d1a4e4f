"""Orders of operators about API keys and limits of tenants: written to `inference.key`, which every gateway follows."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from penstock.common.clock import now_ms
from penstock.common.kafka_errors import unavailable
from penstock.common.outgoing import key_record
from penstock.common.transport import AsyncTransport
from penstock.gateway.access.key_follower import KeyFollower
from penstock.gateway.edge.key_book import KEY, REVOKED, TENANT, KeyBook
from penstock.gateway.edge.key_records import KeyRecord, new_key
from penstock.gateway.edge.keys import KeyRing
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.service.submitting import SOURCE
from penstock.schemas.codec import Codec
from penstock.schemas.errors import Conflict, Forbidden, InvalidRequest, NotFound, PenstockError, Unauthenticated
from penstock.schemas.ids import check_tenant
from penstock.schemas.records import KeyState
from penstock.schemas.times import rfc3339
from penstock.schemas.topics import TopicNames

Json = dict[str, Any]
T = TypeVar("T")


class KeyOrders:
    """One order at a time in this process. Of two gateways that change one key at a moment the first record counts, and
    the other order is refused; a revocation always holds.

    All that change something raise BrokerUnavailable, also while the topic is missing; then an order may be in force
    all the same.
    """

    def __init__(
        self,
        transport: AsyncTransport,
        follower: KeyFollower,
        book: KeyBook,
        ring: KeyRing | None,
        allowances: Allowances,
        names: TopicNames,
        codec: Codec,
    ) -> None:
        """`ring`: None where there are no keys."""
        self._transport, self._follower, self._book, self._ring = transport, follower, book, ring
        self._allowances, self._names, self._codec = allowances, names, codec
        self._one_at_a_time = asyncio.Lock()

    # -- keys

    def all(self) -> list[Json]:
        """Those of the file and of the topic, oldest first."""
        if self._ring is None:
            return []
        of_file = self._ring.of_file()
        found = [one.to_json("file") for one in of_file.values()]
        found += [one.to_json("topic") for one in self._book.keys.values() if one.key_id not in of_file]
        return sorted(found, key=lambda key: (key["created_at"], key["id"]))

    def one(self, key_id: str) -> Json:
        """Raises NotFound."""
        if self._ring is not None and (record := self._ring.of_file().get(key_id)) is not None:
            return record.to_json("file")
        if self._ring is None or (record := self._book.keys.get(key_id)) is None:
            raise NotFound(f"there is no key {key_id}", param="key_id")
        return record.to_json("topic")

    async def create(self, fields: Mapping[str, Any], *, by: str | None) -> Json:
        """A new key, with its secret, which is nowhere else.

        Raises InvalidRequest, Conflict without keys, Forbidden for one with more than the key `by` has.
        """
        self._keys_are_on()
        record, secret = _valid(lambda: new_key(now_ms() / 1000, **fields, version=1, made_by=by))
        self._check_gives(by, record)
        async with self._one_at_a_time:
            await self._write_key(record, by)
        return {**record.to_json("topic"), "secret": secret}

    async def rotate(self, key_id: str, grace_s: float, *, by: str | None) -> Json:
        """The key with its new secret; the old one works for `grace_s` more.

        Raises NotFound, Conflict, also for a key that has expired, Forbidden for a key with more than the key `by` has,
        whose holder gets the secret.
        """
        async with self._one_at_a_time:
            former = await self._own(key_id)
            self._check_gives(by, former)
            record, secret = _valid(lambda: former.updated(by).rotated(grace_s, now_ms() / 1000))
            await self._write_key(record, by)
        return {**record.to_json("topic"), "secret": secret}

    async def change(self, key_id: str, fields: Mapping[str, Any], *, by: str | None) -> Json:
        """The key with other rights.

        Raises NotFound, InvalidRequest, Conflict for the last operator's key, Forbidden for rights that `by` lacks.
        """
        async with self._one_at_a_time:
            former = await self._own(key_id)
            record = _valid(lambda: former.updated(by).changed(fields))
            self._check_gives(by, record, former)
            ends_operator = former.is_lasting_admin() and not record.is_lasting_admin()
            if ends_operator:
                self._keep_an_operator(key_id)
            await self._write_key(record, by)
            if ends_operator and not self._has_operator():  # another gateway ended the other one
                await self._write_key(dataclasses.replace(former, version=record.version + 1), by)
                raise _last_operator(key_id)
        return record.to_json("topic")

    async def revoke(self, key_id: str, *, by: str | None) -> Json:
        """Raises NotFound, Conflict for the last operator's key. A repeat answers the same."""
        deleted = {"object": "key.deleted", "id": key_id, "deleted": True}
        async with self._one_at_a_time:
            try:
                record = await self._own(key_id)
            except NotFound:
                if self._book.is_revoked(key_id):
                    return deleted
                raise
            if record.is_lasting_admin():
                self._keep_an_operator(key_id)
            # A record of its own: what another gateway writes of the key at this moment does not undo it.
            await self._write(KeyState(kind=REVOKED, id=key_id, updated_at=now_ms(), updated_by=by))
            if record.is_lasting_admin() and not self._has_operator():  # another gateway revoked the other one
                await self._produce(f"{REVOKED}/{key_id}", None)
                await self._write_key(record.updated(by), by)
                raise _last_operator(key_id)
            with suppress(PenstockError):  # it only saves room
                await self._produce(f"{KEY}/{key_id}", None)
        return deleted

    def _keys_are_on(self) -> KeyRing:
        if self._ring is None:
            raise Conflict("this gateway asks for no keys, so it makes none: set auth.keys_file and restart it")
        return self._ring

    async def _own(self, key_id: str) -> KeyRecord:
        """The newest record of a key of the topic."""
        ring = self._keys_are_on()
        await self._follower.catch_up()
        if key_id in ring.of_file():
            raise Conflict(f"the key {key_id} is in the keys file: change it there with `penstock keys --file`")
        record = self._book.get(key_id)
        if record is None:
            raise NotFound(f"there is no key {key_id}", param="key_id")
        return record

    def _keep_an_operator(self, key_id: str) -> None:
        if not self._has_operator(but=key_id):
            raise _last_operator(key_id)

    def _has_operator(self, but: str | None = None) -> bool:
        found = [*self._keys_are_on().of_file().values(), *self._book.keys.values()]
        return any(one.is_lasting_admin() for one in found if one.key_id != but)

    def _check_gives(self, by: str | None, record: KeyRecord, former: KeyRecord | None = None) -> None:
        """Whether the key `by` has all that `record` gives beyond `former`. Raises Forbidden, Unauthenticated."""
        giver = None if by is None else self._keys_are_on().record(by)
        if giver is None:
            raise Unauthenticated("this key was revoked")
        wider = record.wider_than(giver)
        if former is not None:
            wider &= record.wider_than(former)
        if wider:
            names = ", ".join(sorted(wider))
            raise Forbidden(
                f"the key {by} gives no key more than it has itself: {names}", details={"wider": sorted(wider)}
            )

    async def _write_key(self, record: KeyRecord, by: str | None) -> None:
        """Raises Conflict where another gateway changed the key at the same moment."""
        await self._write(_key_state(record, by))
        first = self._book.keys.get(record.key_id)
        if first is not None and dataclasses.replace(first, version=record.version) == record:
            return
        if first is not None:  # compaction keeps the last record of a key, which must be the one that counts
            await self._write(_key_state(first.updated(first.updated_by), first.updated_by))
        raise Conflict(
            f"another gateway changed the key {record.key_id} at this moment: look at it, and repeat the call"
        )

    # -- limits of tenants

    def limits(self) -> list[Json]:
        """The tenants whose limits an order changes, by name."""
        return [self._limits_json(tenant) for tenant in sorted(self._book.limits)]

    async def limit(self, tenant: str, limits: Mapping[str, Any], *, by: str | None) -> Json:
        """Replaces the order about a tenant. A limit that is None does not hold. Raises InvalidRequest."""
        check_tenant(tenant)
        _valid(lambda: self._allowances.with_ordered(tenant, limits))
        async with self._one_at_a_time:
            entry = json.dumps(dict(limits), separators=(",", ":"))
            await self._write(KeyState(kind=TENANT, id=tenant, updated_at=now_ms(), updated_by=by, entry=entry))
        return self._limits_json(tenant)

    async def unlimit(self, tenant: str) -> Json:
        """The limits of the configuration hold again. Raises NotFound where they do."""
        async with self._one_at_a_time:
            await self._follower.catch_up()
            if tenant not in self._book.limits:
                raise NotFound(f"no order changes the limits of the tenant {tenant}", param="tenant")
            await self._produce(f"{TENANT}/{tenant}", None)
            await self._follower.catch_up()
        return self._limits_json(tenant)

    def _limits_json(self, tenant: str) -> Json:
        order = self._book.limits.get(tenant)
        return {
            "object": "limits",
            "tenant": tenant,
            "ordered": None if order is None else order.limits,
            "configured": self._allowances.configured(tenant).to_dict(),
            "in_force": self._allowances.limits_of(tenant).to_dict(),
            "updated_at": None if order is None else rfc3339(order.updated_at),
            "updated_by": None if order is None else order.updated_by,
        }

    # -- inside

    async def _write(self, state: KeyState) -> None:
        record = key_record(state, self._names, self._codec, source=SOURCE)
        await self._produce(record.key.decode(), record.value, record.headers)
        await self._follower.catch_up()

    async def _produce(self, key: str, value: bytes | None, headers: Any = None) -> None:
        try:
            await self._transport.produce(self._names.key, value, key=key.encode(), headers=headers, partition=0)
        except NotFound as error:
            raise unavailable(error) from error


def _key_state(record: KeyRecord, by: str | None) -> KeyState:
    entry = json.dumps(record.to_dict(), separators=(",", ":"))
    return KeyState(kind=KEY, id=record.key_id, updated_at=now_ms(), updated_by=by, entry=entry)


def _last_operator(key_id: str) -> Conflict:
    return Conflict(f"no other key has the scope admin and does not expire: make one before you end {key_id}")


def _valid(make: Callable[[], T]) -> T:
    """Raises InvalidRequest for what `make` does not take."""
    try:
        return make()
    except (ValueError, TypeError) as error:
        raise InvalidRequest(str(error)) from error
