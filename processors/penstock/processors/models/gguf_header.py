"""The header of a GGUF file: its metadata and the number of parameters, without reading weights or needing torch."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from penstock.schemas.errors import InvalidRequest

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LONGEST = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufHeader:
    """`metadata` holds scalars and strings; of arrays only the length, under `<name>.length`."""

    metadata: dict[str, Any]
    parameters: int

    def config(self) -> dict[str, Any]:
        """The fields of a config.json that sizes are computed from."""
        kind = str(self.metadata.get("general.architecture", ""))

        def field(name: str) -> Any:
            return self.metadata.get(f"{kind}.{name}")

        sizes = {
            "num_hidden_layers": field("block_count"),
            "num_attention_heads": field("attention.head_count"),
            "num_key_value_heads": field("attention.head_count_kv"),
            "hidden_size": field("embedding_length"),
            "head_dim": field("attention.key_length"),
            "max_position_embeddings": field("context_length"),
            "vocab_size": field("vocab_size") or self.metadata.get("tokenizer.ggml.tokens.length"),
        }
        return {name: int(value) for name, value in sizes.items() if value is not None}


def read(path: Path) -> GgufHeader:
    """Raises InvalidRequest for what is no GGUF file."""
    try:
        with path.open("rb") as stream:
            return _read(stream)
    except (struct.error, UnicodeDecodeError, KeyError, MemoryError, OverflowError) as error:
        raise InvalidRequest(f"{path} is no readable GGUF file ({type(error).__name__})") from error


def _read(stream: BinaryIO) -> GgufHeader:
    if stream.read(4) != _MAGIC:
        raise InvalidRequest("the file is no GGUF file: its magic is missing")
    _version, tensors, pairs = _take(stream, "IQQ")
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        name = _text(stream)
        (kind,) = _take(stream, "I")
        if kind == _ARRAY:
            metadata[f"{name}.length"] = _skip_array(stream)
        else:
            metadata[name] = _text(stream) if kind == _STRING else _take(stream, _SCALARS[kind])[0]
    parameters = 0
    for _ in range(tensors):
        _text(stream)
        (dimensions,) = _take(stream, "I")
        parameters += math.prod(_take(stream, f"{min(dimensions, 8)}Q"))
        _take(stream, "IQ")  # its type, and where it lies
    return GgufHeader(metadata=metadata, parameters=parameters)


def _take(stream: BinaryIO, layout: str) -> tuple[Any, ...]:
    layout = "<" + layout
    return struct.unpack(layout, stream.read(struct.calcsize(layout)))


def _text(stream: BinaryIO) -> str:
    (length,) = _take(stream, "Q")
    if length > _LONGEST:
        raise OverflowError
    return stream.read(length).decode()


def _skip_array(stream: BinaryIO) -> int:
    kind, length = _take(stream, "IQ")
    if kind == _STRING:
        for _ in range(length):
            (size,) = _take(stream, "Q")
            stream.seek(size, 1)
    elif kind == _ARRAY:
        for _ in range(length):
            _skip_array(stream)
    else:
        stream.seek(length * struct.calcsize("<" + _SCALARS[kind]), 1)
    return length
