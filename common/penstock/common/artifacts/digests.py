"""The bytes of an artifact as they are read, held against the digest that was kept with them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from penstock.common.artifacts.facts import Artifact
from penstock.common.artifacts.places import OpenPlace, data_path
from penstock.schemas.errors import InternalError, NotFound

PIECE_BYTES = 4 * 1024 * 1024
"""How much of an artifact is in memory where it is read in pieces."""


def checked(data: bytes, artifact: Artifact, sha256: str | None = None) -> bytes:
    """The whole of it, whose digest is the stored one, and `sha256` if that is given. Raises InternalError."""
    digest = hashlib.sha256(data).hexdigest()
    if digest != artifact.sha256 or digest != (sha256 or digest):
        raise _changed(artifact.artifact_id, digest)
    return data


def read_pieces(place: OpenPlace, artifact: Artifact, start: int, end: int | None) -> Iterator[bytes]:
    """The bytes from `start` up to `end`, in pieces of PIECE_BYTES.

    The last piece of the whole comes only if the digest of all is the stored one; a part has no digest.
    Raises NotFound; InternalError when the digests differ.
    """
    stop = artifact.size_bytes if end is None else min(end, artifact.size_bytes)
    whole = start == 0 and stop == artifact.size_bytes
    digest = hashlib.sha256()
    path = data_path(artifact)
    for at in range(start, stop, PIECE_BYTES):
        until = min(at + PIECE_BYTES, stop)
        try:
            with place.as_store_unavailable():
                piece = bytes(place.client.get_range(path, start=at, end=until))
        except FileNotFoundError as error:
            raise missing(artifact.artifact_id) from error
        if whole:
            digest.update(piece)
            if until == stop and digest.hexdigest() != artifact.sha256:
                raise _changed(artifact.artifact_id, digest.hexdigest())
        yield piece


def missing(artifact_id: str) -> NotFound:
    return NotFound(f"there is no artifact {artifact_id}", param="artifact_id")


def _changed(artifact_id: str, digest: str) -> InternalError:
    return InternalError(f"artifact {artifact_id} does not have the expected digest", details={"sha256": digest})
