"""The artifact store that the configuration names: the same for workers, gateways and the client library."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, SecretStr

from penstock.common.artifacts.places import StorePlace
from penstock.common.artifacts.store import ArtifactStore
from penstock.common.configuration import ArtifactsSection, ProcessSettings


class ArtifactSettings(ProcessSettings):
    """What a process reads of artifacts alone."""

    artifacts: ArtifactsSection = Field(default_factory=ArtifactsSection)


def open_store(section: ArtifactsSection, location: str | None = None) -> ArtifactStore:
    """The store of `[artifacts]`; `location` where this process sees it under another name. Raises as ArtifactStore."""
    return ArtifactStore(
        location or section.location,
        max_bytes=section.max_bytes,
        ttl_s=section.ttl_s,
        options=_texts(section.options),
        presigned=section.presigned_urls,
        stores={
            name: StorePlace(location=one.location, options=_texts(one.options), presigned=one.presigned_urls)
            for name, one in section.stores.items()
        },
    )


def configured_store() -> ArtifactStore:
    """The store of the TOML file that PENSTOCK_CONFIG names and of PENSTOCK_ARTIFACTS__… variables.

    For `Client(artifacts=configured_store())`. Raises FileNotFoundError, pydantic's ValidationError, and as
    ArtifactStore.
    """
    return open_store(ArtifactSettings().artifacts)


def _texts(options: Mapping[str, SecretStr]) -> dict[str, str]:
    return {name: value.get_secret_value() for name, value in options.items()}


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
