"""Places: the folders and object stores in which artifacts lie, how they are opened, and the names within them.

In each: `{tenant}/{prefix}/{artifact_id}/data`, with or without a prefix. In the default place also
`{tenant}/{artifact_id}/about.json`, which makes the artifact exist, its entry in the index (`by_time.py`), and marks of
conversations and requests (`holds.py`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any
from urllib.request import url2pathname

from penstock.common.artifacts.facts import Artifact, check_artifact_id, is_artifact_id
from penstock.schemas.errors import InvalidRequest, StoreUnavailable
from penstock.schemas.ids import check_tenant

logger = logging.getLogger(__name__)

# A part that begins with a dot could be `..`, or one of our own folders (`.holds`).
_PREFIX_PART = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_CALL = re.compile(r"^.*?Error performing [A-Z]+ \S+ in .*? - ")
"""What a client for HTTP says of a call before its cause: method, URL, duration, tries."""
_QUERY = re.compile(r"\?[^\s\"')]*")
_LONGEST_CAUSE = 300
_PIECE_BYTES = 2**20
SHOWN = frozenset({"image/png", "image/jpeg", "image/webp", "image/gif", "text/plain"})
"""What a browser may show; all else is a download, so that an upload never runs as a page."""
_CLIENT_OPTIONS = frozenset(
    {
        "allow_http",
        "allow_invalid_certificates",
        "connect_timeout",
        "timeout",
        "pool_idle_timeout",
        "pool_max_idle_per_host",
        "proxy_url",
        "user_agent",
    }
)
"""Options that concern HTTP and not the store; the same for all kinds of stores."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StorePlace:
    """A folder, or a URL such as `s3://bucket/prefix`, with the options of its client.

    Options are those of obstore: `aws_endpoint`, `aws_region`, `aws_access_key_id`, `allow_http` and so on; what is
    not given comes from the usual variables of the environment (`AWS_…`, `GOOGLE_…`, `AZURE_…`).
    """

    location: str
    options: Mapping[str, str]
    presigned: bool = True
    """Whether URLs that the store itself serves may be handed out."""

    def __repr__(self) -> str:
        return f"StorePlace({self.location})"  # options hold credentials


