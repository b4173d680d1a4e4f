"""Holds: what a conversation's turns refer to lives as long as the conversation.

Two marks for each hold, both empty: `{tenant}/.holds/{conversation_id}/{artifact_id}` finds the artifacts of a
conversation, and `{tenant}/{artifact_id}/held/{conversation_id}` says of an artifact that it is held.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.common.artifacts.places import OpenPlace, folder_of
from penstock.schemas.ids import check_conversation_id, check_tenant

HOLDS_FOLDER = ".holds"
HELD_FOLDER = "held"


class Holds:
    """The marks in the default place of a store. All methods block and are thread-safe."""

    def __init__(self, place: OpenPlace) -> None:
        self._place = place
        self._client = place.client

    def hold(self, tenant: str, artifact_id: str, conversation_id: str) -> None:
        """From now on the artifact neither expires nor can it be deleted alone. Doing it again changes nothing."""
        folder, conversation = folder_of(tenant, artifact_id), check_conversation_id(conversation_id)
        with self._place.writing():
            # In this order: a mark that `release` would not find must not be.
            self._client.put(f"{tenant}/{HOLDS_FOLDER}/{conversation}/{artifact_id}", b"")
            self._client.put(f"{folder}/{HELD_FOLDER}/{conversation}", b"")

    def release(self, tenant: str, conversation_id: str) -> list[str]:
        """The conversation is gone: it holds nothing any more. The ids of what it held."""
        held = self.held_by(tenant, conversation_id)
        self.let_go(tenant, conversation_id, held)
        return held

    def held_by(self, tenant: str, conversation_id: str) -> list[str]:
        """The ids of what a conversation holds."""
        return self._names(f"{check_tenant(tenant)}/{HOLDS_FOLDER}/{check_conversation_id(conversation_id)}")

    def let_go(self, tenant: str, conversation_id: str, artifact_ids: Iterable[str]) -> None:
        """The conversation holds these no more; it may hold others. Doing it again changes nothing."""
        conversation = check_conversation_id(conversation_id)
        for artifact_id in artifact_ids:
            self._remove(f"{folder_of(tenant, artifact_id)}/{HELD_FOLDER}/{conversation}")
            self._remove(f"{tenant}/{HOLDS_FOLDER}/{conversation}/{artifact_id}")

    def of(self, tenant: str, artifact_id: str) -> list[str]:
        """The conversations that hold it."""
        return self._names(f"{folder_of(tenant, artifact_id)}/{HELD_FOLDER}")

    def any_of(self, tenant: str, artifact_id: str) -> bool:
        return bool(self.of(tenant, artifact_id))

    def forget(self, tenant: str, artifact_id: str) -> None:
        """The artifact is gone, and its marks with it."""
        for conversation in self.of(tenant, artifact_id):
            self._remove(f"{folder_of(tenant, artifact_id)}/{HELD_FOLDER}/{conversation}")
            self._remove(f"{tenant}/{HOLDS_FOLDER}/{conversation}/{artifact_id}")

    def _names(self, folder: str) -> list[str]:
        with self._place.telling_failures():
            return sorted(item["path"].rpartition("/")[2] for items in self._client.list(folder) for item in items)

    def _remove(self, path: str) -> None:
        try:
            with self._place.telling_failures():
                self._client.delete(path)
        except FileNotFoundError:
            return
