"""The view: every request on the topics folded in memory, written behind to SQLite, told to the hub at once.

Not thread-safe; all calls on the event loop. `docs/decisions/0005` tells why it is built so.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from penstock.gateway.limits.rates import Rate
from penstock.gateway.limits.tenants import Tenants
from penstock.gateway.view.census import Census
from penstock.gateway.view.entries import BLANKED, Entry, Key
from penstock.gateway.view.hub import Hub, Subject
from penstock.gateway.view.outputs import OutcomeReader, held_bytes
from penstock.gateway.view.store import TP, Store
from penstock.gateway.view.unwritten import Recent, Unwritten
from penstock.producers.clock import now_ms
from penstock.producers.reader import RawMessage
from penstock.schemas.codec import Codec, default_codec
from penstock.schemas.desired import model_key
from penstock.schemas.errors import PenstockError, RegistryUnavailable
from penstock.schemas.fold import IGNORED
from penstock.schemas.ids import check_request_id, check_tenant, derived_request_id, is_derived_id
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
from penstock.schemas.topics import HEADER_ORIGIN, TopicNames, partition_for

logger = logging.getLogger(__name__)

RECENT_BYTES = 64 * 2**20
CONVERSATION_POOLS = 100_000
"""Conversations of pools other than the common one that are remembered here while nothing of them is under way."""
"""Memory for ended requests, so that their last readers need no disk."""


class View:
    """Folds raw messages; `on_request`, `on_outcome` and `on_status` are called once per piece of news.

    `codec` never waits: it raises RegistryUnavailable, and `blocking`, for threads, then asks for the schema.
    """

    def __init__(
        self,
        store: Store,
        hub: Hub,
        names: TopicNames,
        result_partitions: int,
        *,
        on_outcome: Callable[[ResultEvent], None] = lambda _: None,
        on_request: Callable[[InferenceRequest], None] = lambda _: None,
        on_status: Callable[[StatusEvent], None] = lambda _: None,
        codec: Codec | None = None,
        blocking: Codec | None = None,
        recent_bytes: int = RECENT_BYTES,
        counts_since_ms: int = 0,
        tenants: Tenants | None = None,
    ) -> None:
        """`on_outcome`, `on_status` and `outcomes` hear of what was written since `counts_since_ms` alone."""
        self._store = store
        self.tenants = tenants or Tenants()
        self.tenants.clear()
        self._hub = hub
        self._names = names
        self._partitions = result_partitions
        self._on_outcome = on_outcome
        self._tell_request = on_request
        self._on_status = on_status
        self._codec = codec or default_codec()
        self._blocking = blocking or self._codec
        self._read_outcome = OutcomeReader(self._codec, self._blocking)
        self._status_head = self._codec.head(StatusEvent, "request_id", "tenant", "done")
        self._handlers: dict[str, Callable[[RawMessage], None]] = {
            names.result: self._result,
            names.status: self._status,
            names.control: self._control,
            names.model: self._model,
            names.worker: self._worker,
        }
        self._now_ms = now_ms()
        # What happened to them meanwhile is yet to be read: their silence begins now.
        self._live: dict[Key, Entry] = {entry.key: entry for entry in store.live(self._now_ms)}
        self._recent = Recent(recent_bytes)
        self._unwritten = Unwritten(store)
        self._own: dict[TP, set[int]] = {}
        """Offsets of requests that this gateway put there itself and that are still to be read."""
        self._counts_since_ms = counts_since_ms
        self._offsets: dict[TP, int] = {}
        self._moved: set[TP] = set()
        self.models: dict[tuple[str, str], ModelInfo] = {}
        self._pools: dict[tuple[str, str], str] = {}
        self.workers: dict[str, WorkerState] = {}
        self.outcomes: dict[str, int] = {}
        self.arrivals, self.endings = Rate(), Rate()
        self.census = Census()
        for entry in self._live.values():
            entry.updated_ms = self._now_ms
            self.census.count(entry)
            self.tenants.began(entry.tenant)

    # -- looking up

    @property
    def live_count(self) -> int:
        return len(self._live)

    @property
    def recent_bytes(self) -> int:
        """What the ended requests in memory take, about."""
        return self._recent.size_bytes

    def find(self, key: Key) -> Entry | None:
        """The entry in memory or on disk."""
        return self.in_memory(key) or self._store.get(key)

    def in_memory(self, key: Key) -> Entry | None:
        """The entry, if it is live, ended lately, or not written yet."""
        return self._live.get(key) or self._recent.get(key) or self._unwritten.get(key)

    def page(self, tenant: str, **options: Any) -> list[Entry] | None:
        """A page of what is written, as `Store.page` has it. Blocks; for a thread."""
        return self._store.page(tenant, **options)

    def entry(self, key: Key, partition: int | None = None) -> Entry:
        """The entry, made when it is new; `partition` is that of its results, if it is known."""
        return self.find(key) or self._new(key, partition)

    def _new(self, key: Key, partition: int | None = None) -> Entry:
        if partition is None:
            partition = partition_for(key[1].encode(), self._partitions)
        made = self._live[key] = Entry(key[0], key[1], partition)
        self.tenants.began(made.tenant)
        return made

    def result_partitions(self, count: int) -> None:
        """The result topic has so many partitions now."""
        self._partitions = count

    def queue_depths(self, now_ms: int) -> tuple[dict[str, int], dict[str, float]]:
        """(requests that wait, age in seconds of the oldest) by class."""
        return self.census.queue_depths(now_ms)

    def live_entries(self) -> Iterable[Entry]:
        return self._live.values()

    # -- events

    def accepted(self, request: InferenceRequest, origin: Origin | None = None) -> Entry:
        """A request that this gateway has just put on its topic, at `origin` if the broker said so.

        Its record is not decoded when it is read.
        """
        self._now_ms = now_ms()
        key: Key = (request.tenant, request.request_id)
        # An id that this gateway made is known from the topics at most, not from the disk.
        entry = self.entry(key) if is_derived_id(request.request_id) else self._live.get(key) or self._recent.get(key)
        if entry is None:
            entry = self._new(key)
        if not entry.content:
            self._on_request(entry, request, origin)
            if origin is not None:
                self.arrivals.count(origin.append_time_ms)
                if self._offsets.get((origin.topic, origin.partition), 0) <= origin.offset:
                    self._own.setdefault((origin.topic, origin.partition), set()).add(origin.offset)
        return entry

    def apply(self, messages: Sequence[RawMessage]) -> None:
        """Fold a batch of raw messages, in the order of each partition.

        Raises RegistryUnavailable at a record whose schema nobody has asked for: `offsets` says how far it came.
        """
        self._now_ms = now_ms()
        for message in messages:
            tp = (message.topic, message.partition)
            try:
                handler = self._handlers.get(message.topic)
                if handler is not None:
                    handler(message)
                elif (own := self._own.get(tp)) and message.offset in own:
                    own.discard(message.offset)
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
            self._offsets[tp] = message.offset + 1
            self._moved.add(tp)

    def look_up(self, message: RawMessage) -> bool:
        """Ask for the schema of a record that stopped `apply`, for a thread: whether folding can go on."""
        try:
            self._blocking.decode_any(message.value or b"")
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
            # Workers do not take it under such a name, so nothing would ever end it here.
            check_request_id(request.request_id)
            check_tenant(request.tenant)
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
        before = entry.conversation_id
        known = bool(entry.content)
        if before is not None and before != request.conversation_id and entry.counts(origin):
            self.census.forget(entry)  # it is counted again below, under its own conversation
        entry.on_request(request, origin)
        if entry.conversation_id is not None and entry.pool is not None:
            self._note_pool((entry.tenant, entry.conversation_id), entry.pool)
        if not known:
            self.tenants.on_request(entry.tenant, entry.conversation_id, entry.accepted_ms)
            self._tell_request(request)
        self._touch(entry)
        if before != entry.conversation_id and entry.conversation_id is not None:
            # Results may be read before the request that says whose they are.
            conversation = ("conversation", entry.tenant, entry.conversation_id)
            if self._hub.listens(conversation):
                self._hub.publish_except(conversation, ("request", *entry.key), entry.opening(None))

    def _note_pool(self, conversation: tuple[str, str], pool: str) -> None:
        """A conversation stays in the pool of its first request that names one."""
        self._pools.setdefault(conversation, pool)
        if len(self._pools) > CONVERSATION_POOLS:
            del self._pools[next(iter(self._pools))]

    def pool_of_conversation(self, tenant: str, conversation_id: str, unknown: str) -> str | None:
        """The pool that its turns go to (None: the common one); `unknown` while it may begin in any."""
        if (noted := self._pools.get((tenant, conversation_id))) is not None:
            return noted
        live = self.census.of_conversation(tenant, conversation_id)
        return live[0].pool if live else unknown

    def _result(self, message: RawMessage) -> None:
        record = message.value or b""
        event, large = self._read_outcome(record)
        entry = self.entry((event.tenant, event.request_id), message.partition)
        if entry.done or (entry.erased and entry.key not in self._live):
            return
        entry.on_partition(message.partition)
        fold = entry.fold
        before = (fold.epoch, fold.attempt)
        step = entry.on_result(event, message.offset, large)
        done = entry.done
        if done:
            entry.record = record
            entry.kept_bytes += held_bytes(event, large, len(record))
        # A newer attempt counts from its first word on, even one that shows nothing: what is older is heard no more.
        if step is not IGNORED or before != (fold.epoch, fold.attempt):
            self._touch(entry)
        if done and message.timestamp_ms >= self._counts_since_ms:
            self._on_outcome(event)
            status = event.status or "unknown"
            self.outcomes[status] = self.outcomes.get(status, 0) + 1
        if done:
            self.endings.count(message.timestamp_ms)
            used = 0 if event.usage is None else event.usage.prompt_tokens + event.usage.completion_tokens
            self.tenants.on_outcome(entry.tenant, event.status or "unknown", used, message.timestamp_ms)
        subjects = self._subjects(entry)
        if self._hub.listened(subjects):
            self._hub.publish_once(subjects, entry.frames_of(step))
        if done:
            if self._hub.listens(outcome := ("outcome", *entry.key)):
                self._hub.publish(outcome, entry.result_frame())
            entry.forget_text()
            if entry.erased:
                self._blank(entry)

    def _status(self, message: RawMessage) -> None:
        value = message.value or b""
        request_id, tenant, done = self._status_head(value)
        if done:
            return
        key: Key = (tenant, request_id)
        entry = self.in_memory(key)
        if entry is not None and (entry.done or entry.erased):
            return  # it tells nothing new: the outcome was heard first
        event = self._codec.decode(value, StatusEvent)
        entry = entry or self.entry(key)
        if entry.erased:
            return
        before = entry.status
        subjects = self._subjects(entry)
        frames = entry.on_status(event, listened=self._hub.listened(subjects))
        if entry.status is event:
            self._touch(entry)
            self._hub.publish_once(subjects, frames)
            here = (event.attempt, event.epoch, event.status)
            is_new = before is None or (before.attempt, before.epoch, before.status) != here
            if is_new and message.timestamp_ms >= self._counts_since_ms:
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
            self.models = {k: m for k, m in self.models.items() if model_key(m.model, m.pool).encode() != message.key}
            return
        model = self._codec.decode(message.value, ModelInfo)
        self.models[(model.model, model.pool or "")] = model

    def _worker(self, message: RawMessage) -> None:
        if message.value is None:
            self.workers.pop((message.key or b"").decode(errors="replace"), None)
            return
        state = self._codec.decode(message.value, WorkerState)
        self.workers[state.worker_id] = state

    def _subjects(self, entry: Entry) -> list[Subject]:
        """Who follows one of these hears of the entry; of its outcome also who waits for that alone."""
        subjects: list[Subject] = [("request", *entry.key)]
        if entry.conversation_id is not None:
            subjects.append(("conversation", entry.tenant, entry.conversation_id))
        return subjects

    # -- keeping

    def _touch(self, entry: Entry) -> None:
        entry.updated_ms = self._now_ms
        self._unwritten.add(entry)
        if entry.done:
            self._end(entry)
        elif not entry.blanked:
            self.census.count(entry)

    def _end(self, entry: Entry) -> None:
        live = self._live.pop(entry.key, None)
        if live is not None:
            self.census.forget(live)
            self.tenants.ended(live.tenant)
        self._recent.add(entry)

    def offsets(self) -> dict[TP, int]:
        """Next offset of each partition that was folded."""
        return self._offsets

    def flush(self, written: threading.Event | None = None) -> bool:
        """Hand what changed to the writer, with the offsets that it reflects; False when the writer is behind."""
        moved = {tp: self._offsets[tp] for tp in self._moved if tp in self._offsets}
        if not self._unwritten.hand_over(moved, written):
            return False
        self._moved.clear()
        return True

    @property
    def backlog(self) -> int:
        """Entries that changed and were not handed to the writer."""
        return len(self._unwritten)

    @property
    def is_due(self) -> bool:
        """Whether enough waits to be handed to the writer now."""
        return self._unwritten.is_due

    def catching_up(self, value: bool) -> None:
        """Whether what is read is old: then it is written in larger batches."""
        self._unwritten.catching_up = value

    @property
    def is_full(self) -> bool:
        """Whether so much waits to be handed to the writer that nothing more should be read."""
        return self._unwritten.is_full

    def prune(self, before_ms: int) -> None:
        """Forget what nothing was heard of since; `Store.prune` does the same to the file."""
        for key in [key for key, entry in self._live.items() if entry.updated_ms < before_ms]:
            self.census.forget(self._live.pop(key))
            self.tenants.ended(key[0])

    def forget_partitions(self, gone: Collection[TP]) -> None:
        """Partitions of topics that are there no more."""
        for tp in gone:
            self._offsets.pop(tp, None)
            self._own.pop(tp, None)

    def forget_stale_workers(self, older_than_s: float) -> None:
        limit = (time.time() - older_than_s) * 1000
        self.workers = {name: state for name, state in self.workers.items() if state.updated_at >= limit}
