"""The view: every request on the topics folded in memory, written behind to SQLite, published to the hub at once.

Not thread-safe; all calls on the event loop. `docs/decisions/0005` tells why it is built so.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from penstock.common.arrivals import Arrivals
from penstock.common.clock import now_ms
from penstock.common.reader import RawMessage
from penstock.gateway.limits.rates import Rate
from penstock.gateway.limits.tenants import MINUTE_S, NEW_CONVERSATION_S, Tenants
from penstock.gateway.view.backfill import Backfill
from penstock.gateway.view.census import Census
from penstock.gateway.view.change_over import ChangeOver
from penstock.gateway.view.changes import Changes
from penstock.gateway.view.claims import Claims
from penstock.gateway.view.conversation_pools import ConversationPools
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.fleet import STOPPED, Fleet
from penstock.gateway.view.gateways import Gateways
from penstock.gateway.view.history_series import MOST_DEVICES, Window, device_series, series
from penstock.gateway.view.hub import Hub, items_subject
from penstock.gateway.view.known_requests import KnownRequests
from penstock.gateway.view.outputs import LargeOutput, OutcomeReader
from penstock.gateway.view.positions import Positions
from penstock.gateway.view.request_records import is_moved, lean_decoder, origin_of, read_request
from penstock.gateway.view.request_state import BLANKED, NOT_KNOWN, Key
from penstock.gateway.view.rows import restored
from penstock.gateway.view.selecting import UNFOLLOWED_STREAM
from penstock.gateway.view.store import TP, Due, LivePlace, Store, Turn
from penstock.gateway.view.streams import Streams, place_reader
from penstock.schemas.codec import Codec, default_codec
from penstock.schemas.errors import PenstockError, RegistryUnavailable
from penstock.schemas.fold import IGNORED
from penstock.schemas.ids import is_derived_id
from penstock.schemas.records import (
    ControlCommand,
    InferenceRequest,
    KeyClaim,
    Origin,
    Place,
    ResultEvent,
    StatusEvent,
    UsageTotal,
)
from penstock.schemas.topics import TopicNames, is_of_gateway, pool_of_topic, priority_class

logger = logging.getLogger(__name__)

RECENT_BYTES = 64 * 2**20
"""Memory for ended requests, so that their last readers need no disk."""
ROW_AGE_MS = 3_600_000
"""So old the row of a stream may be while pieces of it come. What was silent for long is forgotten by its row."""
MOST_EARLY = 10_000
"""Commands that were read before their request and are remembered."""
COUNTED_AT_ONCE = 200
"""Counts of the past that are added in one go: that takes about 1 ms."""
HELD_LIVE = 20_000
"""Requests that have not ended and stay in memory though nobody follows them."""


class View:
    """Folds raw messages; `on_request`, `on_outcome` and `on_status` are called once per piece of news.

    `codec` never waits: it raises RegistryUnavailable while a schema is being asked for.
    """

    def __init__(
        self,
        store: Store,
        hub: Hub,
        names: TopicNames,
        result_partitions: int,
        *,
        on_outcome: Callable[[ResultEvent, str], None] = lambda event, klass: None,
        on_request: Callable[[InferenceRequest], None] = lambda _: None,
        on_status: Callable[[StatusEvent], None] = lambda _: None,
        codec: Codec | None = None,
        recent_bytes: int = RECENT_BYTES,
        held_live: int = HELD_LIVE,
        counts_since_ms: int = 0,
        tenants: Tenants | None = None,
    ) -> None:
        """`on_outcome`, `on_status` and `outcomes` hear of what was written since `counts_since_ms` alone."""
        self._store = store
        self.tenants = tenants or Tenants()
        self.tenants.clear()
        self._hub = self._listeners = hub
        self.streams = Streams(hub)
        self._partitions = result_partitions
        self._on_outcome = on_outcome
        self._tell_request = on_request
        self._on_status = on_status
        self.codec = codec or default_codec()
        self.reports = Arrivals()
        """Of the worker topic."""
        self.fleet = Fleet(self.codec)
        self.gateways = Gateways(self.codec)
        self._decode_request = lean_decoder(self.codec)
        self._read_outcome = OutcomeReader(self.codec)
        self._is_piece = self.codec.head(ResultEvent, "kind")
        self._read_place = place_reader(self.codec)
        self._status_head = self.codec.head(StatusEvent, "request_id", "tenant", "done")
        self._handlers: dict[str, Callable[[RawMessage], None]] = {
            names.result: self._result,
            names.status: self._status,
            names.control: self._control,
            names.model: self.fleet.on_model,
            names.worker: self._worker,
            names.conversation_facts: self._facts,
            names.idempotency: self._claim,
            names.usage: self._usage,
        }
        self._of_others = {names.model, names.worker, names.idempotency, names.conversation_facts, names.usage}
        self.claims = Claims()
        self._now_ms = now_ms()
        self.known = KnownRequests(store, self.tenants, recent_bytes, held_live)
        self.changes = Changes()
        self.backfill: Backfill | None = None
        self.uncounted: Backfill | None = None
        """The same until its requests count too."""
        self._nobody = Hub()
        """In place of the hub while the past is folded: nobody follows that."""
        self._positions = Positions()
        self._early_priorities: dict[Key, int] = {}
        """Of commands that were read before their request: the topics are read side by side."""
        self._counts_since_ms = counts_since_ms
        self.outcomes: dict[str, int] = {}
        self.decoded = 0
        """Records of requests, statuses and results that were decoded whole."""
        self.arrivals, self.endings = Rate(), Rate()
        self._pools = ConversationPools(self.known.a_turn)

    # -- looking up

    @property
    def census(self) -> Census:
        return self.known.census

    @property
    def live_count(self) -> int:
        return self.known.live_count

    def find(self, key: Key) -> Entry | None:
        """The entry in memory or on disk."""
        return self.known.find(key)

    def in_memory(self, key: Key) -> Entry | None:
        """The entry, if it is live, ended lately, or not written yet."""
        return self.known.in_memory(key)

    def page(self, tenant: str | None, **options: Any) -> list[Entry] | None:
        """A page of what is written, as `Store.page` has it. Blocks; for a thread."""
        return self._store.page(tenant, **options)

    def live_of_tenant(self, tenant: str, after: LivePlace, most: int) -> tuple[list[Entry], LivePlace]:
        """As `Store.live_of_tenant`. For a thread."""
        return self._store.live_of_tenant(tenant, after, most)

    def live_turns(self, tenant: str, conversation_id: str, after: Turn, until_ms: int, most: int) -> list[Turn]:
        """As `Store.live_turns`. For a thread."""
        return self._store.live_turns(tenant, conversation_id, after, until_ms, most)

    def overdue(self, after: Due, before_ms: int, most: int) -> list[Due]:
        """As `Store.overdue`. For a thread."""
        return self._store.overdue(after, before_ms, most)

    def pool_of_conversation(self, tenant: str, conversation_id: str, unknown: str) -> str | None:
        """As `ConversationPools.of`."""
        return self._pools.of(tenant, conversation_id, unknown)

    def unwritten_facts(self, keys: Sequence[str]) -> dict[str, bytes | None]:
        """Newest records of conversations' facts, by the conversation's key, as far as the file does not hold them."""
        unwritten = self.known.unwritten.facts()
        return {key: unwritten[key] for key in keys if key in unwritten}

    def written_facts(self, keys: Sequence[str]) -> dict[str, bytes]:
        """The others, if it is asked after `unwritten_facts`. For a thread."""
        return self._store.facts_of(keys)

    def history(self, now_ms: int, range_minutes: int, step: int) -> Callable[[], dict[str, Any]]:
        """What gives the history of so many minutes by steps of so many. Call it on a thread."""
        window, minutes = Window.of(now_ms, range_minutes, step), self.known.history.minutes()
        waits = self.census.waits()

        def read() -> dict[str, Any]:
            names = self._store.devices(window.first_minute)
            shown = names[:MOST_DEVICES]
            reports = self._store.device_minutes(window.first_minute, shown[-1]) if shown else ()
            devices = device_series(window, shown, reports)
            return {**series(window, minutes, waits, devices), "devices_omitted": len(names) - len(shown)}

        return read

    def result_partitions(self, count: int) -> None:
        """The result topic has so many partitions now."""
        self._partitions = count

    def entry(self, key: Key, partition: int = NOT_KNOWN) -> Entry:
        """The entry, made when it is new; `partition` is that of its results, if it is known."""
        found = self.known.find(key)
        if found is not None and not found.erased_unread:
            if self._folds_backfill:
                self.known.is_backfilled(found)
            return found
        made = self.known.begin(key, self._partitions, partition)
        made.erased = found is not None
        return made

    # -- events

    def accepted(self, request: InferenceRequest, origin: Origin | None = None) -> Entry:
        """A request that this gateway has just put on its topic, at `origin` if the broker said so.

        Its record is not decoded when it is read.
        """
        self._now_ms = self.census.read_ms = now_ms()
        key: Key = (request.tenant, request.request_id)
        # An id that this gateway made is known from the topics at most, not from the disk.
        entry = self.entry(key) if is_derived_id(request.request_id) else self.known.find_recent(key)
        if entry is None:
            entry = self.known.begin(key, self._partitions)
        if not entry.content:
            self._on_request(entry, request, origin)
            if origin is not None:
                self.arrivals.count(self.census.read_ms)
                self._positions.put_here(origin)
        return entry

    def apply(self, messages: Sequence[RawMessage]) -> None:
        """Fold a batch of raw messages, in the order of each partition.

        Raises RegistryUnavailable at a record whose schema is not known yet: `offsets` says how far it came.
        """
        now = self._now_ms = now_ms()
        positions, is_old = self._positions, self.known.catching_up
        for message in messages:
            self.census.read_ms = min(message.timestamp_ms, now) if is_old else now
            tp = (message.topic, message.partition)
            if message.topic in self._handlers or not positions.is_own(tp, message.offset):
                self._fold(message)
            positions.passed(tp, message.offset)

    def apply_backfill(self, messages: Sequence[RawMessage]) -> None:
        """As `apply`, with what the backfill reader has read: without frames, and without what was folded before."""
        backfill, now = self.backfill, now_ms()
        assert backfill is not None
        self._now_ms, backfill.folding, self._hub = now, True, self._nobody
        try:
            for message in messages:
                if backfill.is_next(message):
                    self.census.read_ms = min(message.timestamp_ms, now)
                    self._fold(message)
                    backfill.passed(message)
        finally:
            backfill.folding, self._hub = False, self._listeners

    def _fold(self, message: RawMessage) -> None:
        """Raises RegistryUnavailable."""
        try:
            self._handlers.get(message.topic, self._request)(message)
        except RegistryUnavailable:
            raise
        except PenstockError as error:
            # Poison on a request topic is the workers' to dead-letter; elsewhere nobody of ours wrote it.
            logger.debug("view.skipped topic=%s offset=%d error=%s", message.topic, message.offset, error.code)
        except Exception:
            # One record must not end the view of all others; at a restart it would come again.
            logger.exception("view.failed topic=%s offset=%d", message.topic, message.offset)

    # -- the past

    @property
    def _folds_backfill(self) -> bool:
        return self.backfill is not None and self.backfill.folding

    def _is_within(self, span_s: float) -> bool:
        """Whether limits of tenants count what is folded, if they count for so long what they are told of.

        Who reads in order tells them of all in its order, and what is old has no effect by the end. The reader of the
        backfill tells them of old requests among new ones.
        """
        return not self._folds_backfill or self._now_ms - self.census.read_ms < 1_000 * span_s

    def is_settled(self, entry: Entry) -> bool:
        """Whether what is known of the request is all: nothing that is still unread may have changed it."""
        return self.backfill is None or entry.done or entry.erased or not self.backfill.has_entry(entry)

    def begin_backfill(self, backfill: Backfill) -> None:
        """From now on `apply` leaves out records about requests of the past, until `end_backfill`."""
        self.backfill = self.uncounted = backfill
        self.known.begin_backfill(backfill)

    def change_over(self, over: ChangeOver) -> None:
        """The store reads the file that was made from a snapshot. Until this has ended, nothing is written to it."""
        since = {key: restored(row) for key, row in over.doubles.items()}
        for key in self.known.begin_from(over):
            since[key] = self.known.unwritten.all_now()[key]
        for key, entry in since.items():
            if (past := self._store.of_snapshot(key)) is not None:
                self._unite(past, self.known.in_memory(key) or entry)

    def _unite(self, past: Entry, since: Entry) -> None:
        past.backfilled = True
        counts = self.known.unite(past, since)
        if since.erased:
            self._erased(counts.key)
        elif counts.done and counts is past:
            self.streams.on_end(since)
            for client in self._hub.clients(("request", *counts.key)):
                self.streams.follow(counts)
                self.streams.subscribe_after_load(counts, client, None, lambda whole, _: [whole.result_frame()])
            for client in self._hub.clients(("outcome", *counts.key)):
                self.streams.follow(counts)
                self.streams.subscribe_after_load(counts, client, None, lambda whole, _: [whole.outcome_frame()])

    def end_backfill(self) -> Iterator[None]:
        """All of it was folded, up to where the follower is: followers of a conversation get its running turns.

        In passes, between which others have their turn on the loop. Before it goes on, all that the follower has left
        out meanwhile is to be folded.
        """
        lines = set[tuple[str, str]]()
        yield
        while new := {*self._hub.conversations()} - lines:
            for line in new:
                self.known.recall_turns(*line)
                yield
            lines |= new
        running = [
            one for one in self.known.held_live() if one.backfilled and (one.tenant, one.conversation_id) in lines
        ]
        self.backfill = None
        self.known.end_backfill()
        self.changes = Changes()  # no cursor of before is good: far more has changed than it could tell
        self._positions.all_moved()
        for entry in running:
            self._tell_conversation(entry, None)
        while self.known.count_backfilled(now_ms(), COUNTED_AT_ONCE):
            yield
        self.uncounted = None

    def _request(self, message: RawMessage) -> None:
        request = read_request(message, self.codec, self._decode_request)
        self.decoded += 1
        if request is None:
            return
        key: Key = (request.tenant, request.request_id)
        if is_moved(message):  # its first record says what was asked for
            entry = self.known.find_recent(key)
            if entry is not None and not entry.done:
                entry.pool = pool_of_topic(message.topic)  # its workers run it
                entry.moved_to = Place(topic=message.topic, partition=message.partition, offset=message.offset)
                self._touch(entry)
            return
        origin = origin_of(message)
        if self._folds_backfill and self.backfill is not None and not self.backfill.has(origin):
            return
        entry = self.entry(key)
        if not entry.erased:
            self._on_request(entry, request, origin)
            self.arrivals.count(self.census.read_ms)
        elif entry.counts(origin):
            entry.count_from(request, origin)
            self._touch(entry)

    def _on_request(self, entry: Entry, request: InferenceRequest, origin: Origin | None) -> None:
        before = entry.conversation_id
        known = bool(entry.content)
        if self._early_priorities and (early := self._early_priorities.pop(entry.key, None)) is not None:
            entry.changed_priority = early
        if before is not None and before != request.conversation_id and entry.counts(origin):
            self.known.uncount(entry)  # it is counted again below, under its own conversation
        entry.on_request(request, origin)
        self.claims.settle(entry.key)
        self._pools.note(entry)
        if not known:
            urgent = priority_class(entry.priority) != "low"
            conversation_id = entry.conversation_id if self._is_within(NEW_CONVERSATION_S) else None
            self.tenants.on_request(entry.tenant, conversation_id, self.census.read_ms, urgent=urgent)
            self._tell_request(request)
        self._touch(entry)
        self._tell_conversation(entry, before)

    def _tell_conversation(self, entry: Entry, before: str | None) -> None:
        """Tell followers of its conversation of it, if that is news. `before`: the conversation it was known with."""
        if before != entry.conversation_id and entry.conversation_id is not None:
            # Results may be read before the request that says whose they are.
            conversation = ("conversation", entry.tenant, entry.conversation_id)
            if self._hub.listens(conversation):
                whole = self.streams.follow(entry)
                for client in self._hub.clients(conversation) - self._hub.clients(("request", *entry.key)):
                    if whole:
                        client.push_all(entry.opening(None))
                    else:
                        self.streams.subscribe_after_load(entry, client, None)

    def _result(self, message: RawMessage) -> None:
        record = message.value
        if record is None:
            return  # what `selecting` has passed over
        large: LargeOutput | None = None
        if is_piece := self._is_piece(record)[0] == "chunk":
            event = self._read_place(record)
        else:
            event, large = self._read_outcome(record)
            self.decoded += 1
        if self.backfill is not None and self.backfill.leaves_out(event.origin, message):
            return
        entry = self.entry((event.tenant, event.request_id), message.partition)
        if entry.done or (entry.erased and not self.known.is_live(entry.key)):
            return
        entry.on_partition(message.partition)
        is_other = entry.fold.origin is None and self._follow(entry, event.origin)
        before = entry.fold.place, entry.pieces_from
        if is_piece and self._folds_backfill:
            entry.pass_over(event, message.offset)
            step = IGNORED
        elif is_piece:
            step = self.streams.on_piece(
                entry,
                event,
                message.offset,
                lambda: self._decode_piece(record),
                alone=message.headers is UNFOLLOWED_STREAM,
            )
        else:
            step = entry.on_result(event, message.offset, large, len(record))
        done = entry.done
        begins = entry.pieces_from != before[1] or not entry.first_piece_ms  # its text, perhaps anew
        if is_piece and not done and entry.pieces_from >= 0 and begins:
            entry.first_piece_ms = message.timestamp_ms
        filling = self.streams.on_end(entry) if done else None
        told = None if filling is None else filling.told
        if filling is not None:
            filling.entry = entry  # it may have been forgotten, and have come again
        # A newer attempt counts from its first word on, even one that shows nothing: what is older is heard no more.
        moved = before != (entry.fold.place, entry.pieces_from)
        is_new = step is not IGNORED or moved
        lives = is_piece and (event.epoch, event.attempt) == entry.fold.place  # though it says nothing by itself
        if is_new or lives or self.streams.is_read(entry):
            if is_other or moved or not is_piece:
                self._touch(entry, shown=is_other or not is_piece)
            elif self._now_ms - entry.updated_ms >= ROW_AGE_MS:
                self._touch(entry, shown=False)  # else its row stays: it says from where the pieces are read again
        if done and message.timestamp_ms >= self._counts_since_ms:
            self._on_outcome(event, priority_class(entry.priority))
            status = event.status or "unknown"
            self.outcomes[status] = self.outcomes.get(status, 0) + 1
        if done:
            self.endings.count(self.census.read_ms)
            self.known.usage.count(event, message.partition, message.offset, message.timestamp_ms, self._now_ms)
            used = 0 if event.usage is None else event.usage.prompt_tokens + event.usage.completion_tokens
            self.tenants.on_outcome(entry.tenant, event.status or "unknown", self.census.read_ms)
            if self._is_within(MINUTE_S):
                self.tenants.on_tokens(entry.tenant, used, min(message.timestamp_ms, self._now_ms))
        if self._hub.has_readers:
            subjects = entry.subjects
            if self._hub.listened(subjects):
                self._hub.publish_once(subjects, entry.frames_of(step, told))
            if done and self._hub.listens(outcome := ("outcome", *entry.key)):
                self._hub.publish(outcome, entry.outcome_frame())
            if done:
                self._tell_items(entry)
        if done and self._folds_backfill:
            self._tell_repeat(entry)
        if filling is not None:
            self.streams.tell_end(filling)
        if done:
            entry.forget_text()
            if entry.erased:
                self._blank(entry)

    def _tell_repeat(self, entry: Entry) -> None:
        """Nobody follows what is of the past, but perhaps a repeat of it under the same id."""
        key = entry.key
        if self._listeners.listened([("request", *key), ("outcome", *key)]):
            self._listeners.publish(("request", *key), entry.result_frame())
            self._listeners.publish(("outcome", *key), entry.outcome_frame())

    def _follow(self, entry: Entry, origin: Origin) -> bool:
        """Its first result names the record that is the request. Whether another one has counted until now."""
        before = entry.conversation_id
        if entry.others:
            self.known.uncount(entry)  # it is counted again with its news
        if is_other := entry.follow(origin):
            self._pools.note(entry)
            self._tell_conversation(entry, before)
        return is_other

    def _decode_piece(self, record: bytes) -> ResultEvent:
        self.decoded += 1
        return self.codec.decode(record, ResultEvent)

    def _status(self, message: RawMessage) -> None:
        value = message.value
        if value is None:
            return  # statuses of requests that have ended
        request_id, tenant, done, _ = self._status_head(value)
        if done:
            return  # the result topic alone says how it ended
        key: Key = (tenant, request_id)
        entry = self.in_memory(key)
        if entry is not None and (entry.done or entry.erased):
            return  # it says nothing new: the outcome was read first
        event = self.codec.decode(value, StatusEvent)
        self.decoded += 1
        if self.backfill is not None and self.backfill.leaves_out(event.origin, message):
            return
        entry = entry or self.known.find(key) or self.known.begin(key, self._partitions)
        if entry.erased:
            return
        before = entry.status
        subjects = entry.subjects
        frames = entry.on_status(event, listened=self._hub.listened(subjects))
        if entry.status is event:
            self._touch(entry)
            self._hub.publish_once(subjects, frames)
            self._tell_items(entry)
            here = (event.attempt, event.epoch, event.status)
            is_new = before is None or (before.attempt, before.epoch, before.status) != here
            if is_new and message.timestamp_ms >= self._counts_since_ms:
                self._on_status(event)

    def _worker(self, message: RawMessage) -> None:
        heard_ms = self.reports.heard_ms(message, self._now_ms)
        if is_of_gateway(message.key):
            self.gateways.on_record(message, heard_ms)
        elif (state := self.fleet.on_worker(message, heard_ms)) is not None and state.state != STOPPED:
            self.known.history.on_worker(state, self._now_ms)

    def _claim(self, message: RawMessage) -> None:
        if message.value is not None:
            self.claims.take(self.codec.decode(message.value, KeyClaim), message.timestamp_ms)

    def _facts(self, message: RawMessage) -> None:
        if message.key is not None:
            self.known.unwritten.add_facts(message.key.decode(errors="replace"), message.value)

    def _usage(self, message: RawMessage) -> None:
        if message.value is not None:
            self.known.usage.merge(self.codec.decode(message.value, UsageTotal), self._now_ms)

    def _tell_items(self, entry: Entry) -> None:
        """Something may have been appended to its conversation: its input when it began, its answer before its end."""
        if entry.conversation_id is not None and self._hub.has_readers:
            self._hub.notify(items_subject(entry.tenant, entry.conversation_id))

    def _control(self, message: RawMessage) -> None:
        if message.value is None:
            return
        command = self.codec.decode(message.value, ControlCommand)
        if command.kind in ("cancel", "end_lost"):
            self._end_asked(command, message.timestamp_ms)
        elif command.kind == "reprioritize" and command.priority is not None:
            self._reprioritized((command.tenant, command.request_id), command.priority, message)
        elif command.kind == "erase" and not self._folds_backfill:  # the follower has read all commands
            self._erased((command.tenant, command.request_id))

    def _erased(self, key: Key) -> None:
        entry = self.known.find(key)
        if entry is None:  # its records may be gone: it is not live unless they are read after all
            self._blank(Entry(*key, NOT_KNOWN, self._partitions))
        elif entry.done or entry.erased:
            self._blank(entry)
        else:
            # Another gateway saw the outcome, which this one has yet to read, and to tell to who waits for it.
            entry.erased = True
            self._touch(entry)

    def _end_asked(self, command: ControlCommand, at_ms: int) -> None:
        """Remember it: should no worker have its record any more, gateways must know when to ask for its end."""
        entry = self.known.find_recent((command.tenant, command.request_id))
        if entry is None or entry.done:
            return
        if command.kind == "end_lost":
            entry.end_asked_ms = max(entry.end_asked_ms, at_ms)
            self.known.unwritten.add(entry)  # that is no sign of life
        elif not entry.cancelled_ms:
            entry.cancelled_ms = at_ms
            self._touch(entry)

    def _reprioritized(self, key: Key, priority: int, message: RawMessage) -> None:
        """It has this priority from now on, also if its record says another."""
        entry = self.known.find_recent(key)
        if self.backfill is not None and entry is not None and entry.backfilled != self.backfill.folding:
            self.backfill.leave(message)  # to who reads the commands about it in their order
            return
        if entry is None and self._folds_backfill:
            return  # the follower has remembered it
        if entry is None:
            self._early_priorities.pop(key, None)
            self._early_priorities[key] = priority
            if len(self._early_priorities) > MOST_EARLY:
                del self._early_priorities[next(iter(self._early_priorities))]
        elif not entry.closed:
            entry.priority = entry.changed_priority = priority
            self._touch(entry)

    def _blank(self, entry: Entry) -> None:
        """Blank what the caller sent and received; that there was a request stays known, for 410."""
        blank = Entry(entry.tenant, entry.request_id, entry.place)
        blank.task, blank.accepted_ms, blank.erased, blank.origin = entry.task, entry.accepted_ms, True, entry.origin
        blank.content, blank.noted, blank.fold.origin = BLANKED, entry.noted, entry.fold.origin
        blank.priority, blank.waits_from_ms = entry.priority, entry.waits_from_ms
        blank.started_ms, blank.finished_ms = entry.started_ms, entry.finished_ms
        self._touch(blank)
        self.known.end(blank)

    # -- keeping

    def _touch(self, entry: Entry, *, shown: bool = True) -> None:
        """`shown`: whether lists show what has changed. They do not show the text of streams."""
        self.known.touch(entry, self._now_ms)
        if shown and not self._folds_backfill:
            self.changes.note(entry.key)

    def offsets(self) -> dict[TP, int]:
        """Next offset of each partition that was folded."""
        return self._positions.offsets

    def offsets_of_requests(self) -> dict[TP, int]:
        """The same, of partitions that tell of requests."""
        return {tp: at for tp, at in self.offsets().items() if tp[0] not in self._of_others}

    def flush(self, written: threading.Event | None = None, *, all_offsets: bool = False) -> bool:
        """Hand what changed to the writer, with the offsets that it reflects; False when the writer is behind.

        `all_offsets`: also of partitions in which nothing was folded.
        """
        if all_offsets:
            self._positions.all_moved()
        if not self.known.hand_over(self._positions.moved(), written):
            return False
        self._positions.settled()
        return True

    def evict_to_disk(self, most: int) -> None:
        """As `KnownRequests.evict_to_disk`."""
        self.known.evict_to_disk(self._is_followed, most)

    def _is_followed(self, entry: Entry) -> bool:
        return self.streams.is_read(entry) or self._hub.listened([*entry.subjects, ("outcome", *entry.key)])

    def forget(self, silent: Sequence[Entry], before_ms: int) -> list[Entry]:
        """As `KnownRequests.forget`."""
        forgotten = self.known.forget(silent, before_ms)
        for entry in forgotten:
            self.changes.note(entry.key)
            if (filling := self.streams.on_end(entry)) is not None:
                self.streams.tell(filling)
        return forgotten

    def forget_partitions(self, gone: Collection[TP]) -> None:
        """Partitions of topics that are there no more."""
        self._positions.forget(gone)
        if self.backfill is not None:
            self.backfill.forget(gone)
