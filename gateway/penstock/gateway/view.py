"""The view: every request on the topics folded in memory, written behind to SQLite, told to the hub at once.

Not thread-safe; all calls on the event loop. `docs/decisions/0005` tells why it is built so.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from penstock.gateway.entries import BLANKED, Entry, Key
from penstock.gateway.frames import Frame, ResultFrame
from penstock.gateway.hub import Hub
from penstock.gateway.rates import Rate
from penstock.gateway.store import TP, Batch, Store
from penstock.gateway.tenants import Tenants
from penstock.producers.clock import now_ms
from penstock.producers.reader import RawMessage
from penstock.schemas.codec import Codec, default_codec
from penstock.schemas.errors import PenstockError, RegistryUnavailable
from penstock.schemas.ids import derived_request_id, is_derived_id
from penstock.schemas.records import (
    ControlCommand,
    InferenceRequest,
    ModelInfo,
    Origin,
    ResultEvent,
    StatusEvent,
    WorkerState,
)
from penstock.schemas.requests import parse_request_bytes
from penstock.schemas.topics import CLASSES, HEADER_ORIGIN, TopicNames, partition_for, priority_class

logger = logging.getLogger(__name__)

RECENT = 4_096
"""Ended requests kept in memory, so that their last readers need no disk."""


class View:
    """Folds raw messages; `on_outcome` and `on_status` are called once per piece of news."""

    def __init__(
        self,
        store: Store,
        hub: Hub,
        names: TopicNames,
        result_partitions: int,
        *,
        on_outcome: Callable[[ResultEvent], None] = lambda _: None,
        on_status: Callable[[StatusEvent], None] = lambda _: None,
        codec: Codec | None = None,
        tenants: Tenants | None = None,
    ) -> None:
        self._store = store
        self.tenants = tenants or Tenants()
        self.tenants.clear()
        self._hub = hub
        self._names = names
        self._partitions = result_partitions
        self._on_outcome = on_outcome
        self._on_status = on_status
        self._codec = codec or default_codec()
        self._live: dict[Key, Entry] = {entry.key: entry for entry in store.live()}
        self._recent: OrderedDict[Key, Entry] = OrderedDict()
        self._dirty: dict[Key, Entry] = {}
        self._writing: deque[tuple[threading.Event, dict[Key, Entry]]] = deque()
        self._offsets: dict[TP, int] = {}
        self._moved: set[TP] = set()
        self.models: dict[tuple[str, str], ModelInfo] = {}
        self.workers: dict[str, WorkerState] = {}
        self.outcomes: dict[str, int] = {}
        self.arrivals, self.endings = Rate(), Rate()
        at_ms = now_ms()
        for entry in self._live.values():
            entry.updated_ms = at_ms
            self.tenants.began(entry.tenant)

    # -- looking up

    @property
    def live_count(self) -> int:
        return len(self._live)

    def find(self, key: Key) -> Entry | None:
        """The entry in memory or on disk."""
        return self._live.get(key) or self._recent.get(key) or self._unwritten(key) or self._store.get(key)

    def _unwritten(self, key: Key) -> Entry | None:
        """What the file does not hold yet, however long ago it was last asked for."""
        found = self._dirty.get(key)
        for _, entries in reversed(self._writing):
            found = found or entries.get(key)
        return found

    def page(self, tenant: str, **options: Any) -> list[Entry]:
        """A page of what is written, as `Store.page` has it. Blocks; for a thread."""
        return self._store.page(tenant, **options)

    def entry(self, key: Key) -> Entry:
        """The entry, made when it is new."""
        return self.find(key) or self._new(key)

    def _new(self, key: Key) -> Entry:
        made = self._live[key] = Entry(key[0], key[1], partition_for(key[1].encode(), self._partitions))
        self.tenants.began(made.tenant)
        return made

    def queue_depths(self, now_ms: int) -> tuple[dict[str, int], dict[str, float]]:
        """(requests that wait, age in seconds of the oldest) by class."""
        depths: dict[str, int] = dict.fromkeys(CLASSES, 0)
        ages: dict[str, float] = dict.fromkeys(CLASSES, 0.0)
        for entry in self._live.values():
            if entry.status is None or entry.status.rank < 40:
                klass = priority_class(entry.priority)
                depths[klass] += 1
                ages[klass] = max(ages[klass], (now_ms - entry.accepted_ms) / 1000 if entry.accepted_ms else 0.0)
        return depths, ages

    def live_entries(self) -> Iterable[Entry]:
        return self._live.values()

    # -- events

    def accepted(self, request: InferenceRequest) -> Entry:
        """A request that this gateway has just put on its topic."""
        key: Key = (request.tenant, request.request_id)
        # An id that this gateway made is known from the topics at most, not from the disk.
        entry = self.entry(key) if is_derived_id(request.request_id) else self._live.get(key) or self._recent.get(key)
        if entry is None:
            entry = self._new(key)
        if not entry.content:
            self._on_request(entry, request, None)
        return entry

    def apply(self, messages: Sequence[RawMessage]) -> None:
        """Fold a batch of raw messages, in the order of each partition.

        Raises RegistryUnavailable at a record whose schema nobody can tell now: `offsets` says how far it came.
        """
        names = self._names
        for message in messages:
            try:
                if message.topic == names.result:
                    self._result(message)
                elif message.topic == names.status:
                    self._status(message)
                elif message.topic == names.control:
                    self._control(message)
                elif message.topic == names.model:
                    self._model(message)
                elif message.topic == names.worker:
                    self._worker(message)
                else:
                    self._request(message)
            except RegistryUnavailable:
                raise
            except PenstockError as error:
                # Poison on a request topic is the workers' to dead-letter; elsewhere nobody of ours wrote it.
                logger.debug("view.skipped topic=%s offset=%d error=%s", message.topic, message.offset, error.code)
            except Exception:
                # One record must not end the view of all others; at a restart it would come again.
                logger.exception("view.failed topic=%s offset=%d", message.topic, message.offset)
            tp = (message.topic, message.partition)
            self._offsets[tp] = message.offset + 1
            self._moved.add(tp)

    def look_up(self, message: RawMessage) -> bool:
        """Ask for the schema of a record that stopped `apply`, for a thread: whether folding can go on."""
        try:
            self._codec.decode_any(message.value or b"")
        except RegistryUnavailable:
            return False
        except PenstockError:
            return True
        return True

    def _request(self, message: RawMessage) -> None:
        if not message.value:
            return
        if message.value[0] == 0x7B:
            made_up = derived_request_id(message.topic, message.partition, message.offset, message.timestamp_ms)
            request = parse_request_bytes(message.value, request_id=made_up, now_ms=message.timestamp_ms)
        else:
            request = self._codec.decode(message.value, InferenceRequest)
        if any(name == HEADER_ORIGIN for name, _ in message.headers):
            return  # published again where it belongs; its first record was seen
        entry = self.entry((request.tenant, request.request_id))
        origin = Origin(
            topic=message.topic,
            partition=message.partition,
            offset=message.offset,
            append_time_ms=message.timestamp_ms,
        )
        if not entry.erased:
            self._on_request(entry, request, origin)
            self.arrivals.count(message.timestamp_ms)

    def _on_request(self, entry: Entry, request: InferenceRequest, origin: Origin | None) -> None:
        introduced = entry.conversation_id is None
        known = bool(entry.content)
        entry.on_request(request, origin)
        if not known:
            self.tenants.on_request(entry.tenant, entry.conversation_id, entry.accepted_ms)
        self._touch(entry)
        if introduced and entry.conversation_id is not None:
            # Results may be read before the request that says whose they are.
            conversation = ("conversation", entry.tenant, entry.conversation_id)
            if self._hub.listened(conversation):
                self._hub.publish_except(conversation, ("request", *entry.key), entry.opening(None))

    def _result(self, message: RawMessage) -> None:
        event = self._codec.decode(message.value or b"", ResultEvent)
        entry = self.entry((event.tenant, event.request_id))
        if entry.done or (entry.erased and entry.key not in self._live):
            return
        before = (entry.fold.epoch, entry.fold.attempt)
        frames = entry.on_result(event, message.offset)
        # A newer attempt counts from its first word on, even one that shows nothing: what is older is heard no more.
        if frames or entry.done or before != (entry.fold.epoch, entry.fold.attempt):
            self._touch(entry)
        if entry.done:
            self._on_outcome(event)
            status = event.status or "unknown"
            self.outcomes[status] = self.outcomes.get(status, 0) + 1
            self.endings.count(message.timestamp_ms)
            used = 0 if event.usage is None else event.usage.prompt_tokens + event.usage.completion_tokens
            self.tenants.on_outcome(entry.tenant, status, used, message.timestamp_ms)
        self._tell(entry, frames)
        if entry.done and entry.erased:
            self._blank(entry)

    def _status(self, message: RawMessage) -> None:
        event = self._codec.decode(message.value or b"", StatusEvent)
        if event.done:
            return
        entry = self.entry((event.tenant, event.request_id))
        if entry.erased:
            return
        before = entry.status
        frames = entry.on_status(event)
        if entry.status is event:
            self._touch(entry)
            self._tell(entry, frames)
            if before is None or (before.attempt, before.epoch, before.status) != (
                event.attempt,
                event.epoch,
                event.status,
            ):
                self._on_status(event)

    def _control(self, message: RawMessage) -> None:
        if message.value is None:
            return
        command = self._codec.decode(message.value, ControlCommand)
        if command.kind == "erase":
            entry = self.entry((command.tenant, command.request_id))
            if entry.done or entry.erased:
                self._blank(entry)
            else:
                # Another gateway saw the outcome, which this one has yet to read, and to tell to who waits for it.
                entry.erased = True
                self._touch(entry)

    def _blank(self, entry: Entry) -> None:
        """Blank what the caller said and was told; that there was a request stays known, for 410."""
        blank = Entry(entry.tenant, entry.request_id, entry.partition)
        blank.task, blank.accepted_ms, blank.erased, blank.origin = entry.task, entry.accepted_ms, True, entry.origin
        blank.content = BLANKED
        self._touch(blank)
        self._end(blank)

    def _model(self, message: RawMessage) -> None:
        if message.value is None:
            self.models = {k: m for k, m in self.models.items() if m.model.encode() != message.key}
            return
        model = self._codec.decode(message.value, ModelInfo)
        self.models[(model.model, model.pool or "")] = model

    def _worker(self, message: RawMessage) -> None:
        if message.value is None:
            self.workers.pop((message.key or b"").decode(errors="replace"), None)
            return
        state = self._codec.decode(message.value, WorkerState)
        self.workers[state.worker_id] = state

    def _tell(self, entry: Entry, frames: Sequence[Frame]) -> None:
        hub = self._hub
        subjects = [("request", *entry.key)]
        if entry.conversation_id is not None:
            subjects.append(("conversation", entry.tenant, entry.conversation_id))
        hub.publish_once(subjects, frames)
        if frames and isinstance(frames[-1], ResultFrame):
            hub.publish(("outcome", *entry.key), frames[-1])

    # -- keeping

    def _touch(self, entry: Entry) -> None:
        entry.updated_ms = now_ms()
        self._dirty[entry.key] = entry
        if entry.done:
            self._end(entry)

    def _end(self, entry: Entry) -> None:
        if self._live.pop(entry.key, None) is not None:
            self.tenants.ended(entry.tenant)
        self._recent[entry.key] = entry
        while len(self._recent) > RECENT:
            self._recent.popitem(last=False)

    def offsets(self) -> dict[TP, int]:
        """Next offset of each partition that was folded."""
        return self._offsets

    def flush(self, written: threading.Event | None = None) -> bool:
        """Hand what changed to the writer, with the offsets that it reflects; False when the writer is behind."""
        while self._writing and self._writing[0][0].is_set():
            self._writing.popleft()
        if not self._dirty and not self._moved and written is None:
            return True
        if self._store.is_behind:
            return False
        rows = [self._store.row(entry) for entry in self._dirty.values()]
        done = written or threading.Event()
        self._store.submit(Batch(rows, {tp: self._offsets[tp] for tp in self._moved if tp in self._offsets}, done))
        self._writing.append((done, self._dirty))
        self._dirty = {}
        self._moved.clear()
        return True

    @property
    def backlog(self) -> int:
        """Entries that wait for the writer."""
        return len(self._dirty)

    def prune(self, before_ms: int) -> None:
        """Forget what nothing was heard of since; `Store.prune` does the same to the file."""
        for key in [key for key, entry in self._live.items() if entry.updated_ms < before_ms]:
            del self._live[key]
            self.tenants.ended(key[0])

    def forget_stale_workers(self, older_than_s: float) -> None:
        limit = (time.time() - older_than_s) * 1000
        self.workers = {name: state for name, state in self.workers.items() if state.updated_at >= limit}
