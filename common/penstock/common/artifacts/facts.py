"""What is known of an artifact: its facts as values, and as the `about.json` that lies beside its bytes."""

from __future__ import annotations

import dataclasses
import json
import uuid
from dataclasses import asdict, dataclass
from typing import Any, cast

from penstock.schemas.errors import InvalidRequest
from penstock.schemas.times import rfc3339


@dataclass(frozen=True, kw_only=True, slots=True)
class Artifact:
    """The reference to an artifact. `sha256` is the digest of its bytes in hexadecimal."""

    artifact_id: str
    tenant: str
    uri: str
    media_type: str
    size_bytes: int
    sha256: str
    width: int | None = None
    """Of an image, in pixels, as `height`."""
    height: int | None = None
    seed: int | None = None
    """What generated the image."""
    created_at_ms: int = 0
    """Milliseconds since the epoch, as `expires_at_ms`; 0 in what older versions wrote."""
    expires_at_ms: int | None = None
    """From then on it is gone, unless a conversation holds it; None: it is kept."""
    store: str | None = None
    """The configured store in which its bytes lie; None: the default one, in which the facts of all lie."""
    prefix: str | None = None
    """The folder within its tenant in which its bytes lie."""
    request_id: str | None = None
    """The request whose output it is."""
    conversation_id: str | None = None
    """The conversation in which it was made: it goes with that, unless another one holds it."""
    marked_since_ms: int | None = None
    """Of an input that was stored for requests: since when each of these requests marks it, 0 for always. Null: it is
    no such input, or a release wrote it that made no marks."""
    purpose: str | None = None
    """Of a file of `/v1/files`: what it is for. Null: it is no such file."""
    filename: str | None = None
    """Of a file of `/v1/files`: the name that its uploader gave it."""
    uploader_user_id: str | None = None
    """Of an upload with a narrowed ticket: what that was narrowed to. Such tickets reach it."""
    uploader_conversation_id: str | None = None

    @property
    def url(self) -> str:
        """Where a gateway gives its bytes: a path."""
        return f"/v1/artifacts/{self.artifact_id}/content"

    def reference(self) -> dict[str, Any]:
        """What an output says of it: {artifact_id, url, media_type, bytes, sha256, width, height, seed, expires_at}."""
        return {
            "artifact_id": self.artifact_id,
            "url": self.url,
            "media_type": self.media_type,
            "bytes": self.size_bytes,
            "sha256": self.sha256,
            "width": self.width,
            "height": self.height,
            "seed": self.seed,
            "expires_at": None if self.expires_at_ms is None else rfc3339(self.expires_at_ms),
        }


_KNOWN = frozenset(field.name for field in dataclasses.fields(Artifact))


def to_json(artifact: Artifact) -> bytes:
    """The content of about.json, without what is null."""
    return json.dumps({name: value for name, value in asdict(artifact).items() if value is not None}).encode()


def from_json(content: bytes) -> Artifact:
    """The facts, written by this version, an older or a newer one. Raises ValueError, TypeError for anything else."""
    found = cast("dict[str, Any]", json.loads(content))
    return Artifact(**{name: value for name, value in found.items() if name in _KNOWN})


def check_artifact_id(value: object) -> str:
    """An id is a UUID in its usual form, so that it can name nothing but an artifact. Raises InvalidRequest."""
    if isinstance(value, str) and is_artifact_id(value):
        return value
    raise InvalidRequest("artifact_id must be a UUID", param="artifact_id")


ID_LENGTH = 36


def is_artifact_id(text: str) -> bool:
    try:
        return str(uuid.UUID(text)) == text
    except ValueError:
        return False
