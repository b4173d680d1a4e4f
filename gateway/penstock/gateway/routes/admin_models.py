"""`/v1/admin/models`, `/classes` and `/orders`: how models stand, and orders about them, for the scope `admin`.

An order is written as desired state. Every worker of the pool follows it, those that start later too; the answer is 202
with the order's `revision`, and a worker reports the newest revision that it has observed.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request, Response

from penstock.gateway.context import context_of, service_of
from penstock.gateway.limits.callers import caller_of
from penstock.gateway.routes.multipart import read_json
from penstock.gateway.routes.paging import page
from penstock.gateway.view.outputs import json_bytes

router = APIRouter(prefix="/v1/admin", tags=["operations"])

Pool = Annotated[
    str | None,
    Query(description="The model's pool, when several have one of that name.", pattern="^[A-Za-z0-9_-]{1,63}$"),
]
ModelAction = Literal["load", "unload", "pin", "unpin", "pause", "resume"]
ClassAction = Literal["pause", "resume"]


def _operator(request: Request) -> str:
    """Who orders, as orders name them."""
    return caller_of(request).key_id or "anybody"


@router.get("/models", summary="All models: state, engines, memory, queues, and what was ordered")
async def list_models(request: Request) -> Response:
    async def make() -> bytes:
        return json_bytes(page(await service_of(request).model_orders.models()))

    return await context_of(request).shared.answer(request, caller_of(request), make)


@router.post("/models", status_code=202, summary="Serve one more model")
async def add_model(
    request: Request, replace: Annotated[bool, Query(description="Change a model that there is.")] = False
) -> dict[str, Any]:
    """Body: a `[[models]]` table as JSON. The workers of its pool load it; `GET` the model to see how far they are."""
    return await service_of(request).model_orders.add(await read_json(request), replace=replace, by=_operator(request))


@router.post("/models/{model_id:path}/{action}", status_code=202, summary="Load, unload, pin, unpin, pause or resume")
async def order(request: Request, model_id: str, action: ModelAction, pool: Pool = None) -> dict[str, Any]:
    """`unload` frees its memory until somebody asks for it again; `pause` lets nothing of it start.

    A pinned model is not unloaded: 409; unpin it first.
    """
    return await service_of(request).model_orders.order(model_id, action, pool=pool, by=_operator(request))


@router.get("/models/{model_id:path}", summary="One model, by its id or an alias")
async def show_model(request: Request, model_id: str, pool: Pool = None) -> dict[str, Any]:
    return await service_of(request).model_orders.model(model_id, pool)


@router.delete("/models/{model_id:path}", status_code=202, summary="Serve a model no more")
async def remove_model(request: Request, model_id: str, pool: Pool = None) -> dict[str, Any]:
    """It is unloaded, and requests for it fail; a model of the configuration stays away until it is added again."""
    return await service_of(request).model_orders.order(model_id, "remove", pool=pool, by=_operator(request))


@router.get("/orders", summary="What people ordered of models and classes: by whom, and since when")
async def list_orders(request: Request) -> dict[str, Any]:
    """Only what is in force: that makes a model or a class other than the workers' files have it."""
    found = await service_of(request).model_orders.in_force()
    return page(found, ids=[one["name"] for one in found])


@router.get("/orders/{revision}", summary="Which live workers of the pool have observed an order")
async def show_order(
    request: Request,
    revision: Annotated[int, Path(ge=0, description="The `revision` of the answer to the order.")],
    pool: Annotated[str | None, Query(description="The order's pool.", pattern="^[A-Za-z0-9_-]{1,63}$")] = None,
) -> dict[str, Any]:
    """`observed` is true once there are workers and all of them have. Later reports say what came of it."""
    return await service_of(request).model_orders.observed(revision, pool)


@router.post("/classes/{class_name}/{action}", status_code=202, summary="Pause or resume a class of priority")
async def order_class(request: Request, class_name: str, action: ClassAction, pool: Pool = None) -> dict[str, Any]:
    """Nothing of a paused class starts; what runs goes on, and what waits keeps its place."""
    return await service_of(request).model_orders.order_class(class_name, action, pool=pool, by=_operator(request))
