"""Images that turns of conversations refer to: held before a turn is written, let go of when no turn refers to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from contextlib import suppress

from penstock.common.artifacts import ArtifactStore
from penstock.schemas.errors import Conflict


class HeldImages:
    """The marks of conversations in the store of artifacts. All methods block; they raise as the store.

    `open_store` is called when the first image is held: most workers need none.
    """

    def __init__(self, open_store: Callable[[], ArtifactStore]) -> None:
        self._open_store = open_store

    def hold(self, tenant: str, conversation_id: str, artifact_ids: Iterable[str]) -> None:
        """From now on they live as long as the conversation."""
        holds = self._open_store().holds
        for artifact_id in artifact_ids:
            holds.hold(tenant, artifact_id, conversation_id)

    def let_go(self, tenant: str, conversation_id: str, artifact_ids: Iterable[str]) -> None:
        """No turn refers to these: they expire, or are swept, as all others."""
        self._open_store().holds.let_go(tenant, conversation_id, artifact_ids)

    def keep_only(self, tenant: str, conversation_id: str, artifact_ids: Set[str], erased: str) -> None:
        """The turns that are left refer to these alone. What the erased request made goes at once.

        Of what else was held some may have been kept for another attempt that died before its turn was written.
        """
        store = self._open_store()
        gone = [one for one in store.holds.held_by(tenant, conversation_id) if one not in artifact_ids]
        store.holds.let_go(tenant, conversation_id, gone)
        for artifact_id in gone:
            artifact = store.peek(tenant, artifact_id)
            if artifact is not None and artifact.request_id == erased:
                with suppress(Conflict):  # another conversation holds it
                    store.delete(tenant, artifact_id)
