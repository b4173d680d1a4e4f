"""What the flow knows of models: how each is to be served, and how much memory it takes."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.processors.core.fleet.estimates import Shape
from penstock.processors.core.work.retries import RetrySettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """Memory of one engine of a model, in bytes.

    `load_bytes` of its device for as long as it is loaded; `host_bytes` of main memory while its weights pass through
    that on their way to a card; `run_bytes` of its device for each run, on top.
    """

    load_bytes: int = 0
    host_bytes: int = 0
    run_bytes: int = 0
    exact: bool = False
    """An operator said so: nothing is learned or put on top."""
    shape: Shape = ()
    """What the engine's largest batch may be: peaks are learned by it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """How a model is to be served.

    `devices`: names or kinds of devices, the preferred first; none for an engine that takes no memory of this machine.
    `priority`: weight of keeping it loaded, 1 for an ordinary one. `keep_alive_s`: so long it stays loaded without use;
    None: until others need its memory. `count`: devices that one engine takes.
    """

    model: str
    devices: tuple[str, ...] = ()
    count: int = 1
    min_replicas: int = 1
    max_replicas: int = 1
    priority: float = 1.0
    pinned: bool = False
    preload: bool = False
    keep_alive_s: float | None = None
    max_execution_s: float | None = None
    """The longest run of it, in place of the worker's; None: as the worker has it."""
    retries: RetrySettings | None = None
    """When its failed attempts run again, in place of the worker's; None: as the worker has it."""
    max_attempts: int | None = None
    """Attempts that may run of a request whose caller sets no bound; None: until its deadline."""
    dtype: str = ""
    source: str = ""
    """Its files: what was measured of them holds for another model that has the same."""
    options: str = ""
    """The options of its engine; when they change the model is sized again."""

    @property
    def made_of(self) -> tuple[object, ...]:
        """What an engine is made of. An engine that was made of something else is replaced."""
        return self.devices, self.count, self.source, self.dtype, self.options
