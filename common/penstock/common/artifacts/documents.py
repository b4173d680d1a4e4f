"""Small documents in the default place of a store, beside the artifacts: what gateways share about longer work.

A name that begins with a dot is no artifact's: lists and sweeps of artifacts pass it over.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

from penstock.common.artifacts.places import OpenPlace

PIECE_BYTES = 2**20


class Documents:
    """Objects by their paths. All methods block and are thread-safe; they raise StoreUnavailable."""

    def __init__(self, place: OpenPlace) -> None:
        self._place = place
        self._client = place.client

    def put(self, path: str, content: bytes | IO[bytes]) -> None:
        """Write it, over what is there."""
        with self._place.writing():
            self._client.put(path, content)

    def create(self, path: str, content: bytes) -> bool:
        """Write it unless it is there; of several that try, one succeeds."""
        from obstore.exceptions import AlreadyExistsError

        try:
            # Not within `writing`, which tells every error of the store as its failure.
            self._client.put(path, content, mode="create")
        except AlreadyExistsError:
            return False
        except Exception:
            with self._place.writing():
                raise
        return True

    def get(self, path: str) -> bytes | None:
        try:
            with self._place.telling_failures():
                return bytes(self._client.get(path).bytes())
        except FileNotFoundError:
            return None

    def pieces(self, path: str) -> Iterator[bytes]:
        """What it holds, in pieces of about a megabyte; nothing if it is not there."""
        try:
            with self._place.telling_failures():
                for piece in self._client.get(path).stream(min_chunk_size=PIECE_BYTES):
                    yield bytes(piece)
        except FileNotFoundError:
            return

    def names(self, folder: str) -> list[str]:
        """The paths of the documents under a folder, without that folder."""
        return sorted(item["path"].removeprefix(f"{folder}/") for item in self._place.items(folder))

    def folders(self, folder: str) -> list[str]:
        """The names of the folders in a folder."""
        return self._place.folders(folder)

    def delete(self, path: str) -> None:
        """One that is not there is no error."""
        try:
            with self._place.telling_failures():
                self._client.delete(path)
        except FileNotFoundError:
            return
