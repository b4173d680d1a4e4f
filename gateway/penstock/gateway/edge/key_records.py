"""An API key as the keys file and the topic of keys hold it: made, rotated and changed as a value. No I/O."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from penstock.gateway.limits.limits import NO_LIMITS, Limits
from penstock.schemas.errors import Conflict, InvalidRequest
from penstock.schemas.ids import check_tenant
from penstock.schemas.times import rfc3339
from penstock.schemas.topics import MOST_PRIORITY

SCOPES = ("submit", "read", "cancel", "admin")
DEFAULT_SCOPES = ("submit", "read", "cancel")
MOST_GRACE_S = 30 * 86_400
"""The longest time for which a rotated secret works beside its successor."""
_PREFIX = "pk"


@dataclass(frozen=True, kw_only=True, slots=True)
class FormerSecret:
    """A secret that was rotated."""

    digest: str = field(repr=False)
    until: int
    """It works until then, in seconds since the epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyRecord:
    """One key. `digest` is the SHA-256 of the secret: 256 random bits need no slow hash."""

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
    expires_at: int | None = None
    """The same; None: never."""
    former: tuple[FormerSecret, ...] = ()
    version: int = 0
    """Of a key of the topic: one more with each change. Of two changes of one version the first counts."""
    made_by: str | None = None
    """Id of the key that made it; None for a key of the file."""
    updated_by: str | None = None
    """Id of the key that changed or rotated it last."""

    def __post_init__(self) -> None:
        """Raises InvalidRequest for a bad tenant, ValueError for a bad scope, priority or rate."""
        check_tenant(self.tenant)
        unknown = sorted(set(self.scopes) - set(SCOPES))
        if unknown or not self.scopes:
            raise ValueError(f"unknown scopes {unknown}: a key has some of {', '.join(SCOPES)}")
        if not 0 <= self.max_priority <= MOST_PRIORITY or (self.rate is not None and self.rate <= 0):
            raise ValueError(f"max_priority must be 0 to {MOST_PRIORITY} and rate above 0")

    def matches(self, digest: str, now_s: float) -> bool:
        """Whether this digest is of a secret that works now."""
        digests = [self.digest, *(one.digest for one in self.former if one.until > now_s)]
        return any(hmac.compare_digest(one, digest) for one in digests)

    def is_expired(self, now_s: float) -> bool:
        return self.expires_at is not None and self.expires_at <= now_s

    def is_lasting_admin(self) -> bool:
        return "admin" in self.scopes and self.expires_at is None

    def all_limits(self) -> Limits:
        """Its limits, with `rate` and `max_priority` among them."""
        rate = self.limits.requests_per_s if self.rate is None else self.rate
        most = max(self.max_priority, self.limits.max_priority)
        return dataclasses.replace(self.limits, requests_per_s=rate, max_priority=most)

    def wider_than(self, other: KeyRecord) -> set[str]:
        """In what it gives more than `other`: expiry and limits."""
        wider = self.all_limits().wider_than(other.all_limits())
        if other.expires_at is not None and (self.expires_at is None or self.expires_at > other.expires_at):
            wider.add("expires_at")
        return wider

    def updated(self, by: str | None) -> KeyRecord:
        """Its next version."""
        return dataclasses.replace(self, version=self.version + 1, updated_by=by)

    def rotated(self, grace_s: float, now_s: float) -> tuple[KeyRecord, str]:
        """The key with a new secret, and that secret; the old one works for `grace_s` more.

        Raises ValueError for a wrong `grace_s`, Conflict for a key that has expired.
        """
        if self.is_expired(now_s):
            raise Conflict(f"the key {self.key_id} has expired: give it a later expires_at first, or make another key")
        if not 0 <= grace_s <= MOST_GRACE_S:
            raise ValueError(f"grace_s must be 0 to {MOST_GRACE_S}")
        secret = _new_secret(self.key_id)
        last = FormerSecret(digest=self.digest, until=round(now_s + grace_s))
        former = (*(one for one in self.former if one.until > now_s), last) if grace_s else ()
        return dataclasses.replace(self, digest=digest_of(secret), former=former), secret

    def changed(self, fields: Mapping[str, Any]) -> KeyRecord:
        """The key with other rights: the `fields` of the entry that KeyRights has. Raises ValueError."""
        return KeyRecord.from_dict({**self.to_dict(), **fields})

    def to_dict(self) -> dict[str, Any]:
        """Its entry in the keys file, with its hashes."""
        entry: dict[str, Any] = {
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
        if self.expires_at is not None:
            entry["expires_at"] = self.expires_at
        if self.former:
            entry["former"] = [{"sha256": one.digest, "until": one.until} for one in self.former]
        if self.version:
            entry |= {"version": self.version, "made_by": self.made_by, "updated_by": self.updated_by}
        return entry

    def to_json(self, source: str) -> dict[str, Any]:
        """The key as operators see it, without its hashes. `source`: file or topic."""
        shown = {
            **self.to_dict(),
            "limits": self.limits.to_dict(),
            "created_at": rfc3339(self.created_at * 1000),
            "expires_at": None if self.expires_at is None else rfc3339(self.expires_at * 1000),
            "former_until": [rfc3339(one.until * 1000) for one in self.former],
            "made_by": self.made_by,
            "updated_by": self.updated_by,
            "source": source,
        }
        hidden = ("sha256", "former", "version")
        return {"object": "key", **{name: value for name, value in shown.items() if name not in hidden}}

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> KeyRecord:
        rate, expires_at = entry.get("rate"), entry.get("expires_at")
        scopes = [str(scope) for scope in entry.get("scopes", DEFAULT_SCOPES)]
        former = cast("Sequence[Mapping[str, Any]]", entry.get("former") or ())
        return cls(
            key_id=str(entry["id"]),
            digest=str(entry["sha256"]),
            tenant=str(entry["tenant"]),
            scopes=in_order(scopes),
            max_priority=int(entry.get("max_priority", 0)),
            rate=None if rate is None else float(rate),
            limits=Limits.from_dict(cast("Mapping[str, Any]", entry.get("limits") or {})),
            name=entry.get("name"),
            created_at=int(entry.get("created_at", 0)),
            expires_at=None if expires_at is None else int(expires_at),
            former=tuple(FormerSecret(digest=str(one["sha256"]), until=int(one["until"])) for one in former),
            version=int(entry.get("version", 0)),
            made_by=entry.get("made_by"),
            updated_by=entry.get("updated_by"),
        )


def new_key(now_s: float, **fields: Any) -> tuple[KeyRecord, str]:
    """A key with these `fields` of an entry, and its secret.

    Raises InvalidRequest, ValueError, also for a time that has passed.
    """
    key_id = secrets.token_hex(6)
    secret = _new_secret(key_id)
    entry = {**fields, "id": key_id, "sha256": digest_of(secret), "created_at": int(now_s)}
    record = KeyRecord.from_dict(entry)
    if record.is_expired(now_s):
        raise InvalidRequest("expires_at has passed: this key would never work", param="expires_at")
    return record, secret


def in_order(scopes: Sequence[str]) -> tuple[str, ...]:
    """Known scopes in their order, then the others."""
    return tuple(dict.fromkeys([*(one for one in SCOPES if one in scopes), *scopes]))


def id_of(secret: str) -> str | None:
    """The id of the key that a secret is of, as it says."""
    parts = secret.split("_", 2)
    return parts[1] if len(parts) == 3 and parts[0] == _PREFIX else None


def digest_of(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def _new_secret(key_id: str) -> str:
    return f"{_PREFIX}_{key_id}_{secrets.token_urlsafe(32)}"
