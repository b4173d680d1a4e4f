"""Artifacts: bytes too large for Kafka, kept beside it under their tenant and referred to by id, URI and digest.

Layout: `{tenant}/{artifact_id}/data`, then `{tenant}/{artifact_id}/about.json`, which makes the artifact exist.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from penstock.schemas.errors import InternalError, InvalidRequest, NotFound, TooLarge
from penstock.schemas.ids import check_tenant

PIECE_BYTES = 4 * 1024 * 1024
"""How much of an artifact is in memory where it is read in pieces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Artifact:
    """The reference to an artifact. `sha256` is the digest of its bytes in hexadecimal."""

    artifact_id: str
    tenant: str
    uri: str
    media_type: str
    size_bytes: int
    sha256: str


class ArtifactStore:
    """A folder, or an object store given as a URL (s3://bucket/prefix). All methods block and are thread-safe."""

    def __init__(self, location: str | Path, *, max_bytes: int = 100 * 1024 * 1024) -> None:
        # Imported on use: the library is large, and most clients have no artifacts.
        from obstore.store import LocalStore, from_url

        self._max_bytes = max_bytes
        if isinstance(location, str) and "://" in location:
            self._root = location.rstrip("/")
            self._store: Any = from_url(location)
        else:
            folder = Path(location).absolute()
            self._root = folder.as_uri()
            folder.mkdir(parents=True, exist_ok=True)  # its error names the folder, the library's does not
            self._store = LocalStore(folder)

    def put(
        self, tenant: str, data: bytes, *, media_type: str = "application/octet-stream", artifact_id: str | None = None
    ) -> Artifact:
        """Keep `data` under a new id, or under one that the caller made (a UUID), overwriting it.

        Raises TooLarge naming the limit, InvalidRequest for an impossible id.
        """
        if len(data) > self._max_bytes:
            raise TooLarge(
                f"an artifact of {len(data)} bytes is over the limit of {self._max_bytes}",
                details={"size_bytes": len(data), "limit_bytes": self._max_bytes},
            )
        folder = _folder(tenant, artifact_id := artifact_id or str(uuid.uuid4()))
        artifact = Artifact(
            artifact_id=artifact_id,
            tenant=tenant,
            uri=f"{self._root}/{folder}/data",
            media_type=media_type,
            size_bytes=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
        )
        # The bytes first: an artifact that can be found is whole.
        self._store.put(f"{folder}/data", data)
        self._store.put(f"{folder}/about.json", json.dumps(asdict(artifact)).encode())
        return artifact

    def describe(self, tenant: str, artifact_id: str) -> Artifact:
        """The reference. Raises NotFound for an id that this tenant does not have."""
        found = json.loads(self._read(f"{_folder(tenant, artifact_id)}/about.json", artifact_id))
        return Artifact(**cast("dict[str, Any]", found))

    def get(self, tenant: str, artifact_id: str, *, sha256: str | None = None) -> bytes:
        """The bytes, after their digest was compared with the stored one and with `sha256` when given.

        Raises NotFound; InternalError when the digests differ.
        """
        artifact = self.describe(tenant, artifact_id)
        data = self._read(f"{_folder(tenant, artifact_id)}/data", artifact_id)
        digest = hashlib.sha256(data).hexdigest()
        if digest != artifact.sha256 or digest != (sha256 or digest):
            raise _changed(artifact_id, digest)
        return data

    def pieces(self, artifact: Artifact) -> Iterator[bytes]:
        """The bytes in pieces of PIECE_BYTES. The last one comes only if the digest of all is the stored one.

        Raises NotFound; InternalError when the digests differ.
        """
        path = f"{_folder(artifact.tenant, artifact.artifact_id)}/data"
        digest = hashlib.sha256()
        for start in range(0, artifact.size_bytes, PIECE_BYTES):
            end = min(start + PIECE_BYTES, artifact.size_bytes)
            try:
                piece = bytes(self._store.get_range(path, start=start, end=end))
            except FileNotFoundError as error:
                raise _missing(artifact.artifact_id) from error
            digest.update(piece)
            if end == artifact.size_bytes and digest.hexdigest() != artifact.sha256:
                raise _changed(artifact.artifact_id, digest.hexdigest())
            yield piece

    def delete(self, tenant: str, artifact_id: str) -> None:
        """Remove it; one that is not there is no error."""
        folder = _folder(tenant, artifact_id)
        for name in ("about.json", "data"):
            try:
                self._store.delete(f"{folder}/{name}")
            except FileNotFoundError:
                continue

    def used_bytes(self, tenant: str) -> int:
        """Bytes of all that is kept under a tenant; lists it, so remember the answer for a while."""
        return sum(int(item["size"]) for items in self._store.list(check_tenant(tenant)) for item in items)

    def _read(self, path: str, artifact_id: str) -> bytes:
        try:
            return bytes(self._store.get(path).bytes())
        except FileNotFoundError as error:
            raise _missing(artifact_id) from error


class TenantArtifacts:
    """An artifact store as one tenant sees it."""

    def __init__(self, store: ArtifactStore, tenant: str) -> None:
        self._store = store
        self._tenant = check_tenant(tenant)

    def put(self, data: bytes, *, media_type: str = "application/octet-stream") -> Artifact:
        """Keep `data`. Raises TooLarge naming the limit."""
        return self._store.put(self._tenant, data, media_type=media_type)

    def get(self, artifact_id: str, *, sha256: str | None = None) -> bytes:
        """The verified bytes. Raises NotFound; InternalError when the digest differs."""
        return self._store.get(self._tenant, artifact_id, sha256=sha256)

    def describe(self, artifact_id: str) -> Artifact:
        """The reference. Raises NotFound."""
        return self._store.describe(self._tenant, artifact_id)


def check_artifact_id(value: object) -> str:
    """An id is a UUID in its usual form, so that it can name nothing but an artifact. Raises InvalidRequest."""
    try:
        if isinstance(value, str) and str(uuid.UUID(value)) == value:
            return value
    except ValueError:
        pass
    raise InvalidRequest("artifact_id must be a UUID", param="artifact_id")


def _folder(tenant: str, artifact_id: str) -> str:
    return f"{check_tenant(tenant)}/{check_artifact_id(artifact_id)}"


def _missing(artifact_id: str) -> NotFound:
    return NotFound(f"there is no artifact {artifact_id}", param="artifact_id")


def _changed(artifact_id: str, digest: str) -> InternalError:
    return InternalError(f"artifact {artifact_id} does not have the expected digest", details={"sha256": digest})
