"""Trees of conversations: one that is no fork, and all that go on from it, directly or through others.

Each conversation of a tree is a branch: what its own topic adds to what it inherits. A deleted conversation is one too
while others go on from it, with what they inherit. An id that was deleted and begun anew stands in another tree.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from penstock.common.forks import fork_id_of
from penstock.gateway.conversations.index import ConversationIndex
from penstock.gateway.conversations.indexes import Indexed, Indexes, Log
from penstock.schemas.errors import NotFound
from penstock.schemas.records import ConversationFork
from penstock.schemas.topics import TopicNames

DEADLINE_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    """A conversation of a tree, without what it inherits."""

    conversation_id: str
    topic: str
    topic_id: str
    depth: int
    """How many conversations it goes on from."""
    forked_from: ConversationFork | None
    is_deleted: bool
    created_ms: int | None
    messages: int
    """How many it adds to what it inherits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """What a record `forked` says: a conversation that may go on from a message. See `TopicForks`."""

    key: str
    fork: ConversationFork
    end: int
    """Kafka's offset behind the last record that it inherits."""
    messages: int
    """How many messages stand in this topic up to there."""


@dataclass(eq=False, kw_only=True, slots=True)
class Life:
    """What one topic says of a conversation from its beginning, or from a deletion, to the next deletion or its end."""

    topic_id: str
    is_deleted: bool
    created_ms: int | None
    messages: int
    forks: list[Fork]
    children: list[tuple[Fork, Life]] = field(default_factory=list["tuple[Fork, Life]"])


def life_of(indexed: Indexed, at: int | None) -> Life:
    """The one in which the conversation's offset `at` stands; None: the newest. The index must be locked."""
    index, forks = indexed.index, indexed.index.forks
    begin = forks.begin(at)
    deletion = min((one for one in forks.deletions if one >= begin), default=None)
    is_deleted = deletion is not None or index.is_deleted()
    own_begin, end = begin - forks.base, index.end if deletion is None else deletion - forks.base
    return Life(
        topic_id=indexed.topic_id,
        is_deleted=is_deleted,
        created_ms=index.created_ms,
        messages=index.counts(own_begin, end)[0],
        forks=[
            _fork(index, own_begin, key, fork)
            for key, fork in forks.forks.items()
            if begin <= fork.through < (index.end + forks.base if deletion is None else deletion)
        ],
    )


def _fork(index: ConversationIndex, begin: int, key: str, fork: ConversationFork) -> Fork:
    end = fork.through + 1 - index.forks.base
    return Fork(key=key, fork=fork, end=end, messages=index.counts(begin, end)[0])


def branches(conversation_id: str, life: Life, topics: TopicNames, tenant: str) -> list[Branch]:
    """The tree in the order of its places: each branch before those that go on from it, those by place and id.

    Deleted ones from which none that lives goes on are left out.
    """
    _prune(life)
    if life.is_deleted and not life.children:
        return []
    found: list[Branch] = []
    waiting: list[tuple[str, Life, ConversationFork | None, int]] = [(conversation_id, life, None, 0)]
    while waiting:
        name, one, made_of, depth = waiting.pop()
        found.append(
            Branch(
                conversation_id=name,
                topic=topics.conversation(tenant, name),
                topic_id=one.topic_id,
                depth=depth,
                forked_from=made_of,
                is_deleted=one.is_deleted,
                created_ms=one.created_ms,
                messages=max(fork.messages for fork, _ in one.children) if one.is_deleted else one.messages,
            )
        )
        in_order = sorted(one.children, key=lambda pair: (pair[0].end, pair[0].fork.conversation_id))
        for fork, child in reversed(in_order):
            from_here = ConversationFork(conversation_id=name, through=fork.fork.through, topic_id=one.topic_id)
            waiting.append((fork.fork.conversation_id, child, from_here, depth + 1))
    return found


def _prune(life: Life) -> None:
    """Leave out deleted conversations that nobody needs: the topics go, or went, with the last fork."""
    every = [life]
    for one in every:
        every += [child for _, child in one.children]
    for one in reversed(every):
        one.children = [(fork, child) for fork, child in one.children if not child.is_deleted or child.children]


class Trees:
    """All methods block and are thread-safe, and raise BrokerUnavailable, RegistryUnavailable."""

    def __init__(self, log: Log, indexes: Indexes, names: TopicNames) -> None:
        self._log = log
        self._indexes = indexes
        self._names = names

    def tree(self, tenant: str, root: str, at: int | None) -> list[Branch]:
        """The tree of the conversation `root`, in the life in which its offset `at` stands; None: the newest.

        One reading for each level of the tree, not for each branch. Raises NotFound.
        """
        give_up = time.monotonic() + DEADLINE_S
        lives = self._lives(tenant, {root: at}, give_up)
        if (first := lives.get(root, (None, None))[0]) is None:
            raise NotFound(f"conversation {root} does not exist", param="conversation_id")
        level = [first]
        while level:
            wanted = {fork.fork.conversation_id: None for one in level for fork in one.forks}
            lives = self._lives(tenant, wanted, give_up, first=True)
            below: list[Life] = []
            for one in level:
                for fork in one.forks:
                    child, key = lives.get(fork.fork.conversation_id, (None, None))
                    if child is not None and key == f"fork/{fork_id_of(fork.key)}":
                        one.children.append((fork, child))
                        below.append(child)
            level = below
        if not (found := branches(root, first, self._names, tenant)):
            raise NotFound(f"conversation {root} was deleted", param="conversation_id")
        return found

    def newest_ms(self, found: Iterable[Branch]) -> dict[str, int]:
        """By id of those that hold records: when the newest was written, in ms since the epoch."""
        topics = {one.topic: one.conversation_id for one in found if not one.is_deleted}
        with suppress(NotFound):  # one was deleted meanwhile: then of none
            return {topics[topic]: time_ms for topic, time_ms in self._log.newest_times(list(topics)).items()}
        return {}

    def _lives(
        self, tenant: str, wanted: Mapping[str, int | None], give_up: float, *, first: bool = False
    ) -> dict[str, tuple[Life, str | None]]:
        """By id, with the key of the topic's first record if that makes it a fork. `first`: the first life of each."""
        topics = {self._names.conversation(tenant, name): name for name in wanted}
        return {
            topics[topic]: (
                life_of(indexed, indexed.index.forks.base if first else wanted[topics[topic]]),
                indexed.index.forks.fork_key,
            )
            for topic, indexed in self._indexes.together(list(topics), give_up)
        }
