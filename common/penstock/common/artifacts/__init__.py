"""Artifacts: bytes too large for Kafka, kept beside it under their tenant and referred to by id, URI and digest."""

from penstock.common.artifacts.facts import Artifact, check_artifact_id
from penstock.common.artifacts.places import StorePlace, check_prefix
from penstock.common.artifacts.store import ArtifactStore, Listed
from penstock.common.artifacts.tenants import TenantArtifacts

__all__ = [
    "Artifact",
    "ArtifactStore",
    "Listed",
    "StorePlace",
    "TenantArtifacts",
    "check_artifact_id",
    "check_prefix",
]
