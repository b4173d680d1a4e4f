"""Holds: marks that tell why an artifact lives.

What the turns of a conversation refer to lives as long as the conversation. An input that a gateway or a worker stored
for requests is erased with the last of them.

Two empty objects for each hold: `{tenant}/.holds/{holder}/{artifact_id}` finds the artifacts of a holder, and
`{tenant}/{artifact_id}/held/{holder}` says who holds an artifact. For requests these are `.inputs` and `input`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from penstock.common.artifacts.facts import is_artifact_id
from penstock.common.artifacts.places import OpenPlace, folder_of, modified_ms
from penstock.schemas.ids import NAMESPACE, check_conversation_id, check_tenant


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of holders: the names of the two folders, and a holder's name in them."""

    by_holder: str
    at_artifact: str
    name_of: Callable[[str], str]


def _request_name(request_id: str) -> str:
    """Services on Kafka choose ids that are no names of folders, such as `..`."""
    return request_id if is_artifact_id(request_id) else str(uuid.uuid5(NAMESPACE, f"request\n{request_id}"))


CONVERSATIONS = Kind(".holds", "held", check_conversation_id)
REQUESTS = Kind(".inputs", "input", _request_name)


class Holds:
    """The marks of one kind in the default place of a store. All methods block and are thread-safe."""

    def __init__(self, place: OpenPlace, kind: Kind) -> None:
        self._place = place
        self._kind = kind

    def hold(self, tenant: str, artifact_id: str, holder: str) -> None:
        """From now on the holder holds the artifact. Doing it again changes nothing."""
        # In this order: a mark that `held_by` would not find must not be.
        self._place.put(self._by_holder(tenant, artifact_id, holder), b"")
        self._place.put(self._at_artifact(tenant, artifact_id, holder), b"")

    def held_by(self, tenant: str, holder: str) -> list[str]:
        return sorted(self._names(self._of_holder(tenant, holder)))

    def marks_of(self, tenant: str, holder: str) -> dict[str, int]:
        """By the id of what a holder holds, when it was marked last, in ms since the epoch."""
        items = self._place.items(self._of_holder(tenant, holder))
        return {item["path"].rpartition("/")[2]: modified_ms(item) for item in items}

    def let_go(self, tenant: str, holder: str, artifact_ids: Iterable[str]) -> None:
        """The holder holds these no more; it may hold others. Doing it again changes nothing."""
        for _ in self.letting_go(tenant, holder, artifact_ids):
            pass

    def letting_go(self, tenant: str, holder: str, artifact_ids: Iterable[str]) -> Iterator[str]:
        """As `let_go`, one by one. Until the caller asks for the next one, `held_by` still finds it."""
        for artifact_id in artifact_ids:
            self._place.delete(self._at_artifact(tenant, artifact_id, holder))
            yield artifact_id
            self._place.delete(self._by_holder(tenant, artifact_id, holder))

    def of(self, tenant: str, artifact_id: str) -> list[str]:
        return sorted(self._names(self._of_artifact(tenant, artifact_id)))

    def any_of(self, tenant: str, artifact_id: str) -> bool:
        return any(True for _ in self._names(self._of_artifact(tenant, artifact_id)))

    def marked_ms(self, tenant: str, artifact_id: str) -> int | None:
        """When the newest mark at it was made, in ms since the epoch; None: it has none."""
        return max(map(modified_ms, self._place.items(self._of_artifact(tenant, artifact_id))), default=None)

    def forget(self, tenant: str, artifact_id: str) -> None:
        """The artifact is gone, and its marks with it."""
        for name in self.of(tenant, artifact_id):
            self._place.delete(self._at_artifact(tenant, artifact_id, name))
            self._place.delete(self._by_holder(tenant, artifact_id, name))

    def _by_holder(self, tenant: str, artifact_id: str, holder: str) -> str:
        return f"{self._of_holder(tenant, holder)}/{artifact_id}"

    def _at_artifact(self, tenant: str, artifact_id: str, holder: str) -> str:
        return f"{self._of_artifact(tenant, artifact_id)}/{self._kind.name_of(holder)}"

    def _of_holder(self, tenant: str, holder: str) -> str:
        return f"{check_tenant(tenant)}/{self._kind.by_holder}/{self._kind.name_of(holder)}"

    def _of_artifact(self, tenant: str, artifact_id: str) -> str:
        return f"{folder_of(tenant, artifact_id)}/{self._kind.at_artifact}"

    def _names(self, folder: str) -> Iterator[str]:
        for item in self._place.items(folder):
            yield item["path"].rpartition("/")[2]
