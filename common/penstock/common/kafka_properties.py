"""librdkafka's own properties: whether it knows a name and takes a value, asked of the library without a client."""

from __future__ import annotations

import ctypes
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from typing import Any

_DURABLE = (
    "acks",
    "delivery.timeout.ms",
    "enable.idempotence",
    "message.timeout.ms",
    "partitioner",
    "queue.buffering.max.kbytes",
    "queue.buffering.max.messages",
    "request.required.acks",
    "transactional.id",
)
_COMMITS = (
    "auto.offset.reset",
    "enable.auto.commit",
    "enable.auto.offset.store",
    "group.instance.id",
    "group.protocol",
    "heartbeat.interval.ms",
    "isolation.level",
    "max.poll.interval.ms",
    "partition.assignment.strategy",
)
OURS: Mapping[str, str] = {
    "allow.auto.create.topics": "Penstock never creates a topic by naming it",
    "bootstrap.servers": "set kafka.bootstrap_servers",
    "client.id": "set kafka.client_id",
    "group.id": "set the group_id of the process's section",
    "message.max.bytes": "set kafka.max_record_bytes",
    "metadata.broker.list": "set kafka.bootstrap_servers",
    "session.timeout.ms": "set worker.session_timeout_s",
    **dict.fromkeys(_DURABLE, "Penstock sets it, so that acknowledged records are durable and in order"),
    **dict.fromkeys(_COMMITS, "Penstock sets it, so that offsets are committed after their outcomes"),
}
"""Properties that cannot be set under `kafka.security`, each with the reason or what to set instead."""

MECHANISMS = ("GSSAPI", "PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
"""To librdkafka `sasl.mechanism` is any text until a connection is made."""
_TAKEN = 0
_UNKNOWN = -2


@cache
def _library() -> Any:
    """librdkafka as confluent-kafka has loaded it. Raises OSError or AttributeError if its symbols are not visible."""
    from confluent_kafka import cimpl

    library = ctypes.CDLL(cimpl.__file__)
    library.rd_kafka_conf_new.restype = ctypes.c_void_p
    library.rd_kafka_conf_destroy.argtypes = [ctypes.c_void_p]
    text = ctypes.c_char_p
    library.rd_kafka_conf_set.argtypes = [ctypes.c_void_p, text, text, text, ctypes.c_size_t]
    library.rd_kafka_conf_properties_show.argtypes = [ctypes.c_void_p]
    library.rd_kafka_conf_properties_show.restype = None
    return library


@cache
def property_names() -> frozenset[str]:
    """All properties of a client, aliases too. Raises OSError or AttributeError as `_library`."""
    library, libc = _library(), ctypes.CDLL(None)
    libc.fdopen.restype, libc.fclose.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    with tempfile.TemporaryFile() as table:  # the library writes its CONFIGURATION.md to a FILE
        stream = libc.fdopen(os.dup(table.fileno()), b"w")
        library.rd_kafka_conf_properties_show(stream)
        libc.fclose(stream)
        table.seek(0)
        return frozenset(re.findall(r"^([a-z][a-z0-9._]*) +\|", table.read().decode(), re.MULTILINE))


def wrong_properties(security: Mapping[str, str]) -> list[str]:
    """A line for each name that librdkafka does not know or Penstock sets itself, and each value that is not taken.

    Values are shown only for properties that have a fixed set of them. Where the library cannot be asked, a client
    that is made with the properties refuses them.
    """
    lines = [f"{name} cannot be set here: {OURS[name]}" for name in security if name in OURS]
    with suppress(OSError, AttributeError):
        lines += _refused(security)
    return lines


def _refused(security: Mapping[str, str]) -> Iterator[str]:
    library, names = _library(), property_names()
    conf = library.rd_kafka_conf_new()
    reason = ctypes.create_string_buffer(512)
    try:
        for name, value in security.items():
            set_to = library.rd_kafka_conf_set(conf, name.encode(), value.encode(), reason, len(reason))
            if set_to == _UNKNOWN:
                nearest = "".join(f"; the nearest is {near}" for near in get_close_matches(name, names, 1))
                yield f"librdkafka has no property {name}{nearest}"
            elif set_to != _TAKEN:
                yield reason.value.decode(errors="replace").strip()
            elif name in ("sasl.mechanism", "sasl.mechanisms") and value not in MECHANISMS:
                yield f'Invalid value "{value}" for {name}: use one of {", ".join(MECHANISMS)}'
    finally:
        library.rd_kafka_conf_destroy(conf)
