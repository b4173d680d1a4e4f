"""A model's states on a worker, and what the manager holds of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from penstock.processors.core.ledger import Grant
from penstock.processors.engines.base import Engine, EngineState
from penstock.processors.models.catalog import ModelConfig
from penstock.processors.models.sizing import ModelSize
from penstock.schemas.errors import PenstockError

logger = logging.getLogger(__name__)


class Lifecycle(StrEnum):
    """A model's state on this worker."""

    ABSENT = "absent"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"  # what runs may finish, nothing new starts
    UNLOADING = "unloading"  # its process is ending, asked or not
    FAILED = "failed"  # it could not be loaded, or its process died


_ALLOWED: Mapping[Lifecycle, frozenset[Lifecycle]] = {
    Lifecycle.ABSENT: frozenset({Lifecycle.LOADING}),
    Lifecycle.LOADING: frozenset({Lifecycle.READY, Lifecycle.FAILED, Lifecycle.ABSENT}),
    Lifecycle.READY: frozenset({Lifecycle.DRAINING, Lifecycle.UNLOADING}),
    Lifecycle.DRAINING: frozenset({Lifecycle.READY, Lifecycle.UNLOADING}),
    Lifecycle.UNLOADING: frozenset({Lifecycle.ABSENT, Lifecycle.FAILED}),
    Lifecycle.FAILED: frozenset({Lifecycle.LOADING, Lifecycle.ABSENT}),
}


class IllegalTransition(RuntimeError):
    """A model was asked to go where it cannot go from its state."""


@dataclass(eq=False, slots=True)
class ServedModel:
    """One configured model: its state, and what it holds while it is loaded."""

    config: ModelConfig
    state: Lifecycle = Lifecycle.ABSENT
    engine: Engine | None = None
    grant: Grant | None = None
    size: ModelSize | None = None
    """Read once; read again only after a load has failed."""
    error: PenstockError | None = None
    loading: asyncio.Task[Engine] | None = None
    ending: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it is loaded or ended: one after the other."""
    dead: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the process of its engine has ended unasked."""

    def go(self, state: Lifecycle) -> None:
        if state not in _ALLOWED[self.state]:
            raise IllegalTransition(f"{self.config.id}: {self.state} cannot become {state}")
        logger.info("model.%s model=%s", state, self.config.id)
        self.state = state

    @property
    def shown_state(self) -> Lifecycle:
        """As the world is told: an engine that has died is not ready, though its process is still ending."""
        if self.alive and self.engine is not None and self.engine.state is EngineState.DEAD:
            return Lifecycle.UNLOADING
        return self.state

    @property
    def alive(self) -> bool:
        return self.state in (Lifecycle.READY, Lifecycle.DRAINING)

    @property
    def usable_engine(self) -> Engine | None:
        return self.engine if self.shown_state in (Lifecycle.READY, Lifecycle.DRAINING) else None
