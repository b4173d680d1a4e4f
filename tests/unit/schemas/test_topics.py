"""Names, keys and the partitioner, held against what Java's client and the contract say."""

from __future__ import annotations

import pytest

from penstock.schemas.records import InferenceRequest
from penstock.schemas.topics import (
    HORIZON_MS,
    TopicNames,
    conversation_key,
    conversation_topic_config,
    murmur2,
    partition_for,
    priority_class,
    request_key,
    topic_specs,
)


@pytest.mark.parametrize(
    ("key", "hashed"),
    [
        ("21", -973932308),
        ("foobar", -790332482),
        ("a-little-bit-long-string", -985981536),
        ("a-little-bit-longer-string", -1486304829),
        ("lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        ("abc", 479470107),
    ],
)
def test_murmur2_as_java_has_it(key: str, hashed: int) -> None:
    assert murmur2(key.encode()) == hashed & 0xFFFFFFFF
    assert partition_for(key.encode(), 7) == (hashed & 0x7FFFFFFF) % 7


@pytest.mark.parametrize(
    ("priority", "klass"), [(0, "high"), (3, "high"), (4, "medium"), (7, "medium"), (8, "low"), (1000, "low")]
)
def test_classes(priority: int, klass: str) -> None:
    assert priority_class(priority) == klass
    assert TopicNames().request("text_generation", priority) == f"inference.request.{klass}"
    assert TopicNames().class_of_topic(f"inference.request.{klass}") == klass


@pytest.mark.parametrize("prefix", ["", "dev-", "team.a."])
def test_names(prefix: str) -> None:
    names = TopicNames(prefix)
    assert names.request("embedding", 0) == prefix + "inference.embedding.request"
    assert names.request("image_generation", 9) == prefix + "inference.image.request"
    assert names.request("summarization", 9, "gpu") == prefix + "inference.request.low.gpu"
    assert names.request_topics("gpu") == [f"{topic}.gpu" for topic in names.request_topics()]
    assert names.text_topics() == names.request_topics()[:3]
    for topic in [*names.request_topics(), *names.request_topics("gpu")]:
        assert names.is_request_topic(topic)
    others = [names.result, names.status, names.control, names.dlq, names.desired, names.model, names.worker]
    for topic in [*others, names.retry("1s"), names.conversation("default", "c")]:
        assert topic.startswith(prefix)
        assert not names.is_request_topic(topic)
        assert names.class_of_topic(topic) is None
    assert names.class_of_topic(names.request("text_generation", 0, "gpu")) == "high"
    assert names.class_of_topic(names.request("embedding", 0)) is None
    assert not TopicNames("else-").is_request_topic(names.request("embedding", 0))


@pytest.mark.parametrize("prefix", ["", "dev-", "team.a."])
@pytest.mark.parametrize(("tenant", "name"), [("default", "conversation.c-1"), ("acme", "conversations.acme.c-1")])
def test_conversation_topics(prefix: str, tenant: str, name: str) -> None:
    names = TopicNames(prefix)
    assert names.conversation(tenant, "c-1") == prefix + name
    assert names.parse_conversation(prefix + name) == (tenant, "c-1")
    for other in (names.result, prefix + "conversation", "x" + prefix + name, prefix + "conversation.a.b.c"):
        assert names.parse_conversation(other) is None


def test_keys() -> None:
    assert conversation_key("default", "c") == "c"
    assert conversation_key("acme", "c") == "acme.c"
    turn = InferenceRequest(
        request_id="r", task="text_generation", tenant="acme", conversation_id="c", text_generation={}, created_at=1
    )
    assert request_key(turn) == b"acme.c"
    assert request_key(InferenceRequest(request_id="r", task="text_generation", created_at=1)) == b"r"
    assert request_key(InferenceRequest(request_id="r", task="embedding", conversation_id="c", created_at=1)) == b"r"


@pytest.mark.parametrize("brokers", [1, 3])
def test_every_topic_has_a_specification(brokers: int) -> None:
    names = TopicNames("p-")
    specs = {spec.name: spec for spec in topic_specs(names, partitions=6, brokers=brokers)}
    assert len(specs) == 5 + 4 + 13
    assert specs[names.delivery].partitions == specs[names.result].partitions, "n tells of n"
    for topic in names.request_topics():
        assert specs[topic].partitions == 6
        assert specs[topic].config["message.timestamp.type"] == "LogAppendTime"
    assert specs[names.control].config["message.timestamp.type"] == "LogAppendTime", "compared with them"
    assert specs[names.control].partitions == 1
    assert specs[names.model].config["cleanup.policy"] == "compact"
    for spec in specs.values():
        assert spec.replication == (3 if brokers == 3 else 1)
        assert (spec.config.get("min.insync.replicas") == "2") == (brokers == 3)
        assert "flush.messages" not in spec.config
        if "retention.ms" in spec.config and spec.name != names.worker:
            assert int(spec.config["retention.ms"]) > HORIZON_MS


def test_one_broker_can_be_made_durable() -> None:
    specs = {spec.name: spec for spec in topic_specs(TopicNames(), durability="fsync")}
    assert specs["inference.request.high"].config["flush.messages"] == "1"
    assert specs["inference.result"].config["flush.messages"] == "1"
    assert "flush.messages" not in specs["inference.status"].config
    assert conversation_topic_config(durability="fsync") == {"cleanup.policy": "compact", "flush.messages": "1"}


def test_a_pool_has_request_topics_only() -> None:
    names = TopicNames()
    assert [spec.name for spec in topic_specs(names, pool="gpu")] == names.request_topics("gpu")
