"""API keys: the file that holds them, hashed, and the ring that looks one up and follows changes of the file."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from penstock.gateway.edge.key_book import KeyBook
from penstock.gateway.edge.key_records import DEFAULT_SCOPES, KeyRecord, digest_of, id_of, new_key
from penstock.gateway.limits.limits import NO_LIMITS, Limits

logger = logging.getLogger(__name__)

READ_AGAIN_S = 1.0
"""A file that cannot be used is read again so often, although it looks unchanged."""
Stamp = tuple[int, int, int, int]


class KeysFileError(ValueError):
    """The keys file is missing or cannot be read as one; the message names the cure."""


def create_key(
    path: str | Path,
    *,
    tenant: str = "default",
    scopes: Sequence[str] = DEFAULT_SCOPES,
    max_priority: int = 0,
    rate: float | None = None,
    limits: Limits = NO_LIMITS,
    name: str | None = None,
    expires_at: int | None = None,
) -> str:
    """Add a key to the file (made if missing) and return its secret, which is shown this once and kept nowhere.

    Raises InvalidRequest for a bad tenant, ValueError for a bad scope, priority or rate, KeysFileError for a file
    that is something else.
    """
    record, secret = new_key(
        time.time(),
        tenant=tenant,
        scopes=scopes,
        max_priority=max_priority,
        rate=rate,
        limits=limits.to_dict(),
        name=name,
        expires_at=expires_at,
    )
    file = Path(path)
    with _locked(file):
        _write(file, [*(_read(file) if file.exists() else []), record])
    return secret


def list_keys(path: str | Path) -> list[KeyRecord]:
    """All keys of the file, oldest first. Raises KeysFileError."""
    return _read(Path(path))


def revoke_key(path: str | Path, key_id: str) -> bool:
    """Remove a key; False if the file has none of that id. Running gateways notice within a second."""
    file = Path(path)
    with _locked(file):
        records = _read(file)
        kept = [record for record in records if record.key_id != key_id]
        if len(kept) == len(records):
            return False
        _write(file, kept)
    return True


def change_key(path: str | Path, key_id: str, change: Callable[[KeyRecord], KeyRecord]) -> bool:
    """Write a key as `change` returns it; False if the file has none of that id. Raises what `change` raises."""
    file = Path(path)
    with _locked(file):
        records = _read(file)
        if all(record.key_id != key_id for record in records):
            return False
        _write(file, [change(record) if record.key_id == key_id else record for record in records])
    return True


def rotate_key(path: str | Path, key_id: str, grace_s: float) -> str | None:
    """The new secret of a key, whose old one works for `grace_s` more; None if the file has none of that id.

    Raises as `KeyRecord.rotated`, and KeysFileError.
    """
    made: list[str] = []

    def rotate(record: KeyRecord) -> KeyRecord:
        record, secret = record.rotated(grace_s, time.time())
        made.append(secret)
        return record

    return made[0] if change_key(path, key_id, rotate) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class FileProblem:
    """Why the keys file is not in force as it is."""

    text: str
    """For everybody."""
    cause: str
    """For operators: it names the file."""


class KeyRing:
    """The keys of one file in memory, and behind them those of the topic: an id that both have is that of the file.

    A changed file is read again; one that broke leaves the last good keys. While it is missing no key is in force.
    """

    def __init__(self, path: str | Path, book: KeyBook | None = None, clock: Callable[[], float] = time.time) -> None:
        self._path = Path(path)
        self.book, self.clock = book or KeyBook(), clock
        self._problem: FileProblem | None = None
        self._again_at = 0.0
        self._stamp: Stamp | None = None
        self._stamp = self._look()
        self._records = {record.key_id: record for record in _read(self._path)}

    def problem(self) -> FileProblem | None:
        """Looks at the file again. None: the keys in force are those of the file."""
        self._refresh()
        return self._problem

    def find(self, secret: str) -> KeyRecord | None:
        """The key of a secret that works now, or None. Raises BrokerUnavailable while the topic may have it."""
        key_id = id_of(secret)
        record = None if key_id is None else self.record(key_id)
        return record if record is not None and record.matches(digest_of(secret), self.clock()) else None

    def record(self, key_id: str) -> KeyRecord | None:
        """The key of this id, if there is (still) one that has not expired. Raises as `find`."""
        self._refresh()
        if self._stamp is None:  # a way to shut all gateways of a file, which keys of the topic do not go round
            return None
        record = self._records.get(key_id) or self.book.get(key_id)
        return None if record is None or record.is_expired(self.clock()) else record

    def of_file(self) -> Mapping[str, KeyRecord]:
        """The keys of the file, by id."""
        self._refresh()
        return self._records

    def _look(self) -> Stamp | None:
        """What identifies a file's content. Raises OSError for one that cannot be read."""
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            return None
        return stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size

    def _refresh(self) -> None:
        try:
            stamp = self._look()
        except OSError as error:  # a remount, or a right taken away: the keys stay
            self._note("the keys file cannot be read", error)
            return
        if stamp == self._stamp and (self._problem is None or time.monotonic() < self._again_at):
            return
        self._stamp, self._again_at = stamp, time.monotonic() + READ_AGAIN_S
        if stamp is None:
            self._records = {}
            self._note("the keys file is missing: no key is in force", FileNotFoundError(str(self._path)))
            return
        try:
            self._records = {record.key_id: record for record in _read(self._path)}
        except KeysFileError as error:
            self._note("the keys file is broken", error)
        else:
            self._problem = None
            logger.info("keys.reloaded path=%s keys=%d", self._path, len(self._records))

    def _note(self, text: str, error: Exception) -> None:
        """Keep the problem, and log one that is new."""
        if self._records:
            text += ": the keys of before are in force, and what was revoked since is not"
        problem = FileProblem(text=text, cause=f"{error} ({self._path})")
        if problem != self._problem:
            self._problem = problem
            logger.error("keys.not_in_force reason=%s cause=%s", text, problem.cause)


def _read(path: Path) -> list[KeyRecord]:
    try:
        document = json.loads(path.read_text("utf-8"))
        entries = cast("list[dict[str, Any]]", document["keys"])
        return [KeyRecord.from_dict(entry) for entry in entries]
    except FileNotFoundError:
        raise KeysFileError(f"{path} does not exist: `penstock keys create --file {path}` makes it") from None
    except Exception as error:
        raise KeysFileError(f"{path} is not a keys file of Penstock: {error!r}") from error


def _write(path: Path, records: Sequence[KeyRecord]) -> None:
    document = {"version": 1, "keys": [record.to_dict() for record in records]}
    # mkstemp makes the file readable by its owner only; a reader sees the old file or the new one, never half.
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump(document, out, indent=2)
            out.write("\n")
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@contextmanager
def _locked(path: Path) -> Generator[None]:
    """One writer at a time: two `penstock keys create` must not lose each other's key. Raises KeysFileError."""
    if not path.parent.is_dir():
        raise KeysFileError(f"the folder {path.parent} does not exist: create it, or name another --file")
    with open(path.with_name(path.name + ".lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
