"""Which facts of conversations are written again after their topics came from another cluster."""

from __future__ import annotations

import pytest

from kit.records import NAMES
from penstock.cli.restored.reconcile import without_ids
from penstock.common.shards.addresses import id_of
from penstock.schemas.records import ConversationFacts

TOPIC_IDS = {NAMES.conversation("default", "c"): "here", NAMES.conversation_log: "shared"}


def facts(conversation_id: str, topic_id: str | None) -> ConversationFacts:
    return ConversationFacts(
        tenant="default", conversation_id=conversation_id, updated_at=1, topic_id=topic_id, title="Talk"
    )


@pytest.mark.parametrize(
    ("conversation_id", "topic_id", "is_written"),
    [
        ("c", "elsewhere", True),
        ("c", "here", False),
        ("c", None, False),
        ("gone", "elsewhere", False),
        ("in-shared", id_of("elsewhere", 0, 5), True),
        ("in-shared", id_of("shared", 0, 5), False),
    ],
)
def test_facts_of_another_cluster_are_written_where_their_topic_is_there(
    conversation_id: str, topic_id: str | None, is_written: bool
) -> None:
    """Each by itself: a gateway that has run meanwhile has written some that name topics of this cluster."""
    one, other = facts(conversation_id, topic_id), facts("c", "here")
    expected = [facts(conversation_id, None)] if is_written else []
    assert without_ids([one, other], TOPIC_IDS, NAMES) == expected
