"""Trees of conversations: one that is no fork, and all that go on from it, directly or through others.

Each conversation of a tree is a branch: what its own topic adds to what it inherits. A deleted conversation is one too
while others go on from it, with what they inherit. An id that was deleted and begun anew stands in another tree.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from penstock.common.conversations import Turn
from penstock.common.forks import fork_id_of
from penstock.gateway.conversations.index import ConversationIndex, ranges
from penstock.gateway.conversations.indexes import GAP, TRIES, Indexed, Indexes, Log
from penstock.schemas.errors import BrokerUnavailable, NotFound
from penstock.schemas.records import ConversationFork
from penstock.schemas.topics import TopicNames

DEADLINE_S = 60.0
PAGE_MESSAGES = 500
PAGE_BRANCHES = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    """A conversation of a tree, without what it inherits. Offsets `begin` and `end` (exclusive) are Kafka's."""

    conversation_id: str
    topic: str
    topic_id: str
    depth: int
    """How many conversations it goes on from."""
    forked_from: ConversationFork | None
    inherited: int
    """How many messages of those conversations are its own too."""
    is_deleted: bool
    created_ms: int | None
    base: int
    """The conversation's offset of the topic's first record."""
    begin: int
    end: int
    messages: int
    summaries: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """What a record `forked` says: a conversation that may go on from a message. See `TopicForks`."""

    key: str
    fork: ConversationFork
    end: int
    """Kafka's offset behind the last record that it inherits."""
    messages: int
    """How many messages stand in this topic up to there."""
    summaries: int


@dataclass(eq=False, kw_only=True, slots=True)
class Life:
    """What one topic says of a conversation from its beginning, or from a deletion, to the next deletion or its end."""

    topic_id: str
    is_deleted: bool
    created_ms: int | None
    base: int
    begin: int
    end: int
    messages: int
    summaries: int
    forks: list[Fork]
    children: list[tuple[Fork, Life]] = field(default_factory=list["tuple[Fork, Life]"])


def life_of(indexed: Indexed, at: int | None) -> Life:
    """The one in which the conversation's offset `at` stands; None: the newest. The index must be locked."""
    index, forks = indexed.index, indexed.index.forks
    begin = forks.begin(at)
    deletion = min((one for one in forks.deletions if one >= begin), default=None)
    is_deleted = deletion is not None or index.is_deleted()
    own_begin, end = begin - forks.base, index.end if deletion is None else deletion - forks.base
    messages, summaries = index.counts(own_begin, end)
    return Life(
        topic_id=indexed.topic_id,
        is_deleted=is_deleted,
        created_ms=index.created_ms,
        base=forks.base,
        begin=own_begin,
        end=end,
        messages=messages,
        summaries=summaries,
        forks=[
            _fork(index, own_begin, key, fork)
            for key, fork in forks.forks.items()
            if begin <= fork.through < (index.end + forks.base if deletion is None else deletion)
        ],
    )


def _fork(index: ConversationIndex, begin: int, key: str, fork: ConversationFork) -> Fork:
    end = fork.through + 1 - index.forks.base
    messages, summaries = index.counts(begin, end)
    return Fork(key=key, fork=fork, end=end, messages=messages, summaries=summaries)


def branches(conversation_id: str, life: Life, topics: TopicNames, tenant: str) -> list[Branch]:
    """The tree in the order of its places: each branch before those that go on from it, those by place and id.

    Deleted ones from which none that lives goes on are left out.
    """
    _prune(life)
    if life.is_deleted and not life.children:
        return []
    found: list[Branch] = []
    waiting: list[tuple[str, Life, ConversationFork | None, int, int]] = [(conversation_id, life, None, 0, 0)]
    while waiting:
        name, one, made_of, depth, inherited = waiting.pop()
        if one.is_deleted:
            last = max((fork for fork, _ in one.children), key=lambda fork: fork.end)
            end, messages, summaries = last.end, last.messages, last.summaries
        else:
            end, messages, summaries = one.end, one.messages, one.summaries
        found.append(
            Branch(
                conversation_id=name,
                topic=topics.conversation(tenant, name),
                topic_id=one.topic_id,
                depth=depth,
                forked_from=made_of,
                inherited=inherited,
                is_deleted=one.is_deleted,
                created_ms=one.created_ms,
                base=one.base,
                begin=one.begin,
                end=end,
                messages=messages,
                summaries=summaries,
            )
        )
        in_order = sorted(one.children, key=lambda pair: (pair[0].end, pair[0].fork.conversation_id))
        for fork, child in reversed(in_order):
            from_here = ConversationFork(conversation_id=name, through=fork.fork.through, topic_id=one.topic_id)
            waiting.append((fork.fork.conversation_id, child, from_here, depth + 1, inherited + fork.messages))
    return found


def _prune(life: Life) -> None:
    """Leave out deleted conversations that nobody needs: the topics go, or went, with the last fork."""
    every = [life]
    for one in every:
        every += [child for _, child in one.children]
    for one in reversed(every):
        one.children = [(fork, child) for fork, child in one.children if not child.is_deleted or child.children]


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """Some messages and summaries of a branch, in order. `is_last`: none comes after them."""

    branch: Branch
    turns: Sequence[Turn]
    is_last: bool


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

    def pages(self, found: Sequence[Branch], at: int, begin: int) -> list[Page]:
        """The next messages and summaries of the tree, from Kafka's offset `begin` of the branch number `at` on.

        Some of that branch, or of that and several more; of a branch whose conversation is gone meanwhile, none.
        """
        give_up = time.monotonic() + DEADLINE_S
        for _ in range(TRIES):
            chosen = self._choose(found, at, begin, give_up)
            read = self._indexes.read_many({one.topic: some for one, some, _ in chosen if some}, give_up)
            pages: list[Page] = []
            for one, some, is_last in chosen:
                records = read.get(one.topic, [])
                if [record.offset for record in records] != some:
                    break
                turns = [Turn(offset=one.base + r.offset, message=r.message) for r in records if r.message is not None]
                pages.append(Page(branch=one, turns=turns, is_last=is_last))
            if pages:
                return pages
            with suppress(NotFound), self._indexes.indexed(found[at].topic) as indexed:  # compaction removed some
                self._indexes.forget(found[at].topic, indexed)
        raise BrokerUnavailable("the conversation changes while it is read; try again", retry_after_s=1)

    def _choose(
        self, found: Sequence[Branch], at: int, begin: int, give_up: float
    ) -> list[tuple[Branch, list[int], bool]]:
        """Branches with the offsets to read of each, which stand close together, and whether those are its last."""
        some, messages = list[Branch](), 0
        for one in found[at : at + PAGE_BRANCHES]:
            if messages >= PAGE_MESSAGES:
                break
            some.append(one)
            messages += one.messages + one.summaries
        offsets: dict[str, list[int]] = {}
        by_topic = {one.topic: one for one in some}
        for topic, indexed in self._indexes.together(list(by_topic), give_up):
            one = by_topic[topic]
            if indexed.topic_id == one.topic_id:
                first = begin if one is found[at] else one.begin
                offsets[topic] = indexed.index.told(PAGE_MESSAGES + 1, first, one.end)
        chosen: list[tuple[Branch, list[int], bool]] = []
        left = PAGE_MESSAGES
        for one in some:
            whole = offsets.get(one.topic, [])
            close = whole[:left]
            if spans := ranges(close, GAP):
                close = [offset for offset in close if offset < spans[0][1]]
            is_last = len(close) == len(whole)
            chosen.append((one, close, is_last))
            left -= len(close)
            if not is_last or not left:
                break
        return chosen

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
