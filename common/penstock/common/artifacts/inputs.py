"""Inputs that a gateway or a worker stores for a request: base64, parts of a multipart body, what lies at a URL.

The id follows from the bytes, so requests with equal bytes share one artifact. Each request marks what it uses, and the
artifact is erased with the last request that has a mark.
"""

from __future__ import annotations

from penstock.common.artifacts.digests import checked
from penstock.common.artifacts.facts import Artifact
from penstock.common.artifacts.places import data_path
from penstock.common.artifacts.store import ArtifactStore
from penstock.schemas.errors import InternalError

INPUT_KEPT_S = 3 * 86_400
"""As long as records of requests are kept. A conversation that shows an input holds it longer."""


def keep_input(
    store: ArtifactStore, tenant: str, request_id: str, data: bytes, *, artifact_id: str, media_type: str
) -> Artifact:
    """Store an input of a request, for INPUT_KEPT_S from now. Raises as `ArtifactStore.put`."""
    found = store.peek(tenant, artifact_id)
    since_ms = 0 if found is None else found.marked_since_ms
    # The mark first: an erasure of another request then either sees it, or has deleted before the bytes come.
    store.request_holds.hold(tenant, artifact_id, request_id)
    kept = store.put(
        tenant,
        data,
        media_type=media_type,
        artifact_id=artifact_id,
        ttl_s=INPUT_KEPT_S,
        marked_since_ms=store.now_ms() if since_ms is None else since_ms,
    )
    if found is not None and found.created_at_ms != kept.created_at_ms:
        store.by_time.remove(found)
    return kept


def erase_inputs(store: ArtifactStore, tenant: str, request_id: str, conversation_id: str | None) -> None:
    """Erase the inputs that belong to this request alone. After a failure, call it again.

    An input stays, and expires, if another request marks it, if another conversation than the request's own holds it,
    or if a request of a release without marks may use it. Raises StoreUnavailable.
    """
    marks = store.request_holds
    for artifact_id in marks.letting_go(tenant, request_id, marks.held_by(tenant, request_id)):
        artifact = store.peek(tenant, artifact_id)
        if artifact is None or marks.any_of(tenant, artifact_id) or _may_be_used_unmarked(artifact, store.now_ms()):
            continue
        if set(store.holds.of(tenant, artifact_id)) - {conversation_id}:
            continue
        _erase(store, artifact)


def _may_be_used_unmarked(artifact: Artifact, now_ms: int) -> bool:
    since_ms = artifact.marked_since_ms
    return since_ms is None or since_ms + INPUT_KEPT_S * 1000 > now_ms


def _erase(store: ArtifactStore, artifact: Artifact) -> None:
    """Delete it; store it again if another request has marked it meanwhile."""
    data = _data(store, artifact)
    store.delete(artifact.tenant, artifact.artifact_id, even_held=True)
    if store.request_holds.any_of(artifact.tenant, artifact.artifact_id):
        _restore(store, artifact, data)


def take_expired(store: ArtifactStore, artifact: Artifact, marked_after_ms: int) -> bool:
    """Delete an input that has expired, unless a request marks it after that time: then it stays, or is stored again.

    Such a request may just be bringing its bytes. Whether it is gone. Raises Conflict when a conversation holds it.
    """

    def is_marked() -> bool:
        marked_ms = store.request_holds.marked_ms(artifact.tenant, artifact.artifact_id)
        return marked_ms is not None and marked_ms > marked_after_ms

    data = _data(store, artifact)
    if is_marked():
        return False
    store.delete(artifact.tenant, artifact.artifact_id)
    if is_marked():
        return not _restore(store, artifact, data)
    return True


def _data(store: ArtifactStore, artifact: Artifact) -> bytes | None:
    """Its bytes, also if it has expired; None: there is nothing that could be stored again."""
    data = store.places[artifact.store].get(data_path(artifact))
    try:
        return None if data is None else checked(data, artifact)
    except InternalError:
        return None


def _restore(store: ArtifactStore, artifact: Artifact, data: bytes | None) -> bool:
    """Whether there was something to store again."""
    if data is not None:
        store.put(
            artifact.tenant,
            data,
            media_type=artifact.media_type,
            artifact_id=artifact.artifact_id,
            ttl_s=INPUT_KEPT_S,
            marked_since_ms=artifact.marked_since_ms,
        )
    return data is not None
