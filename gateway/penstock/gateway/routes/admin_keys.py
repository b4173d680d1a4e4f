"""`/v1/admin/keys` and `/v1/admin/limits`: API keys and limits of tenants, changed while gateways run."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from penstock.gateway.access.key_orders import KeyOrders
from penstock.gateway.context import context_of
from penstock.gateway.edge.key_records import MOST_GRACE_S
from penstock.gateway.edge.rules import Scope
from penstock.gateway.edge.validation import validated
from penstock.gateway.limits.callers import caller_of
from penstock.gateway.routes.answers import Answer, Json, Time
from penstock.gateway.routes.multipart import read_json
from penstock.gateway.routes.paging import After, Limit, page
from penstock.schemas.errors import Forbidden, InvalidRequest
from penstock.schemas.times import time_ms
from penstock.schemas.topics import MOST_PRIORITY

router = APIRouter(prefix="/v1/admin", tags=["operations"])


class KeyRights(BaseModel):
    """What a key may do; a field that is left out of a change stays as it is."""

    model_config = ConfigDict(extra="forbid")

    scopes: Annotated[list[Scope], Field(min_length=1)] = ["submit", "read", "cancel"]
    max_priority: Annotated[int, Field(ge=0, le=MOST_PRIORITY, description="Its most urgent priority; 0: any.")] = 0
    rate: Annotated[float | None, Field(gt=0, description="Submissions per second; null: no limit.")] = None
    limits: Annotated[Json, Field(description="Limits of the key, by the names of `[gateway.limits]`.")] = {}
    name: Annotated[str | None, Field(max_length=200, description="For people.")] = None
    expires_at: Annotated[
        str | None, Field(description="RFC 3339, or Unix seconds: it works until then. Null: until it is revoked.")
    ] = None

    def fields(self) -> dict[str, Any]:
        """Those that were given, as entries of a key have them. Raises InvalidRequest."""
        given = self.model_dump(exclude_unset=True)
        if self.expires_at is not None:
            given["expires_at"] = time_ms(self.expires_at, "expires_at") // 1000
        return given


class NewKey(KeyRights):
    """A key to be made."""

    tenant: Annotated[str, Field(description="Whose key it is: `[a-z0-9-]{1,63}`.")] = "default"


class Rotation(BaseModel):
    model_config = ConfigDict(extra="forbid")

    grace_s: Annotated[
        float, Field(ge=0, le=MOST_GRACE_S, description="Seconds for which the old secret works beside the new one.")
    ] = 3_600.0


class Key(Answer):
    """A key without its secret."""

    object: Literal["key"]
    id: str
    tenant: str
    scopes: list[str]
    max_priority: int
    rate: float | None
    limits: Json
    name: str | None
    created_at: Time
    expires_at: Time | None
    former_until: Annotated[list[Time], Field(description="When secrets that were rotated end.")]
    made_by: Annotated[str | None, Field(description="Id of the key that made it; null for a key of the file.")]
    updated_by: Annotated[str | None, Field(description="Id of the key that changed or rotated it last.")]
    source: Annotated[Literal["topic", "file"], Field(description="A key of the `file` is changed there alone.")]


class KeyWithSecret(Key):
    secret: Annotated[str, Field(description="It is in this answer alone.")]


class KeyDeleted(Answer):
    object: Literal["key.deleted"]
    id: str
    deleted: Literal[True]


class TenantLimits(Answer):
    """Limits of a tenant; in each object a limit that is absent does not hold."""

    object: Literal["limits"]
    tenant: str
    ordered: Annotated[Json | None, Field(description="What was ordered; null in it: no limit.")]
    configured: Json
    in_force: Json
    updated_at: Time | None
    updated_by: Annotated[str | None, Field(description="Id of the key that ordered it.")]


@router.get("/keys", summary="All keys, of the keys file and made here, without their secrets")
async def list_keys(
    request: Request,
    tenant: Annotated[str | None, Query(description="Only of this tenant.")] = None,
    after: After = None,
    limit: Limit = 100,
) -> dict[str, Any]:
    """Oldest first. A key that has expired is listed until it is revoked."""
    found = [key for key in _orders(request).all() if tenant in (None, key["tenant"])]
    if after is not None:
        place = next((number for number, key in enumerate(found, 1) if key["id"] == after), None)
        if place is None:
            raise InvalidRequest(f"there is no key {after[:64]}", param="after")
        found = found[place:]
    return page(found[:limit], has_more=len(found) > limit)


@router.post("/keys", status_code=201, summary="Make a key: the answer alone has its secret")
async def create_key(request: Request) -> dict[str, Any]:
    """All gateways take it within a second. After a 503 or a broken connection the key can exist: list the keys, and
    revoke it.
    """
    asked = validated(NewKey, await read_json(request) if await request.body() else {})
    fields = {"tenant": asked.tenant, "scopes": asked.scopes, **asked.fields()}
    return await _orders(request).create(fields, by=_by_a_key(request))


@router.get("/keys/{key_id}", summary="One key, without its secret")
async def show_key(request: Request, key_id: str) -> dict[str, Any]:
    return _orders(request).one(key_id)


@router.post("/keys/{key_id}", summary="Change the rights, limits, name or expiry of a key")
async def change_key(request: Request, key_id: str) -> dict[str, Any]:
    """In force at all gateways within a second, also for open connections. The tenant of a key never changes."""
    asked = validated(KeyRights, await read_json(request))
    return await _orders(request).change(key_id, asked.fields(), by=_by_a_key(request))


@router.post("/keys/{key_id}/rotate", summary="A new secret for a key; the old one works for `grace_s` more")
async def rotate_key(request: Request, key_id: str) -> dict[str, Any]:
    """Id, rights and tickets of the key stay. Revoke a key whose secret has leaked: that ends its tickets too."""
    asked = validated(Rotation, await read_json(request) if await request.body() else {})
    return await _orders(request).rotate(key_id, asked.grace_s, by=_by_a_key(request))


@router.delete("/keys/{key_id}", summary="Revoke a key: open connections end within a second")
async def revoke_key(request: Request, key_id: str) -> dict[str, Any]:
    return await _orders(request).revoke(key_id, by=caller_of(request).key_id)


@router.get("/limits", summary="Tenants whose limits were changed while gateways ran")
async def list_limits(request: Request) -> dict[str, Any]:
    found = _orders(request).limits()
    return page(found, ids=[one["tenant"] for one in found])


@router.post("/limits/{tenant}", summary="Limits that replace those that `[gateway.limits]` gives a tenant")
async def limit_tenant(request: Request, tenant: str) -> dict[str, Any]:
    """Body: limits by name; null: no limit. Those that are left out are as configured. It replaces an earlier order."""
    body = await read_json(request)
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be an object of limits")
    return await _orders(request).limit(tenant, body, by=caller_of(request).key_id)


@router.delete("/limits/{tenant}", summary="The configured limits of a tenant hold again")
async def unlimit_tenant(request: Request, tenant: str) -> dict[str, Any]:
    return await _orders(request).unlimit(tenant)


def _orders(request: Request) -> KeyOrders:
    return context_of(request).orders.keys


def _by_a_key(request: Request) -> str | None:
    """The key that orders. Raises Forbidden for a ticket, which ends within a day, and for a person behind an identity
    proxy, who may lose access there: a key that they made would go on working.
    """
    caller = caller_of(request)
    if caller.grant is not None:
        raise Forbidden("a ticket makes no keys and changes none: send a key with the scope admin")
    if caller.user is not None:
        raise Forbidden("an identity proxy makes no keys and changes none: send a key with the scope admin directly")
    return caller.key_id
