"""What the summarizer is told of conversations that share a topic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from penstock.common.reader import RawMessage
from penstock.common.settings import KafkaSettings
from penstock.common.shards.shard_file import ShardFile
from penstock.gateway.summarizer.desk import Key
from penstock.gateway.summarizer.shared_topic import SharedTopic
from penstock.gateway.summarizer.sources import REACHED
from penstock.schemas.codec import default_codec

FOLLOWED, OTHER = Key("default", "c"), Key("default", "d")


def test_the_end_is_told_also_where_the_last_record_cannot_be_decoded(tmp_path: Path) -> None:
    with closing(ShardFile(tmp_path / "f", "id", 1)) as file:

        def call(action: Callable[[], object]) -> None:
            action()

        told: list[RawMessage] = []
        copy = SimpleNamespace(file=file, call=call, partitions=1, topic_id="id")
        source = SharedTopic(KafkaSettings(), default_codec(), cast(Any, copy), told.extend)
        records: Sequence[RawMessage] = [
            RawMessage("t", 0, offset, 9, key, b"nobody can read this")
            for offset, key in enumerate((b"c/fork/1", b"d/fork/2", b"c/r/in/0/0"))
        ]
        file.apply(records, {0: 3}, 9)
        source.begin({FOLLOWED: 0})
        assert [one.offset for one in told] == [0, 2]
        told.clear()
        source.mark({FOLLOWED: 7, OTHER: 7, Key("default", "gone"): 7})
        assert [(one.topic, one.offset, one.timestamp_ms) for one in told] == [("conversation.c", 3, 7)]
        assert told[0].headers is REACHED
