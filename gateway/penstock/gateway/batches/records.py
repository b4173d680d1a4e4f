"""A batch as a value: what was asked, how far it is, and how callers see it. Pure."""

from __future__ import annotations

import dataclasses
import json
import uuid
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, cast

from penstock.common.artifacts.facts import Artifact, is_artifact_id
from penstock.gateway.batches.checking import Part
from penstock.schemas.errors import NotFound
from penstock.schemas.ids import NAMESPACE

Json = dict[str, Any]

WINDOW_S = 86_400
"""`completion_window`: 24 hours, which no request outlives."""
FINAL = frozenset({"completed", "failed", "expired", "cancelled"})


class Stop(StrEnum):
    """Why no further line of a batch is run."""

    CANCELLED = "cancelled"
    EXPIRED = "expired"
    REVOKED = "revoked"
    """The key that made it was taken back."""
    NO_INPUT = "no_input"
    """Its input file is gone."""


NOT_RUN = {
    Stop.CANCELLED: ("batch_cancelled", "This request was not executed because the batch was cancelled."),
    Stop.EXPIRED: (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    Stop.REVOKED: ("batch_cancelled", "This request was not executed because the batch's API key was revoked."),
    Stop.NO_INPUT: ("batch_failed", "This request was not executed because the batch's input file is gone."),
}
"""The error of a line that does not run."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Lines that have ended, and tokens of those that completed."""

    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.completed + other.completed,
            self.failed + other.failed,
            self.input_tokens + other.input_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
        )

    @classmethod
    def of(cls, values: Json) -> Counts:
        return cls(**_known(cls, values))


def _known(kind: type[Any], values: Json) -> Json:
    """Without what a newer version added."""
    names = {one.name for one in dataclasses.fields(kind)}
    return {name: value for name, value in values.items() if name in names}


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Times are seconds since the epoch, as OpenAI has them. Ids of files are those of their artifacts."""

    batch_id: str
    tenant: str
    key_id: str | None
    endpoint: str
    input_file_id: str
    created_ms: int
    expires_at: int
    metadata: dict[str, str] | None = None
    output_ttl_s: int | None = None
    base_url: str = ""
    """Where its maker found the gateway: URLs of images begin with it."""
    status: str = "validating"
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    cancelling_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelled_at: int | None = None
    total: int = 0
    counts: Counts = field(default_factory=Counts)
    errors: tuple[Json, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    parts: tuple[Part, ...] = ()
    in_flight: int = 0
    waiting_for: Json | None = None
    stop: str | None = None
    """A Stop, from `finalizing` on: the writer of the files needs to know which end they belong to."""

    @property
    def is_final(self) -> bool:
        return self.status in FINAL

    @property
    def key(self) -> tuple[str, str]:
        return self.tenant, self.batch_id

    def line_key(self, number: int) -> str:
        """The Idempotency-Key of a line's request: every process that runs the batch asks for the same request."""
        return f"batch/{self.batch_id}/{number}"

    def result_file_id(self, kind: str) -> str:
        """The artifact of its output or error file: a repeat writes over it."""
        return str(uuid.uuid5(NAMESPACE, f"batch\n{self.tenant}\n{self.batch_id}\n{kind}"))

    def ended(self, stop: Stop | None, now_s: int) -> Batch:
        done = replace(self, in_flight=0, waiting_for=None, parts=())
        match stop:
            case None:
                return replace(done, status="completed", completed_at=now_s)
            case Stop.EXPIRED:
                return replace(done, status="expired", expired_at=now_s)
            case Stop.CANCELLED:
                return replace(done, status="cancelled", cancelled_at=now_s)
            case Stop.REVOKED:
                return replace(done, status="cancelled", cancelled_at=now_s, errors=(_error("key_revoked", stop),))
            case Stop.NO_INPUT:
                return replace(done, status="failed", failed_at=now_s, errors=(_error("file_not_found", stop),))

    def cancelling(self, at_s: int) -> Batch:
        """As it is shown from the moment that its end was asked for."""
        return self if self.is_final else replace(self, status="cancelling", cancelling_at=at_s)

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, content: bytes) -> Batch:
        """Written by this version, an older or a newer one."""
        values = _known(cls, cast("Json", json.loads(content)))
        values["counts"] = Counts.of(values.get("counts", {}))
        values["parts"] = tuple(Part(**_known(Part, part)) for part in values.get("parts", ()))
        values["errors"] = tuple(values.get("errors", ()))
        return cls(**values)

    def public(self) -> Json:
        """OpenAI's object. `penstock` says what it waits for."""
        counts = self.counts
        return {
            "id": batch_name(self.batch_id),
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": list(self.errors)} if self.errors else None,
            "input_file_id": file_name(self.input_file_id),
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": None if self.output_file_id is None else file_name(self.output_file_id),
            "error_file_id": None if self.error_file_id is None else file_name(self.error_file_id),
            "created_at": self.created_ms // 1000,
            "in_progress_at": self.in_progress_at,
            "expires_at": self.expires_at,
            "finalizing_at": self.finalizing_at,
            "completed_at": self.completed_at,
            "failed_at": self.failed_at,
            "expired_at": self.expired_at,
            "cancelling_at": self.cancelling_at,
            "cancelled_at": self.cancelled_at,
            "request_counts": {"total": self.total, "completed": counts.completed, "failed": counts.failed},
            "usage": {
                "input_tokens": counts.input_tokens,
                "input_tokens_details": {"cached_tokens": counts.cached_tokens},
                "output_tokens": counts.output_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counts.input_tokens + counts.output_tokens,
            },
            "metadata": self.metadata,
            "penstock": {"in_flight": self.in_flight, "waiting_for": self.waiting_for},
        }


def _error(code: str, stop: Stop) -> Json:
    return {"code": code, "message": NOT_RUN[stop][1], "param": None, "line": None}


# --- ids


def batch_name(batch_id: str) -> str:
    return f"batch_{uuid.UUID(batch_id).hex}"


def file_name(artifact_id: str) -> str:
    return f"file-{uuid.UUID(artifact_id).hex}"


def batch_id_of(name: str) -> str:
    """Raises NotFound for what is no id of a batch."""
    return _uuid_of(name, "batch_", "there is no such batch")


def file_id_of(name: str, param: str = "file_id") -> str:
    """The artifact of a file. Raises NotFound for what is no id of a file."""
    return _uuid_of(name, "file-", "there is no such file", param)


def _uuid_of(name: str, prefix: str, missing: str, param: str | None = None) -> str:
    hexadecimal = name.removeprefix(prefix)
    try:
        found = str(uuid.UUID(hex=hexadecimal))
    except ValueError:
        found = ""
    if not name.startswith(prefix) or len(hexadecimal) != 32 or not is_artifact_id(found):
        raise NotFound(missing, param=param)
    return found


def file_json(artifact: Artifact) -> Json:
    """OpenAI's object of a file."""
    expires = artifact.expires_at_ms
    return {
        "id": file_name(artifact.artifact_id),
        "object": "file",
        "bytes": artifact.size_bytes,
        "created_at": artifact.created_at_ms // 1000,
        "expires_at": None if expires is None else expires // 1000,
        "filename": artifact.filename or artifact.artifact_id,
        "purpose": artifact.purpose,
        "status": "processed",
        "status_details": None,
    }
