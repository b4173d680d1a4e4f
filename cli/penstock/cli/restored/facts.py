"""Titles, metadata and policies of conversations, which name Kafka's id of the conversation's topic.

In another cluster every topic has another id, and gateways ignore facts of another topic.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from penstock.common.shards.addresses import topic_id_of
from penstock.schemas.records import ConversationFacts


def without_ids(facts: Iterable[ConversationFacts], topic_ids: Collection[str]) -> list[ConversationFacts]:
    """The facts to write again, without the id: all, unless one has an id of this cluster. Pure.

    `topic_ids`: of the topics of conversations.
    """
    named = [(one, topic_id_of(one.topic_id)) for one in facts if one.topic_id is not None]
    if any(topic_id in topic_ids for _, topic_id in named):
        return []
    return [replace(one, topic_id=None) for one, _ in named]
