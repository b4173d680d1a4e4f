"""The answers of the routes of artifacts, as `answers` has those of requests."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict

from penstock.gateway.routes.answers import Answer, Time


class ArtifactBody(Answer):
    object: Literal["artifact"]
    id: str
    artifact_id: str
    media_type: str
    bytes: int
    sha256: str
    content_url: str
    url: str
    width: int | None
    height: int | None
    seed: int | None
    created_at: Time | None
    expires_at: Time | None


class ArtifactDeleted(Answer):
    object: Literal["artifact.deleted"]
    id: str
    deleted: bool


class ArtifactUrl(Answer):
    """`url` begins with `/` when it is one of this gateway."""

    object: Literal["artifact.url"]
    id: str
    url: str
    expires_at: Time


class UrlLifetime(Answer):
    model_config = ConfigDict(extra="forbid")

    ttl_s: float | None = None


class SweptArtifact(Answer):
    tenant: str
    artifact_id: str
    reason: Literal["expired", "orphan", "partial"]
    bytes: int


class ArtifactSweep(Answer):
    """How many artifacts by reason, and the first thousand of them."""

    object: Literal["artifact.sweep"]
    dry_run: bool
    artifacts: dict[str, int]
    bytes: int
    released_conversations: int
    data: list[SweptArtifact]
