"""A store of artifacts in a folder, with a clock, an input that requests share, and faults at any call."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.common.artifacts import Artifact, ArtifactStore, StorePlace
from penstock.common.artifacts.inputs import erase_inputs, keep_input
from penstock.schemas.errors import NotFound
from penstock.schemas.ids import input_artifact_id

DATA = b"a picture"
ID = input_artifact_id("acme", hashlib.sha256(DATA).hexdigest())


class StoreWorld:
    """The tenant is `acme`. There is a second store, `cold`."""

    def __init__(self, folder: Path, clock: Callable[[], float] | None = None) -> None:
        self.now_s = 1_800_000_000.0
        self.folder, self.cold = folder / "store", folder / "cold"
        cold = StorePlace(location=str(self.cold), options={})
        self.store = ArtifactStore(self.folder, stores={"cold": cold}, clock=clock or (lambda: self.now_s))

    def bring(self, request_id: str, data: bytes = DATA) -> Artifact:
        """Stores an input of a request."""
        artifact_id = input_artifact_id("acme", hashlib.sha256(data).hexdigest())
        return keep_input(self.store, "acme", request_id, data, artifact_id=artifact_id, media_type="image/png")

    def erase(self, request_id: str, conversation_id: str | None = None) -> None:
        erase_inputs(self.store, "acme", request_id, conversation_id)

    def has(self, artifact_id: str = ID) -> bool:
        try:
            return bool(self.store.get("acme", artifact_id))
        except NotFound:
            return False

    def files(self) -> list[str]:
        return sorted(str(file.relative_to(self.folder)) for file in self.folder.rglob("*") if file.is_file())

    @contextmanager
    def before_each_call(self, act: Callable[[int, object], object]) -> Iterator[None]:
        """`act(number, place)` runs before each call of a store. Calls that it makes itself are not counted."""
        place = type(self.store.places[None])
        real, calls, acting = place.as_store_unavailable, [0], [False]

        def as_store_unavailable(self: object) -> object:
            if not acting[0]:
                acting[0] = True
                try:
                    act(calls[0], self)
                finally:
                    acting[0] = False
                calls[0] += 1
            return real(self)  # type: ignore[arg-type]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(place, "as_store_unavailable", as_store_unavailable)
            yield
