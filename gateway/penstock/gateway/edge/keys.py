"""API keys: the file that holds them, hashed, and the ring that looks one up and follows changes of the file."""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from penstock.gateway.limits.limits import NO_LIMITS, Limits
from penstock.schemas.ids import check_tenant
from penstock.schemas.topics import MOST_PRIORITY

logger = logging.getLogger(__name__)

SCOPES = ("submit", "read", "cancel", "admin")
DEFAULT_SCOPES = ("submit", "read", "cancel")
_PREFIX = "pk"
READ_AGAIN_S = 1.0
"""A file that cannot be used is read again so often, although it looks unchanged."""
Stamp = tuple[int, int, int, int]


class KeysFileError(ValueError):
    """The keys file is missing or cannot be read as one; the message names the cure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyRecord:
    """One key as the file holds it. `digest` is the SHA-256 of the secret: 256 random bits need no slow hash."""

    key_id: str
    digest: str = field(repr=False)
    tenant: str
    scopes: tuple[str, ...] = DEFAULT_SCOPES
    max_priority: int = 0
    """The most urgent priority that the key may use; 0 is the most urgent of all."""
    rate: float | None = None
    """Submissions per second, on average; None is without limit."""
    limits: Limits = NO_LIMITS
    """What else the key may have; the limits of its tenant hold beside them."""
    name: str | None = None
    created_at: int = 0
    """Seconds since the epoch."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.key_id,
            "sha256": self.digest,
            "tenant": self.tenant,
            "scopes": list(self.scopes),
            "max_priority": self.max_priority,
            "rate": self.rate,
            **({"limits": self.limits.to_dict()} if self.limits != NO_LIMITS else {}),
            "name": self.name,
            "created_at": self.created_at,
        }

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> KeyRecord:
        rate = entry.get("rate")
        return cls(
            key_id=str(entry["id"]),
            digest=str(entry["sha256"]),
            tenant=check_tenant(str(entry["tenant"])),
            scopes=_checked_scopes([str(scope) for scope in entry.get("scopes", DEFAULT_SCOPES)]),
            max_priority=int(entry.get("max_priority", 0)),
            rate=None if rate is None else float(rate),
            limits=Limits.from_dict(cast("Mapping[str, Any]", entry.get("limits") or {})),
            name=entry.get("name"),
            created_at=int(entry.get("created_at", 0)),
        )


def create_key(
    path: str | Path,
    *,
    tenant: str = "default",
    scopes: Sequence[str] = DEFAULT_SCOPES,
    max_priority: int = 0,
    rate: float | None = None,
    limits: Limits = NO_LIMITS,
    name: str | None = None,
) -> str:
    """Add a key to the file (made if missing) and return its secret, which is shown this once and kept nowhere.

    Raises InvalidRequest for a bad tenant, ValueError for a bad scope, priority or rate, KeysFileError for a file
    that is something else.
    """
    if not 0 <= max_priority <= MOST_PRIORITY or (rate is not None and rate <= 0):
        raise ValueError(f"max_priority must be 0 to {MOST_PRIORITY} and rate above 0")
    key_id = secrets.token_hex(6)
    secret = f"{_PREFIX}_{key_id}_{secrets.token_urlsafe(32)}"
    record = KeyRecord(
        key_id=key_id,
        digest=_digest(secret),
        tenant=check_tenant(tenant),
        scopes=_checked_scopes(scopes),
        max_priority=max_priority,
        rate=rate,
        limits=limits,
        name=name,
        created_at=int(time.time()),
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


@dataclass(frozen=True, kw_only=True, slots=True)
class FileProblem:
    """Why the keys file is not in force as it is."""

    text: str
    """For everybody."""
    cause: str
    """For operators: it names the file."""


class KeyRing:
    """The keys of one file in memory. A changed file is read again; one that broke leaves the last good keys."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
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
        """The record of a secret, or None. The comparison takes the same time wherever the secrets differ."""
        self._refresh()
        parts = secret.split("_", 2)
        record = self._records.get(parts[1]) if len(parts) == 3 and parts[0] == _PREFIX else None
        expected = record.digest if record is not None else _digest("")
        return record if hmac.compare_digest(expected, _digest(secret)) else None

    def record(self, key_id: str) -> KeyRecord | None:
        """The key of this id, if it is (still) in the file."""
        self._refresh()
        return self._records.get(key_id)

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
            # A file that was removed admits nobody.
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


def _checked_scopes(scopes: Sequence[str]) -> tuple[str, ...]:
    unknown = sorted(set(scopes) - set(SCOPES))
    if unknown or not scopes:
        raise ValueError(f"unknown scopes {unknown}: a key has some of {', '.join(SCOPES)}")
    return tuple(scope for scope in SCOPES if scope in scopes)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


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
