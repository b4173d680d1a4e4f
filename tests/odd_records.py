"""A producer that writes what no well-behaved client writes: header names of any bytes, null values, all codecs.

It calls the librdkafka that confluent_kafka brings along, because its Python interface takes only text as names.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import confluent_kafka

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
PRODUCER = 0
COPY = 0x2
TOPIC, PARTITION, VALUE, KEY, FLAGS, TIMESTAMP, HEADERS = 1, 3, 4, 5, 7, 8, 10
OddHeaders = Sequence[tuple[bytes, bytes | None]]


class _Memory(ctypes.Structure):
    _fields_ = (("pointer", ctypes.c_void_p), ("size", ctypes.c_size_t))


class _Content(ctypes.Union):
    _fields_ = (
        ("text", ctypes.c_char_p),
        ("int32", ctypes.c_int32),
        ("int64", ctypes.c_int64),
        ("memory", _Memory),
        ("pointer", ctypes.c_void_p),
        ("padding", ctypes.c_char * 64),
    )


class _Argument(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("content", _Content))


class _Message(ctypes.Structure):
    _fields_ = (("error", ctypes.c_int),)  # the rest is not looked at


_Delivered = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(_Message), ctypes.c_void_p)


def _library() -> Any:
    package = Path(confluent_kafka.__file__).parent
    places = (package.parent / "confluent_kafka.libs", package / ".dylibs")
    (path,) = [found for place in places for found in place.glob("librdkafka*") if "++" not in found.name]
    library = ctypes.CDLL(str(path))
    for name in ("conf_new", "new", "headers_new", "produceva", "error_string"):
        getattr(library, f"rd_kafka_{name}").restype = ctypes.c_void_p
    library.rd_kafka_error_string.restype = library.rd_kafka_err2str.restype = ctypes.c_char_p
    return library


class OddProducer:
    """`send` takes everything as bytes; leaving the `with` block waits until the broker has it all."""

    def __init__(self, bootstrap_servers: str, **settings: str) -> None:
        self._library = _library()
        conf = ctypes.c_void_p(self._library.rd_kafka_conf_new())
        reason = ctypes.create_string_buffer(512)
        wanted = {"bootstrap.servers": bootstrap_servers, "linger.ms": "5", "message.max.bytes": "1000000"}
        for name, value in (wanted | {k.replace("_", "."): v for k, v in settings.items()}).items():
            assert self._library.rd_kafka_conf_set(conf, name.encode(), value.encode(), reason, 512) == 0, reason.value
        self._errors: list[int] = []
        self._delivered = _Delivered(lambda _, message, __: self._errors.append(message.contents.error))
        self._library.rd_kafka_conf_set_dr_msg_cb(conf, self._delivered)
        self._client = ctypes.c_void_p(self._library.rd_kafka_new(PRODUCER, conf, reason, ctypes.c_size_t(512)))
        assert self._client, reason.value

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._library.rd_kafka_flush(self._client, 30_000)
        left = self._library.rd_kafka_outq_len(self._client)
        self._library.rd_kafka_destroy(self._client)
        assert left == 0, f"{left} records were not acknowledged"
        refused = {self._library.rd_kafka_err2str(code).decode() for code in self._errors if code}
        assert not refused, f"the broker refused records: {refused}"

    def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int = 0,
        headers: OddHeaders = (),
        timestamp_ms: int = 0,
    ) -> None:
        arguments = (_Argument * 7)()
        arguments[0].kind, arguments[0].content.text = TOPIC, topic.encode()
        arguments[1].kind, arguments[1].content.int32 = PARTITION, partition
        arguments[2].kind, arguments[2].content.memory = VALUE, _memory(value)
        arguments[3].kind, arguments[3].content.memory = KEY, _memory(key)
        arguments[4].kind, arguments[4].content.int32 = FLAGS, COPY
        arguments[5].kind, arguments[5].content.int64 = TIMESTAMP, timestamp_ms
        arguments[6].kind, arguments[6].content.pointer = HEADERS, self._headers(headers)
        error = self._library.rd_kafka_produceva(self._client, arguments, ctypes.c_size_t(7))
        assert not error, self._library.rd_kafka_error_string(ctypes.c_void_p(error))

    def _headers(self, headers: OddHeaders) -> int:
        made: int = self._library.rd_kafka_headers_new(ctypes.c_size_t(len(headers)))
        for name, value in headers:
            size = ctypes.c_ssize_t(len(name))
            content = (value, ctypes.c_ssize_t(0 if value is None else len(value)))
            assert self._library.rd_kafka_header_add(ctypes.c_void_p(made), name, size, *content) == 0
        return made


def _memory(content: bytes | None) -> _Memory:
    return _Memory(None, 0) if content is None else _Memory(ctypes.cast(content, ctypes.c_void_p), len(content))


def write_odd_records(
    bootstrap_servers: str, places: Sequence[tuple[str, int]], count: int, seed: int, *, keyed: bool = False
) -> None:
    """Write `count` records of random bytes of every kind to each place, with every codec, from one seed.

    A compacted topic takes only records with a key: `keyed`.
    """
    random_ = random.Random(seed)
    for codec in CODECS:
        with OddProducer(bootstrap_servers, compression_codec=codec) as producer:
            for topic, partition in places:
                for _ in range(max(1, count // len(CODECS))):
                    _write_one(producer, random_, topic, partition, keyed)


def _write_one(producer: OddProducer, random_: random.Random, topic: str, partition: int, keyed: bool) -> None:
    size = 900_000 if random_.random() < 0.005 else random_.choice((0, 1, 30, 300))
    value = None if random_.random() < 0.1 else random_.randbytes(size)
    if value and random_.random() < 0.3:  # what a decoder would look into: JSON, or the Confluent format's first byte
        value = random_.choice((b"{", b"\0", b"\0PN\0\0")) + value
    names = (b"", b"\xff", b"a", b"\0", b"a\0b", "é".encode(), b"\xed\xa0\x80", b"penstock-origin", b"penstock-attempt")
    headers = [
        (
            random_.choice((*names, random_.randbytes(random_.randint(0, 20)))),
            None if random_.random() < 0.2 else random_.randbytes(random_.randint(0, 20)),
        )
        for _ in range(random_.choice((0, 0, 1, 2, 30)))
    ]
    key = None if not keyed and random_.random() < 0.3 else random_.randbytes(random_.choice((0, 1, 40)))
    times = (0, 1, 1_000, 1_700_000_000_000)
    producer.send(topic, value, key=key, partition=partition, headers=headers, timestamp_ms=random_.choice(times))
