"""Whether a tenant or a key may ever ask for such a request: models, pools, priority, requirements. Pure."""

from __future__ import annotations

from penstock.gateway.limits.limits import Limits
from penstock.schemas.errors import Forbidden
from penstock.schemas.records import InferenceRequest
from penstock.schemas.tasks import needs_model


def check_asked(holder: str, limits: Limits, request: InferenceRequest, model: str | None) -> None:
    """Raises Forbidden, which calls the holder of these limits `holder`.

    `model` is the id that the request's model stands for, if it is known.
    """
    if limits.models is not None and needs_model(request.task) and {request.model, model}.isdisjoint(limits.models):
        names = ", ".join(limits.models) or "(none)"
        raise Forbidden(f"{holder} may use only the models {names}: name one", param="model")
    if limits.pools is not None and request.pool is not None and request.pool not in limits.pools:
        raise Forbidden(f"{holder} may use only the pools {', '.join(limits.pools) or '(none)'}", param="pool")
    if request.priority < limits.max_priority:
        raise Forbidden(
            f"{holder} may not ask for priority {request.priority}: its most urgent is {limits.max_priority}",
            param="priority",
        )
    _check_requirements(holder, limits, request)


def _check_requirements(holder: str, limits: Limits, request: InferenceRequest) -> None:
    asked = request.requirements
    if asked is None:
        return
    pairs = (
        ("vram_bytes", asked.vram_bytes, limits.max_vram_bytes),
        ("cpu_memory_bytes", asked.cpu_memory_bytes, limits.max_cpu_memory_bytes),
    )
    for name, wanted, limit in pairs:
        if wanted is not None and limit is not None and wanted > limit:
            raise Forbidden(f"{holder} may ask for {limit} {name} at most", param=f"requirements.{name}")
