"""Which records of a partition a replay shows, whose they are, and what has to be looked at before. Pure.

A partition is that of one conversation's topic, or one of the topic that all share. Either way a tombstone further on
erases what has its key. In the shared topic, a record belongs to a conversation only from a head of it on that has no
tombstone: so the whole partition is looked through for heads and tombstones before any record is shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Protocol

from penstock.common.reader import RawMessage
from penstock.common.shards.addresses import HEAD, split_key
from penstock.common.shards.heads import Heads
from penstock.producers.replay_plan import Erasures, Range
from penstock.schemas.topics import conversation_of_key


class PartitionRecords(Protocol):
    """What was looked at of one partition. `looked_to`: all that matters below this offset was looked at."""

    looked_to: int

    @property
    def note(self) -> str:
        """What a kept position is worth only with; empty: nothing."""
        ...

    def begin(self, position: int) -> None:
        """Look again, for records from `position` on."""
        ...

    def unlooked(self, goal: int) -> Range | None:
        """What has to be looked through before a record below `goal` is read; None: nothing."""
        ...

    def matters(self, key: bytes | None, value: bytes | None) -> bool:
        """Whether a record says what others are worth."""
        ...

    def look(self, records: Iterable[RawMessage], through: int) -> None:
        """Note what the records say, in log order; all that matters below `through` is looked at then."""
        ...

    def shown(self, record: RawMessage) -> tuple[str, RawMessage] | None:
        """The conversation's id and the record with its own key; None for one that is not to be seen."""
        ...

    def forget(self, position: int) -> None:
        """Everything before `position` was taken."""
        ...


class OwnTopicRecords:
    """Of a topic that holds one conversation. All of its records are shown but those that are erased."""

    note = ""

    def __init__(self, conversation_id: str) -> None:
        self._id = conversation_id
        self.begin(0)

    def begin(self, position: int) -> None:
        self.looked_to = position
        self._erasures = Erasures()

    def unlooked(self, goal: int) -> Range | None:
        del goal  # the tombstones behind a window are looked for with it: a topic of its own is short
        return None

    def matters(self, key: bytes | None, value: bytes | None) -> bool:
        del key
        return value is None

    def look(self, records: Iterable[RawMessage], through: int) -> None:
        for record in records:
            if record.value is None:
                self._erasures.add(record.key or b"", record.offset)
        self.looked_to = max(self.looked_to, through)

    def shown(self, record: RawMessage) -> tuple[str, RawMessage] | None:
        if record.value is not None and self._erasures.erase(record.key or b"", record.offset):
            return None
        return self._id, record

    def forget(self, position: int) -> None:
        self.begin(position)


class SharedTopicRecords:
    """Of a partition with conversations of all tenants: those of one tenant whose ids match a glob are shown."""

    def __init__(self, tenant: str, pattern: str) -> None:
        self._tenant, self._pattern = tenant, pattern
        self.begin(0)

    @property
    def note(self) -> str:
        return json.dumps([self._tenant, self._pattern])

    def begin(self, position: int) -> None:
        del position  # heads are before it
        self.looked_to = 0
        self._heads = Heads()
        self._erasures = Erasures()

    def unlooked(self, goal: int) -> Range | None:
        return (self.looked_to, goal) if self.looked_to < goal else None

    def matters(self, key: bytes | None, value: bytes | None) -> bool:
        return (value is None or b"/" + HEAD in (key or b"")) and self._split(key) is not None

    def look(self, records: Iterable[RawMessage], through: int) -> None:
        for record in records:
            # A head that is noted once more would be there again behind its tombstone.
            if record.offset < self.looked_to or (split := self._split(record.key)) is None:
                continue
            conversation, _, key = split
            if key.startswith(HEAD):
                self._heads.apply(conversation, key, record.offset, is_tombstone=record.value is None)
            if record.value is None:
                self._erasures.add(record.key or b"", record.offset)
        self.looked_to = max(self.looked_to, through)

    def shown(self, record: RawMessage) -> tuple[str, RawMessage] | None:
        if (split := self._split(record.key)) is None:
            return None
        conversation, conversation_id, key = split
        head = self._heads.first(conversation)
        if head is None or record.offset < head:
            return None
        if record.value is not None and self._erasures.erase(record.key or b"", record.offset):
            return None
        return conversation_id, replace(record, key=key)

    def forget(self, position: int) -> None:
        self._erasures.drop_before(position)

    def _split(self, key: bytes | None) -> tuple[str, str, bytes] | None:
        """The conversation's key, its id and the record's key in it; None for others' than those that are shown."""
        if (split := split_key(key)) is None:
            return None
        tenant, conversation_id = conversation_of_key(split[0])
        if tenant != self._tenant or not fnmatchcase(conversation_id, self._pattern):
            return None
        return split[0], conversation_id, split[1]
