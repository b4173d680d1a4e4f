"""Outages of a store of artifacts, as tests and benchmarks begin and end them on real stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, get_args

from penstock.common.artifacts import ArtifactStore
from system import Process

Outage = Literal["fails", "hangs", "fills"]
"""It answers with errors; it takes calls and never answers; it has no space left and can still be read."""
OUTAGES: tuple[Outage, ...] = get_args(Outage)


class BreakableStore(Protocol):
    """A store that is broken and healed on command. `stop` heals it and ends it."""

    env: Mapping[str, str]
    """The variables of a worker or gateway that uses it."""
    blocks_exit: bool
    """Whether a process that waits for it cannot end while it hangs."""

    def begin(self, outage: Outage) -> None: ...

    def heal(self) -> None: ...

    def struck(self, outage: Outage, workers: Sequence[Process]) -> int:
        """How many calls of these workers outages of this kind have struck so far.

        An outage that adds none has proved nothing.
        """
        ...

    def direct(self) -> ArtifactStore:
        """The store past all outages."""
        ...

    def stop(self) -> None: ...
