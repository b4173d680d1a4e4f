"""What a submitter asks of its gateway."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kit.records import CODEC, model_info
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.service.submitting import Submitter
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.view.claims import Claims
from penstock.gateway.view.fleet import KnownModels
from penstock.gateway.view.hub import Hub
from penstock.gateway.view.streams import Streams
from penstock.schemas.records import InferenceRequest
from penstock.schemas.requests import content_hash


class SubmitterParts:
    """The parts of a gateway that is never full, has the model `m`, and knows every topic. `produce` is a test's."""

    def __init__(self, allowances: Allowances | None = None) -> None:
        self.known = self.census = self
        self.held_live_count = 0
        self.claims, self.streams = Claims(), Streams(Hub())
        self.allowances = allowances or Allowances()
        self.requests: dict[tuple[str, str], Any] = {}
        """What its view has."""
        this: Any = self
        self.submitter = Submitter(
            GatewaySettings(), this, this, this, CODEC, self.allowances, this, lambda store, prefix: None
        )

    def accepted(self, request: InferenceRequest, origin: Any) -> None:
        entry = SimpleNamespace(erased=False, done=False, status_name="queued", content=content_hash(request))
        key = (request.tenant, request.request_id)
        self.requests.setdefault(key, entry)
        self.claims.settle(key)

    def find(self, key: tuple[str, str]) -> Any:
        return self.requests.get(key)

    async def catch_up(self) -> None:
        pass

    def cannot_keep(self) -> str | None:
        return None

    def live(self, klass: str, tenant: str | None = None) -> int:
        return 0

    def known_topic(self, topic: str) -> bool:
        return True

    def routed(self, request: InferenceRequest) -> InferenceRequest:
        return request

    def known_models(self) -> KnownModels:
        return KnownModels([model_info("m", engine="noop")])
