"""Data folders that older releases wrote, unpacked as if those had been stopped a moment ago."""

from __future__ import annotations

import json
import re
import struct
import tarfile
import time
from pathlib import Path
from typing import Any

from aiokafka.record.util import calc_crc32c

from penstock.schemas.codec import released_schema

_BATCH = struct.Struct(">qiiBI")
"""Of a record batch: base offset, length behind these two, leader epoch, magic, checksum of all that follows."""
_LENGTH_AT = 12
_FIXED = re.compile(rb"(?=(\0\0\x01.{5}))", re.DOTALL)
_VARIABLE = re.compile(rb"(?=([\x80-\xff]{5}[\x01-\x7f]))")
"""Where a time of these years may stand, in milliseconds."""


def unpack(archive: Path, into: Path) -> tuple[Path, dict[str, Any]]:
    """The data folder with all its times moved to now, and what its maker noted of it.

    Otherwise retention would delete the records, and what waits would be past its deadline.
    """
    with tarfile.open(archive) as file:
        # Python 3.11.2, which Debian 12 has, takes no `filter=`.
        file.extraction_filter = getattr(tarfile, "data_filter", None)
        file.extractall(into)
    data = into / "data"
    notes: dict[str, Any] = json.loads((data / "notes.json").read_text())
    move = _Times(notes["began_ms"], notes["ended_ms"])
    for log in data.glob("kafka/topics/*/*.log"):
        log.write_bytes(_moved_log(log.read_bytes(), move))
    for index in data.glob("kafka/topics/*/*.timeindex"):
        index.unlink()  # the broker builds them anew
    for facts in data.glob("artifacts/**/*.json"):
        facts.write_text(move.text(facts.read_text()))
    return data, notes


def schema_ids(data: Path) -> set[int]:
    """The ids of Penstock's own schemas that records in the folder have, by the header of an encoded record."""
    found: set[int] = set()
    for log in data.glob("kafka/topics/*/*.log"):
        found |= {int.from_bytes(one, "big") for one in re.findall(rb"\0(PN..)", log.read_bytes(), re.DOTALL)}
    return {one for one in found if released_schema(one) is not None}


class _Times:
    """Moves each time that lies within the making of the folder."""

    def __init__(self, began_ms: int, ended_ms: int) -> None:
        self._span = range(began_ms, ended_ms + 1)
        self._by_ms = int(time.time() * 1000) - ended_ms

    def binary(self, data: bytearray) -> None:
        """Eight bytes, as batches have them and the coordinator's records; and the variable lengths of Avro."""
        for found in _FIXED.finditer(bytes(data)):
            if (at_ms := int.from_bytes(found[1], "big")) in self._span:
                struct.pack_into(">q", data, found.start(), at_ms + self._by_ms)
        for found in _VARIABLE.finditer(bytes(data)):
            doubled = sum((byte & 0x7F) << (7 * place) for place, byte in enumerate(found[1]))
            if doubled // 2 in self._span and doubled % 2 == 0:
                moved = doubled + 2 * self._by_ms
                data[found.start() : found.start() + 6] = bytes(
                    (moved >> (7 * place)) & 0x7F | (0x80 if place < 5 else 0) for place in range(6)
                )

    def text(self, text: str) -> str:
        """Times to come (`expires_at_ms`) as well."""
        return re.sub(r"(?<=_ms\": )\d{13}", lambda found: str(int(found[0]) + self._by_ms), text)


def _moved_log(log: bytes, move: _Times) -> bytes:
    moved, at = bytearray(), 0
    while at < len(log):
        base, length, epoch, magic, _ = _BATCH.unpack_from(log, at)
        assert magic == 2, f"a batch of format {magic}"
        body = bytearray(log[at + _BATCH.size : at + _LENGTH_AT + length])
        assert not body[1] & 7, "a compressed batch"
        move.binary(body)
        moved += _BATCH.pack(base, length, epoch, magic, calc_crc32c(bytes(body))) + body
        at += _LENGTH_AT + length
    return bytes(moved)
