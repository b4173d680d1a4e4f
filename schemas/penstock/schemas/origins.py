"""The header that carries a record's first place when it is appended again elsewhere. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.schemas.ids import derived_request_id
from penstock.schemas.records import Origin
from penstock.schemas.topics import HEADER_ORIGIN

MAX_BYTES = 320
"""A topic's name has at most 249 bytes; what is longer is no origin of ours, and would be in every event."""


def origin_header(origin: Origin) -> tuple[str, bytes]:
    return HEADER_ORIGIN, f"{origin.topic}/{origin.partition}/{origin.offset}/{origin.append_time_ms}".encode()


def first_place(headers: Sequence[tuple[str, bytes | None]], place: Origin) -> Origin:
    """Where the first record of the request stood: as the header says, else this place."""
    origin = place
    for name, value in headers:
        if name == HEADER_ORIGIN and value is not None and len(value) <= MAX_BYTES:
            try:
                topic, partition, offset, append_ms = value.decode().rsplit("/", 3)
                origin = Origin(
                    topic=topic,
                    partition=number_in(partition, 0, 2**31 - 1),
                    offset=number_in(offset, 0, 2**63 - 1),
                    append_time_ms=number_in(append_ms, 0, 2**63 - 1),
                )
            except ValueError:
                continue
    return origin


def made_up_id(origin: Origin) -> str:
    """The id of a JSON record that came without one."""
    return derived_request_id(origin.topic, origin.partition, origin.offset, origin.append_time_ms)


def number_in(value: bytes | str, low: int, high: int) -> int:
    """Raises ValueError for what is no number from `low` to `high`."""
    if len(value) > 20 or not low <= (number := int(value)) <= high:
        raise ValueError("out of range")
    return number
