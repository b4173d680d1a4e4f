"""Trying an artifact store: whether it takes, gives and removes an artifact."""

from __future__ import annotations

from penstock.common.artifacts.store import ArtifactStore

TENANT = "penstock-probe"
"""The folder in which it is tried: nobody's list of artifacts shows it."""
_DATA = b"penstock"
_KEPT_S = 60.0


def try_store(store: ArtifactStore, artifact_id: str) -> None:
    """Write, read and delete one artifact of this id (a UUID of the caller's own) in each place of the store. Blocks.

    What a crash leaves behind expires. Raises as `put`, `get` and `delete`.
    """
    for name in store.places.names:
        kept = store.put(TENANT, _DATA, media_type="text/plain", artifact_id=artifact_id, ttl_s=_KEPT_S, store=name)
        try:
            store.get(TENANT, artifact_id, sha256=kept.sha256)
        finally:
            store.delete(TENANT, artifact_id)
