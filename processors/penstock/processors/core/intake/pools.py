"""Whose request a record is: this worker's, or another pool's. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from penstock.schemas.records import InferenceRequest


@dataclass(frozen=True, slots=True)
class Pools:
    """`elsewhere`: the pool of each name (id or alias) of a model that only workers of another pool serve."""

    own: str | None = None
    elsewhere: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def of(cls, own: str | None, models: Iterable[tuple[str | None, Iterable[str]]]) -> Pools:
        """From (pool, names) of every known model; the first entry of a name counts. No pool: all workers serve it."""
        entries = [(pool, list(names)) for pool, names in models]
        here = {name for pool, names in entries if pool is None or pool == own for name in names}
        elsewhere: dict[str, str] = {}
        for pool, names in entries:
            for name in names:
                if pool is not None and name not in here:
                    elsewhere.setdefault(name, pool)
        return cls(own, elsewhere)

    def other_pool(self, request: InferenceRequest, *, moved: bool = False) -> str | None:
        """The pool that the request belongs to, when that is another one than this worker's.

        A request that names neither pool nor model is for the pool of its topic. One that names this pool
        is moved too if its model has left the pool, but only once: files may differ. A conversation stays in its pool.
        """
        wanted = request.pool
        stays = moved or request.conversation_id is not None
        if request.model is not None and (wanted is None or (wanted == self.own and not stays)):
            wanted = self.elsewhere.get(request.model, wanted)
        return None if wanted is None or wanted == self.own else wanted
