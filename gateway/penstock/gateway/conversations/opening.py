"""Which layout the topics of an installation have: the one that was chosen when they were created."""

from __future__ import annotations

from collections.abc import Callable

from penstock.common import admin
from penstock.common.shards.shard_copy import ShardCopy
from penstock.common.transport import Transport
from penstock.gateway.conversations.layout import Layout
from penstock.gateway.conversations.shared import SharedTopic
from penstock.gateway.conversations.topics import OwnTopics
from penstock.gateway.settings import GatewaySettings
from penstock.schemas.codec import Codec


def open_layout(
    settings: GatewaySettings, transport: Transport, codec: Codec, on_failure: Callable[[str], object]
) -> Layout:
    """Blocks. The copy of a shared topic lies beside the view; `on_failure` is called, on any thread, when it is not
    followed any more. Raises BrokerUnavailable, Overloaded."""
    kafka = settings.kafka_settings()
    if admin.topic_id(kafka, kafka.names.conversation_log) is None:
        return OwnTopics(settings)
    view = settings.gateway.view_path
    copy = ShardCopy(kafka, view.with_name(f"{view.name}.conversations"))
    copy.on_failure = on_failure
    return SharedTopic(copy, transport, kafka.names, codec)
