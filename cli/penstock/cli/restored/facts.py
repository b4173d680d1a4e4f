"""Titles, metadata and policies of conversations, which name Kafka's id of the conversation's topic.

In another cluster every topic has another id, and gateways ignore facts of another topic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from penstock.common.shards.addresses import is_shared, topic_id_of
from penstock.schemas.records import ConversationFacts
from penstock.schemas.topics import TopicNames


def without_ids(
    facts: Iterable[ConversationFacts], topic_ids: Mapping[str, str], names: TopicNames
) -> list[ConversationFacts]:
    """The facts to write again, without the id: those of another cluster whose topic is there. Pure.

    `topic_ids`: of the topics of conversations, by name.
    """
    here = set(topic_ids.values())
    return [
        replace(one, topic_id=None)
        for one in facts
        if one.topic_id is not None and topic_id_of(one.topic_id) not in here and _topic_of(one, names) in topic_ids
    ]


def _topic_of(facts: ConversationFacts, names: TopicNames) -> str:
    if is_shared(facts.topic_id):
        return names.conversation_log
    return names.conversation(facts.tenant, facts.conversation_id)
