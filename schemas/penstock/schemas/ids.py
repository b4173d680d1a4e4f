"""Identifiers: how they are made, and which are allowed."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Iterable

from penstock.schemas.errors import InvalidRequest

NAMESPACE = uuid.UUID("6f1a1e0c-52a9-5d0e-9c54-504e53544b31")
"""Penstock's own UUIDv5 namespace; it never changes, or repeats would not find their first request."""

DEFAULT_TENANT = "default"
_NAMESPACE_BYTES = NAMESPACE.bytes
_VARIANTS = {digit: "89ab"[int(digit, 16) & 3] for digit in "0123456789abcdef"}
_CONVERSATION_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_TENANT = re.compile(r"[a-z0-9-]{1,63}")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def new_request_id() -> str:
    return str(uuid.uuid4())


def derived_request_id(topic: str, partition: int, offset: int, append_time_ms: int) -> str:
    """The id of a JSON record that came without one: the same in worker and gateway."""
    return _uuid5(f"record\n{topic}\n{partition}\n{offset}\n{append_time_ms}".encode())


def _uuid5(name: bytes) -> str:
    """The same as uuid.uuid5, in a third of its time: there is one for every JSON record and every line of a batch."""
    digest = hashlib.sha1(_NAMESPACE_BYTES + name, usedforsecurity=False).hexdigest()
    variant = _VARIANTS[digest[16]]
    return f"{digest[:8]}-{digest[8:12]}-5{digest[13:16]}-{variant}{digest[17:20]}-{digest[20:32]}"


def output_artifact_id(tenant: str, request_id: str, epoch: int, attempt: int, part: str | None = None) -> str:
    """The artifact of one attempt's output: a repeat writes over it and leaves no second one.

    `part`: which of several, as the number of an image.
    """
    name = f"output\n{tenant}\n{request_id}\n{epoch}\n{attempt}"
    return str(uuid.uuid5(NAMESPACE, name if part is None else f"{name}\n{part}"))


def input_artifact_id(tenant: str, sha256: str) -> str:
    """The artifact of bytes that came with a request: the same bytes are the same artifact of their tenant."""
    return str(uuid.uuid5(NAMESPACE, f"input\n{tenant}\n{sha256}"))


def idempotent_request_id(tenant: str, key: str) -> str:
    """The id that an Idempotency-Key stands for within its tenant. Raises InvalidRequest for what is not Unicode."""
    try:
        return _uuid5(f"idempotency\n{tenant}\n{key}".encode())
    except UnicodeEncodeError:  # half a surrogate pair, which JSON's escapes can carry
        raise InvalidRequest("the idempotency key is not Unicode", param="idempotency_key") from None


def summary_request_id(topic_id: str, base: int, offsets: Iterable[int]) -> str:
    """The request that sums up a span of a conversation: the same for all who find it due.

    `topic_id`: Kafka's id of the conversation's topic. `base`: the offset of the summary before it, -1 without one.
    `offsets`: of the messages in it. What is summed up again because one of them was erased is another request.
    """
    return str(uuid.uuid5(NAMESPACE, f"summary\n{topic_id}\n{base}\n{','.join(map(str, offsets))}"))


def redriven_request_id(tenant: str, request_id: str, origin: str, times: int) -> str:
    """The request that a dead letter is run again as. `times`: how often it was before, for one that is run again."""
    return str(uuid.uuid5(NAMESPACE, f"redriven\n{tenant}\n{request_id}\n{origin}\n{times}"))


def is_derived_id(request_id: str) -> bool:
    """Whether an id has the form of those above (UUID version 5)."""
    return len(request_id) == 36 and request_id[14] == "5"


def check_conversation_id(value: object, param: str = "conversation_id") -> str:
    """The id as text (integers are accepted). Raises InvalidRequest."""
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(text, str) or not _CONVERSATION_ID.fullmatch(text):
        raise InvalidRequest(f"{param} must match [A-Za-z0-9_-]{{1,128}}", param=param)
    return text


def check_tenant(value: object) -> str:
    """Raises InvalidRequest."""
    if not isinstance(value, str) or not _TENANT.fullmatch(value):
        raise InvalidRequest("tenant must match [a-z0-9-]{1,63}", param="tenant")
    return value


def check_request_id(value: object) -> str:
    """Raises InvalidRequest."""
    if not isinstance(value, str) or not _REQUEST_ID.fullmatch(value):
        raise InvalidRequest("request_id must match [A-Za-z0-9._:-]{1,128}", param="request_id")
    return value


def is_conversation_id(text: str) -> bool:
    return _CONVERSATION_ID.fullmatch(text) is not None


def is_tenant(text: str) -> bool:
    return text == DEFAULT_TENANT or _TENANT.fullmatch(text) is not None


def is_request_id(text: str) -> bool:
    return _REQUEST_ID.fullmatch(text) is not None
