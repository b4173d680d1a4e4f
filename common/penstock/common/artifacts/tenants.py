"""An artifact store as one tenant sees it."""

from __future__ import annotations

from penstock.common.artifacts.facts import Artifact
from penstock.common.artifacts.store import ArtifactStore, Listed
from penstock.schemas.ids import check_tenant


class TenantArtifacts:
    """An artifact store as one tenant sees it."""

    def __init__(self, store: ArtifactStore, tenant: str) -> None:
        self._store = store
        self._tenant = check_tenant(tenant)

    def put(self, data: bytes, *, media_type: str = "application/octet-stream", ttl_s: float | None = None) -> Artifact:
        """Keep `data`, for `ttl_s` seconds or as long as the store's setting says. Raises TooLarge naming the limit."""
        return self._store.put(self._tenant, data, media_type=media_type, ttl_s=ttl_s)

    def get(self, artifact_id: str, *, sha256: str | None = None) -> bytes:
        """The verified bytes. Raises NotFound; InternalError when the digest differs."""
        return self._store.get(self._tenant, artifact_id, sha256=sha256)

    def describe(self, artifact_id: str) -> Artifact:
        """The reference. Raises NotFound."""
        return self._store.describe(self._tenant, artifact_id)

    def list(self, *, after: str | None = None, limit: int = 20, newest_first: bool = True) -> Listed:
        """A page of references. Raises InvalidRequest for an `after` that is not there."""
        return self._store.list(self._tenant, after=after, limit=limit, newest_first=newest_first)

    def delete(self, artifact_id: str) -> None:
        """Remove it; one that is not there is no error. Raises Conflict when a conversation holds it."""
        self._store.delete(self._tenant, artifact_id)