@dataclass(frozen=True, slots=True)
class OpenPlace:
    """A place with its client, and the objects in it by their paths. All methods block and are thread-safe."""

    place: StorePlace
    root: str
    """The URI of the place, without a slash at its end."""
    client: Any
    folder: Path | None
    """Of a local place."""

    @property
    def lists_in_order(self) -> bool:
        """Whether it lists objects by their names and can begin behind one: S3 and GCS, but for S3 Express."""
        kind = type(self.client).__name__
        return kind == "GCSStore" or (kind == "S3Store" and "--x-s3" not in self.place.location)

    def items(self, under: str | None, offset: str | None = None) -> Iterator[Mapping[str, Any]]:
        """All objects, or those under a folder, or those of them behind the path `offset`, as they are iterated.

        Each has `path`, `size` in bytes and `last_modified`. Raises as the store.
        """
        with self.as_store_unavailable():
            for items in self.client.list(under, offset=offset):
                yield from items

    def folders(self, under: str) -> list[str]:
        """The names of the folders in a folder, in any order. Raises as the store."""
        with self.as_store_unavailable():
            found = self.client.list_with_delimiter(under)["common_prefixes"]
        return [path.rstrip("/").rpartition("/")[2] for path in found]

    def names(self, folder: str) -> list[str]:
        """The paths of the objects under a folder, without that folder. Raises as the store."""
        return sorted(item["path"].removeprefix(f"{folder}/") for item in self.items(folder))

    def put(
        self, path: str, content: bytes | IO[bytes] | Iterator[bytes], attributes: Mapping[str, str] | None = None
    ) -> None:
        """Write it, over what is there, in one step. Raises StoreUnavailable, and as an iterator."""
        with self.writing():
            self.client.put(path, content, attributes=attributes)

    def create(self, path: str, content: bytes) -> bool:
        """Write it unless it is there; of several that try, one succeeds. Raises StoreUnavailable."""
        from obstore.exceptions import AlreadyExistsError

        try:
            # Not within `writing`, which takes every error of the store for its failure.
            self.client.put(path, content, mode="create")
        except AlreadyExistsError:
            return False
        except Exception:
            with self.writing():
                raise
        return True

    def get(self, path: str) -> bytes | None:
        """What it holds; None if it is not there. Raises StoreUnavailable."""
        try:
            with self.as_store_unavailable():
                return bytes(self.client.get(path).bytes())
        except FileNotFoundError:
            return None

    def modified_ms(self, path: str) -> int | None:
        """When it was written last, in ms since the epoch; None if it is not there. Raises StoreUnavailable."""
        try:
            with self.as_store_unavailable():
                return modified_ms(self.client.head(path))
        except FileNotFoundError:
            return None

    def pieces(self, path: str) -> Iterator[bytes]:
        """What it holds, in pieces of about a megabyte; nothing if it is not there. Raises StoreUnavailable."""
        try:
            with self.as_store_unavailable():
                for piece in self.client.get(path).stream(min_chunk_size=_PIECE_BYTES):
                    yield bytes(piece)
        except FileNotFoundError:
            return

    def delete(self, path: str) -> None:
        """One that is not there is no error. Raises StoreUnavailable."""
        try:
            with self.as_store_unavailable():
                self.client.delete(path)
        except FileNotFoundError:
            return

    @contextmanager
    def as_store_unavailable(self) -> Generator[None]:
        """The client's errors as StoreUnavailable, without what they may tell: URLs with signatures.

        FileNotFoundError passes.
        """
        from obstore.exceptions import BaseError

        try:
            yield
        except BaseError as error:
            cause = cause_of(error)
            logger.warning("artifacts.failed location=%s error=%s", self.place.location, cause)
            message = f"the store of artifacts at {self.place.location} failed: {cause}"
            raise StoreUnavailable(message, retry_after_s=1) from None

    @contextmanager
    def writing(self) -> Generator[None]:
        """As `as_store_unavailable`, also for a folder or bucket that is not there."""
        try:
            with self.as_store_unavailable():
                yield
        except FileNotFoundError:
            message = f"the store of artifacts at {self.place.location} failed: it is not there"
            raise StoreUnavailable(message, retry_after_s=1) from None

    def attributes(self, artifact: Artifact) -> dict[str, str] | None:
        """What the store itself says when it serves the bytes; a folder serves nothing."""
        if self.folder is not None:
            return None
        if artifact.media_type in SHOWN:
            return {"Content-Type": artifact.media_type}
        shown = f'attachment; filename="{artifact.artifact_id}"'
        return {"Content-Type": "application/octet-stream", "Content-Disposition": shown}

    def presigned_url(self, path: str, ttl_s: float) -> str | None:
        import obstore
        from obstore.exceptions import BaseError

        if not self.place.presigned or self.folder is not None:
            return None
        try:
            return obstore.sign(self.client, "GET", path, timedelta(seconds=ttl_s))
        except (BaseError, ValueError, TypeError):  # no such thing there, or credentials that cannot sign
            return None


class Places:
    """The default place and those with names, opened when they are first used."""

    def __init__(self, default: StorePlace, named: Mapping[str, StorePlace]) -> None:
        """Raises as `open_place` for the default one."""
        self._named = dict(named)
        self._open: dict[str | None, OpenPlace] = {None: open_place(default)}

    @property
    def names(self) -> list[str | None]:
        """None for the default one, which is first."""
        return [None, *self._named]

    def folders(self) -> list[Path]:
        folders = [self[name].folder for name in self.names]
        return [folder for folder in folders if folder is not None]

    def __getitem__(self, store: str | None) -> OpenPlace:
        """Raises InvalidRequest for a store that is not configured here, and as `open_place`."""
        opened = self._open.get(store)
        if opened is None:
            self.check(store, None)
            opened = self._open[store] = open_place(self._named[store or ""])
        return opened

    def check(self, store: str | None, prefix: str | None) -> None:
        """Raises InvalidRequest naming what is wrong."""
        check_place(self._named, store, prefix)


