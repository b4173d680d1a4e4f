"""Conversations on a real broker made older than they are, for tests of what passes in weeks."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from penstock.common import admin
from penstock.common.settings import KafkaSettings
from penstock.common.transport import Transport
from penstock.schemas.codec import default_codec
from penstock.schemas.records import ConversationFacts, ConversationMessage
from penstock.schemas.topics import conversation_key
from support import wait_until
from system import System

CODEC = default_codec()


def make_older(system: System, tenant: str, conversations: Sequence[str], by_s: float) -> None:
    """Write their topics anew, with all records and facts so much earlier. Forks are to be named with their parents.

    The gateways stand still meanwhile: a sweep that saw a topic while it is empty would begin its clock.
    """
    with _gateways_stand_still(system):
        _write_anew(system, tenant, conversations, by_s)


@contextmanager
def _gateways_stand_still(system: System) -> Iterator[None]:
    gateways = [one for one in system.processes if one.command == "gateway" and one.alive()]
    for one in gateways:
        one.popen.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for one in gateways:
            one.popen.send_signal(signal.SIGCONT)


def _write_anew(system: System, tenant: str, conversations: Sequence[str], by_s: float) -> None:
    kafka = KafkaSettings(bootstrap_servers=system.bootstrap, topic_prefix=system.prefix)
    names, by_ms = kafka.names, round(by_s * 1000)
    topics = {names.conversation(tenant, one): one for one in conversations}
    records = {topic: system.read(topic) for topic in topics}
    before = admin.topic_ids(kafka, list(topics))
    for topic in topics:
        admin.delete_topic(kafka, topic)
    wait_until(lambda: not admin.topic_ids(kafka, list(topics)), 30, "the topics are gone")
    for topic in topics:
        admin.create_conversation_topic(kafka, topic)
    wait_until(lambda: len(admin.topic_ids(kafka, list(topics))) == len(topics), 30, "the topics are made")
    after = admin.topic_ids(kafka, list(topics))
    new_ids = {before[topic]: after[topic] for topic in topics}
    transport = Transport(kafka)
    try:
        for topic, found in records.items():
            for one in found:
                transport.send(
                    topic,
                    _with_ids(one.value(), new_ids),
                    key=one.key(),
                    partition=0,
                    timestamp_ms=one.timestamp()[1] - by_ms,
                )
        for facts in _facts_of(system, tenant, conversations):
            older = replace(facts, updated_at=facts.updated_at - by_ms, topic_id=new_ids[facts.topic_id or ""])
            key = conversation_key(tenant, facts.conversation_id).encode()
            transport.send(names.conversation_facts, CODEC.encode(older), key=key, partition=0)
    finally:
        assert transport.close(30) == 0


def _with_ids(value: bytes | None, new_ids: dict[str, str]) -> bytes | None:
    """A fork names the topic that it goes on from."""
    if value is None:
        return None
    message = CODEC.decode(value, ConversationMessage)
    if message.fork is None or message.fork.topic_id not in new_ids:
        return value
    return CODEC.encode(replace(message, fork=replace(message.fork, topic_id=new_ids[message.fork.topic_id])))


def _facts_of(system: System, tenant: str, conversations: Sequence[str]) -> list[ConversationFacts]:
    newest: dict[bytes | None, bytes | None] = {}
    for one in system.read(system.names.conversation_facts):
        newest[one.key()] = one.value()
    found = [CODEC.decode(value, ConversationFacts) for value in newest.values() if value]
    return [one for one in found if one.tenant == tenant and one.conversation_id in conversations]