def open_place(place: StorePlace) -> OpenPlace:
    """Make the client; a local folder is made too, nothing else is asked.

    Raises InvalidRequest naming what is wrong in the location or the options, StoreUnavailable for a folder that
    cannot be made now.
    """
    # Imported on use: the library is large, and most clients have no artifacts. The whole of it first: its parts can be
    # had while another thread is in the middle of it, and do not work then.
    import obstore  # noqa: F401  # pyright: ignore[reportUnusedImport]
    from obstore.exceptions import BaseError
    from obstore.store import LocalStore, from_url

    if "://" not in place.location or place.location.startswith("file://"):
        named = place.location.removeprefix("file://")
        folder = Path(named if named == place.location else url2pathname(named)).absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            message = f"the store of artifacts at {place.location} failed: {error.strerror}"
            raise StoreUnavailable(message, retry_after_s=1) from None
        return OpenPlace(place, folder.as_uri(), LocalStore(folder), folder)
    config: dict[str, Any] = {name: value for name, value in place.options.items() if name not in _CLIENT_OPTIONS}
    client: dict[str, Any] = {name: value for name, value in place.options.items() if name in _CLIENT_OPTIONS}
    try:
        make: Any = from_url  # typed by kind of store, and the kind is in the URL
        opened = make(place.location, config=config, client_options=client)
    except (BaseError, ValueError) as error:
        # The first line names the key or the scheme; what follows it may hold values.
        reason = str(error).partition("\n")[0]
        raise InvalidRequest(f"artifacts cannot lie at {place.location}: {reason}", param="artifacts") from None
    return OpenPlace(place, place.location.rstrip("/"), opened, None)


def check_place(named: Iterable[str], store: str | None, prefix: str | None) -> None:
    """Whether `output {store, prefix}` names a store that is there, and a folder within it.

    Raises InvalidRequest naming what is wrong.
    """
    if store is not None and store not in set(named):
        there_are = ", ".join(sorted(named)) or "none besides the default one"
        raise InvalidRequest(
            f"output.store {store!r} is no configured store of artifacts; there are: {there_are}",
            param="output.store",
        )
    check_prefix(prefix)


def check_prefix(value: object) -> str | None:
    """A folder within a tenant, such as `renders/2026`; None for none. Raises InvalidRequest naming it."""
    if value is None or value == "":
        return None
    if not isinstance(value, str) or len(value) > 200:
        raise InvalidRequest("output.prefix must be a text of at most 200 characters", param="output.prefix")
    for part in value.rstrip("/").split("/"):
        # An artifact's own folder is no place for others: its marks lie there.
        if not _PREFIX_PART.fullmatch(part) or is_artifact_id(part):
            raise InvalidRequest(
                f"output.prefix {value!r} must be a folder within the tenant: parts of A-Z a-z 0-9 . _ - that do not"
                " begin with a dot and are no UUID, separated by single slashes",
                param="output.prefix",
            )
    return value.rstrip("/")


def modified_ms(item: Mapping[str, Any]) -> int:
    """When an object was written last, in ms since the epoch, as a listing and a look at it alone say."""
    return int(item["last_modified"].timestamp() * 1000)


def folder_of(tenant: str, artifact_id: str) -> str:
    return f"{check_tenant(tenant)}/{check_artifact_id(artifact_id)}"


def about_path(tenant: str, artifact_id: str) -> str:
    return f"{folder_of(tenant, artifact_id)}/about.json"


def data_path(artifact: Artifact) -> str:
    """Raises InvalidRequest for facts that would lead out of the tenant."""
    return data_path_of(artifact.tenant, artifact.artifact_id, artifact.prefix)


def data_path_of(tenant: str, artifact_id: str, prefix: str | None) -> str:
    within = check_prefix(prefix)
    middle = f"{within}/" if within else ""
    return f"{check_tenant(tenant)}/{middle}{check_artifact_id(artifact_id)}/data"


def cause_of(error: Exception) -> str:
    """What a client's error says of its cause, in a line.

    What it says of its URLs, of its own tries and of what a server answered is left out: it may hold signatures.
    """
    said = str(error).partition("\n")[0]
    said = said.removeprefix("Generic ").partition(" error: ")[2] or said
    said = _CALL.sub("", said).partition("<")[0]
    return _QUERY.sub("", said).strip(" :")[:_LONGEST_CAUSE] or type(error).__name__
