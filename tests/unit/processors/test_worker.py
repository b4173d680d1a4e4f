"""The worker's shell: its turns, what it holds back, what it pauses, and how it breaks, with the real flow inside."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest

from flow_driver import Models, remembers_all
from kit.collector import collecting
from kit.records import command
from penstock.common import telemetry
from penstock.common.configuration import TelemetrySection
from penstock.common.reader import Headers, RawMessage
from penstock.common.tracing import SpanContext
from penstock.common.transport import Delivery
from penstock.processors import worker as worker_module
from penstock.processors.core.flow import Flow
from penstock.processors.core.intake.intake import Intake
from penstock.processors.core.settings import FlowSettings
from penstock.processors.core.work.states import Stage
from penstock.processors.execution import Execution
from penstock.processors.faults import Faults
from penstock.processors.kafka import journal as journal_module
from penstock.processors.kafka.batches import Assignment, Batch, DeliveredRecord
from penstock.processors.kafka.journal import CrashJournal, JournalWriter
from penstock.processors.kafka.outcomes import Outcomes, trace_of
from penstock.processors.kafka.publisher import Publisher
from penstock.processors.metrics import Metrics
from penstock.processors.outputs import Outputs
from penstock.processors.request_traces import RequestTraces
from penstock.processors.spool import Spool
from penstock.processors.worker import RECORDS_A_TURN, SLOW_TICK_S, Worker, WorkerParts
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import EngineFailed, RegistryUnavailable
from penstock.schemas.records import DeadLetter, ResultEvent
from penstock.schemas.topics import TopicNames
from shell_fakes import ScriptedEngine, ScriptedTurns
from support import wait_until_async

NAMES = TopicNames()
HIGH, LOW = NAMES.request("text_generation", 0), NAMES.request("text_generation", 9)
PARTITIONS = {HIGH: 2, LOW: 2}
NOW_MS = 1_000


class Broker:
    """Takes records and acknowledges them, at once or when a test says so."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes, Any]] = []
        """(topic, value, headers)."""
        self.waiting: list[tuple[str, Callable[[Delivery], None]]] = []
        self.acknowledges = True

    def produce_nowait(self, topic: str, value: bytes, *, callback: Any, headers: Any = None, **_: Any) -> None:
        self.sent.append((topic, value, headers))
        self.waiting.append((topic, callback))
        if self.acknowledges:
            self.acknowledge()

    def acknowledge(self) -> None:
        waiting, self.waiting = self.waiting, []
        for topic, callback in waiting:
            callback(Delivery(topic=topic, partition=0, offset=0, timestamp_ms=0))

    def read(self, topic: str, kind: type[Any]) -> list[Any]:
        return [default_codec().decode(value, kind) for to, value, _ in self.sent if to == topic]

    def results(self) -> list[ResultEvent]:
        return self.read(NAMES.result, ResultEvent)

    def ended(self) -> dict[str, str | None]:
        return {event.request_id: event.status for event in self.results() if event.is_terminal}

    def letters(self) -> list[DeadLetter]:
        return self.read(NAMES.dlq, DeadLetter)


class RegistryBehind(Intake):
    """The real intake; for a while it lacks a schema for some offsets, or has a fault of its own."""

    def __init__(self) -> None:
        super().__init__(default_codec(), NAMES, PARTITIONS)
        self.unknown: set[int] = set()
        self.fault: Exception | None = None
        self.looked_at: list[tuple[str, int]] = []

    def read(self, topic: str, partition: int, offset: int, *args: Any) -> Any:
        self.looked_at.append((topic, offset))
        if self.fault is not None:
            raise self.fault
        if offset in self.unknown:
            raise RegistryUnavailable("away")
        return super().read(topic, partition, offset, *args)


class Shell:
    """A worker whose flow, intake, journal, execution and publisher are real; its clock moves by hand."""

    def __init__(self, folder: Path, traces: RequestTraces | None = None, **settings: Any) -> None:
        self.now = 100.0
        self.folder = folder
        self.broker, self.intake, self.refetches, self.lanes = Broker(), RegistryBehind(), Mock(), Mock()
        self.engine, self.metrics = ScriptedEngine(inline=True), Metrics()
        self.journal = CrashJournal(folder / "journal")
        self.journal_writer = JournalWriter(self.journal)
        self.flow = Flow(FlowSettings(**settings), Models("m"), remembers_all(), deaths=self.journal.deaths)
        self.held: list[frozenset[tuple[str, int]]] = []
        self.on_broken = Mock()
        self.given_back: list[tuple[str, int]] = []
        self.ends: dict[tuple[str, int], int] = {}
        self.worker = Worker(
            clock=lambda: self.now,
            urgency=lambda topic: 0 if topic == HIGH else 2,
            hold=self.held.append,
            on_erase=Mock(),
            on_broken=self.on_broken,
        )
        self.execution = Execution(
            self.flow,
            lambda model, replica: self.engine,
            ScriptedTurns(),
            Outputs(folder / "artifacts"),
            Spool(folder, 0),
            self.metrics,
            clock=lambda: self.now,
            changed=self.worker.changed,
        )
        self.publisher = Publisher(self.broker, default_codec(), NAMES)
        self.worker.connect(
            WorkerParts(
                flow=self.flow,
                intake=self.intake,
                execution=self.execution,
                outcomes=Outcomes(
                    self.publisher,
                    default_codec(),
                    NAMES,
                    worker_id="w",
                    engine_facts=lambda model, replica: (None, None),
                    trace=trace_of if traces is None else traces.headers,
                ),
                publisher=self.publisher,
                refetcher=self.refetches,
                lanes=self.lanes,
                journal=self.journal,
                journal_writer=self.journal_writer,
                metrics=self.metrics,
                faults=Faults({}),
                traces=traces,
            )
        )

    def assign(self, *tps: tuple[str, int], generation: int = 1, fenced: bool = False) -> None:
        committed = {tp: (0, "") for tp in tps}  # noqa: C420
        self.worker.on_assigned(
            Assignment(partitions=frozenset(tps), generation=generation, fenced=fenced, committed=committed)
        )

    def deliver(self, topic: str, *values: bytes, partition: int = 0, headers: Headers = ()) -> None:
        """The next records of a partition, as one batch."""
        tp = (topic, partition)
        start = self.ends.get(tp, 0)
        self.ends[tp] = start + len(values)
        records = [DeliveredRecord(start + n, NOW_MS, None, value, headers, True) for n, value in enumerate(values)]
        self.worker.on_batch(Batch(tp, start, start + len(values), 1, records, lambda: self.given_back.append(tp)))

    async def run(self, *values: bytes, slots: int = 4, inline: bool = True, headers: Headers = ()) -> None:
        """Takes records while the engine is up."""
        self.up(slots, inline=inline)
        await self.take(*values, headers=headers)

    async def take(self, *values: bytes, headers: Headers = ()) -> None:
        """Delivers the next records of the low class and lets the worker take them."""
        self.deliver(LOW, *values, headers=headers)
        await self.turns()

    def up(self, slots: int = 4, *, inline: bool = True) -> None:
        self.flow.replicas.up("m", 0, slots, None, self.now, inline=inline)
        self.worker.changed()

    async def turns(self) -> None:
        """Until the shell has nothing more to do by itself."""
        for _ in range(100):
            await asyncio.sleep(0)
            if not self.worker._turn_due:  # pyright: ignore[reportPrivateUsage]
                return
        raise AssertionError("the shell does not come to rest")

    def running(self) -> list[str]:
        return [work.request_id for work in self.flow.works.values() if work.stage is Stage.RUNNING]

    def finish(self, request_id: str) -> None:
        (run_id,) = [run_id for run_id in self.engine.runs if run_id.startswith(f"{request_id}#")]
        runs, self.engine.runs = self.engine.runs, {run_id: self.engine.runs[run_id]}
        self.engine.finish()
        self.engine.runs = {other: run for other, run in runs.items() if other != run_id}

    async def end(self, request_id: str) -> None:
        self.finish(request_id)
        await self.turns()

    @asynccontextmanager
    async def ticking(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.worker.tick_forever())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def deaths_next_life(self, offset: int, request_id: str, topic: str = LOW) -> int:
        return CrashJournal(self.folder / "journal").deaths((topic, 0, offset), request_id)


@pytest.fixture
async def shell(tmp_path: Path) -> AsyncIterator[Shell]:
    shell = Shell(tmp_path)
    shell.assign((HIGH, 0), (LOW, 0))
    await shell.turns()
    shell.held.clear()
    yield shell
    await shell.execution.close()


def request(request_id: str, **fields: Any) -> bytes:
    body = {"request_id": request_id, "task": "text_generation", "payload": {"prompt": "hi"}, "ttl_ms": 86_400_000}
    return json.dumps({**body, **fields}).encode()


@pytest.fixture(autouse=True)
def _fixed_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "now_ms", lambda: NOW_MS)


# -- taking records


async def test_a_record_becomes_an_outcome_and_its_offset_may_be_committed(shell: Shell) -> None:
    await shell.run(request("r"))
    assert shell.given_back == [(LOW, 0)]
    shell.broker.acknowledges = False
    await shell.end("r")
    assert shell.broker.ended() == {"r": "completed"}
    assert shell.flow.commit.commits() == {}, "the broker has not acknowledged it"
    shell.broker.acknowledge()
    assert shell.flow.commit.commits() == {(LOW, 0): (1, "")}
    assert shell.metrics.completed_total == 1


async def test_all_events_of_a_request_carry_its_trace(shell: Shell) -> None:
    """What is longer than any trace is none of ours to repeat on every chunk."""
    trace = ("traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    await shell.run(request("r", stream=True), headers=(("other", b"x"), trace))
    await shell.end("r")
    events = [(topic, headers) for topic, _, headers in shell.broker.sent if topic in (NAMES.status, NAMES.result)]
    assert {topic for topic, _ in events} == {NAMES.status, NAMES.result}
    assert all(headers == [trace] for _, headers in events)
    shell.broker.sent.clear()
    await shell.take(request("s"), headers=((trace[0], b"x" * 300),))
    assert [headers for _, _, headers in shell.broker.sent if headers] == []


async def test_a_repeated_request_is_traced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its repeat gets the outcome too, with the same trace."""
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        with telemetry.tracing(TelemetrySection(traces=True), "worker"):
            exporter = telemetry.active()
            assert exporter is not None
            shell = Shell(tmp_path, RequestTraces(exporter, "w", "g", NAMES.result))
            monkeypatch.setattr(worker_module, "now_ms", lambda: NOW_MS + 1)  # both records are older
            shell.assign((LOW, 0))
            await shell.run(request("r"), request("r"))
            await shell.end("r")
            await shell.execution.close()
        named = {dict(headers)["traceparent"] for topic, _, headers in shell.broker.sent if topic == NAMES.result}
        assert len(shell.broker.results()) == 2
    assert len(named) == 1
    names = sorted(one.name for one in collector.seen)
    assert names == sorted([f"process {LOW}", "text_completion m", f"send {NAMES.result}"]), names


async def test_the_trace_of_what_has_no_outcome_is_not_kept(tmp_path: Path) -> None:
    """A record without an id, and a request whose topic was deleted and created again."""
    exporter = Mock(begin=Mock(return_value=SpanContext(1, 2)))
    traces = RequestTraces(exporter, "w", "g", NAMES.result)
    shell = Shell(tmp_path, traces)
    shell.assign((LOW, 0))
    await shell.take(b"no request")
    await shell.take(request("former"))
    shell.ends[(LOW, 0)] = 1
    await shell.take(request("r"))
    assert [one.args[0] for one in exporter.name_trace.call_args_list] == ["", "former", "r"]
    await shell.run()
    await shell.end("r")
    assert list(shell.broker.ended()) == ["r"]
    assert not traces._requests  # pyright: ignore[reportPrivateUsage]
    await shell.execution.close()


async def test_a_large_batch_takes_several_turns_and_the_gate_hears_of_it_once(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    delivered = Mock(wraps=shell.flow.commit.delivered)
    monkeypatch.setattr(shell.flow.commit, "delivered", delivered)
    count = 2 * RECORDS_A_TURN + 10
    shell.deliver(LOW, *(request(f"r{n}") for n in range(count)))
    await asyncio.sleep(0)
    assert len(shell.flow.works) == RECORDS_A_TURN
    assert shell.given_back == []
    await shell.turns()
    assert len(shell.flow.works) == count
    assert [told.args[1:3] for told in delivered.mock_calls] == [(0, count)]
    assert shell.given_back == [(LOW, 0)]


# -- a registry that is away


async def stay_away(shell: Shell) -> None:
    """The registry does not answer for a second."""
    for _ in range(10):
        shell.now += SLOW_TICK_S
        shell.worker.changed()
        await shell.turns()


async def test_an_unreachable_registry_holds_the_batch(shell: Shell) -> None:
    shell.up()
    shell.intake.unknown = {1}
    shell.deliver(LOW, request("a"), request("b"), request("c"))
    await shell.take(request("d"))
    assert shell.running() == ["a"]
    assert not shell.worker.registry_waits, "a schema that is asked for is no registry that is away"
    assert shell.given_back == [(LOW, 0), (LOW, 0)], "others have their room, and this partition is held"
    assert shell.held == [frozenset({(LOW, 0)})]
    shell.worker.changed()
    await shell.turns()
    assert shell.intake.looked_at == [(LOW, 0), (LOW, 1)], "it is not asked without end"
    await stay_away(shell)
    assert shell.worker.registry_waits
    looks = len(shell.intake.looked_at)
    shell.intake.unknown = set()
    shell.now += SLOW_TICK_S
    assert shell.worker.registry_waits, "until it has answered"
    shell.worker.changed()
    await shell.turns()
    assert not shell.worker.registry_waits
    assert shell.running() == ["a", "b", "c", "d"]
    assert shell.intake.looked_at[looks:] == [(LOW, offset) for offset in (1, 2, 3)], "no record twice"
    assert shell.given_back == [(LOW, 0), (LOW, 0)]
    assert shell.broker.letters() == []


async def test_parked_records_are_fetched_again_while_the_registry_is_away(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "REGISTRY_AGAIN_S", 0.01)
    shell.intake.unknown = {0}
    shell.worker.on_fetched((LOW, 0), [raw(0, request("r"))])
    assert not shell.refetches.request.called, "it is not asked without end"
    await wait_until_async(lambda: shell.refetches.request.mock_calls == [call((LOW, 0), (0,))])


# -- parked records


def raw(offset: int, value: bytes) -> RawMessage:
    return RawMessage(LOW, 0, offset, NOW_MS, None, value)


async def parked(shell: Shell) -> None:
    """Two requests of which the second has no room and is read again at once."""
    big = "x" * 400
    shell.deliver(LOW, request("a", payload={"prompt": big}), request("b", payload={"prompt": big}))
    shell.up(slots=1)
    await shell.turns()
    assert shell.running() == ["a"]
    await shell.end("a")
    assert shell.refetches.request.mock_calls == [call((LOW, 0), (1,), 2)], "with the urgency of its class"


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[Shell]:
    """Its share for the bytes of a class of the one model holds one record of these tests."""
    shell = Shell(tmp_path, intake_bytes=6 * 600)
    shell.assign((LOW, 0))
    yield shell
    await shell.execution.close()


@pytest.mark.parametrize("found", ["b", "somebody else", None])
async def test_a_parked_request_runs_when_it_is_read_again_and_becomes_a_dead_letter_when_it_is_gone(
    small: Shell, found: str | None
) -> None:
    await parked(small)
    if found is None:
        small.worker.on_gone((LOW, 0), [1])
    else:
        small.worker.on_fetched((LOW, 0), [raw(1, request(found))])
    await small.turns()
    if found == "b":
        assert small.running() == ["b"]
        return
    assert [letter.request_id for letter in small.broker.letters()] == ["b"]
    assert small.flow.commit.commits() == {(LOW, 0): (2, "")}
    small.worker.on_gone((LOW, 0), [1, 7])
    await small.turns()
    assert len(small.broker.letters()) == 1, "what is not held, or has ended, is nobody's"


# -- turns


async def test_effects_beyond_the_budget_of_a_turn_wait_for_the_next(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "EFFECTS_A_TURN", 4)
    shell.up(slots=100)
    shell.deliver(LOW, *(request(f"r{n}") for n in range(10)))
    await asyncio.sleep(0)
    first = len(shell.engine.runs)
    assert 0 < first <= 4, "the loop may serve others meanwhile"
    await shell.turns()
    assert [run_id.partition("#")[0] for run_id in shell.engine.runs] == [f"r{n}" for n in range(10)], "in order"


async def test_a_turn_is_asked_for_once_however_much_happens(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Mock(wraps=shell.flow.pauses)
    monkeypatch.setattr(shell.flow, "pauses", steps)
    shell.deliver(LOW, request("a"))
    shell.deliver(LOW, request("b"))
    for _ in range(10):
        shell.worker.changed()
    await shell.turns()
    assert steps.call_count == 1
    assert len(shell.flow.works) == 2


# -- pauses


@pytest.fixture
async def full(tmp_path: Path) -> AsyncIterator[Shell]:
    """Its span of offsets is full: the partition is held."""
    shell = Shell(tmp_path, commit_span=20)
    shell.assign((LOW, 0), (HIGH, 0))
    await shell.run(*(request(f"r{n}") for n in range(20)), slots=64)
    assert shell.held == [HOLD]
    yield shell
    await shell.execution.close()


HOLD = frozenset({(LOW, 0)})


@pytest.mark.parametrize("by", ["the next record", "the ticker"])
async def test_a_full_partition_is_held_until_it_has_room(full: Shell, by: str) -> None:
    full.deliver(HIGH, request("h"))
    await full.turns()
    assert full.held == [HOLD], "said once"
    assert "h" in full.running()
    for n in range(20):
        full.finish(f"r{n}")
    if by == "the ticker":
        async with full.ticking():
            await wait_until_async(lambda: full.held == [HOLD, frozenset()])
    else:
        await full.turns()
        full.deliver(HIGH, request("h2"))
        await full.turns()
    assert full.held == [HOLD, frozenset()]


async def test_a_pause_outlives_an_assignment_and_ends_with_the_reason_for_it(full: Shell) -> None:
    full.assign((LOW, 0), generation=2)
    assert full.held == [HOLD], "it holds still, and is not told twice"
    full.assign((LOW, 0), generation=3, fenced=True)
    assert full.held == [HOLD, frozenset()]


# -- assignments


async def test_an_assignment_forgets_what_was_not_taken(shell: Shell) -> None:
    shell.intake.unknown = {1}
    await shell.take(request("a"), request("b"))
    await stay_away(shell)
    assert shell.worker.registry_waits
    shell.assign((HIGH, 0), (HIGH, 1), generation=2)
    assert not shell.worker.registry_waits
    await shell.turns()
    assert shell.given_back == [(LOW, 0)], "its room is free for the new assignment"
    assert not shell.flow.works
    assert {one.args[0] for one in shell.refetches.cancel.mock_calls} == {(LOW, 0)}, (
        "of partitions that are gone nothing is read again"
    )


async def test_waiting_records_of_a_kept_partition_are_read_again(shell: Shell) -> None:
    shell.intake.unknown = {1}
    await shell.take(request("a"), request("b"))
    shell.assign((HIGH, 0), (LOW, 0), generation=2)
    shell.intake.unknown = set()
    shell.now += SLOW_TICK_S
    shell.ends.clear()
    await shell.take(request("a"), request("b"))
    assert [work.request_id for work in shell.flow.works.values()] == ["a", "b"], "a is held already, b is new"
    assert not shell.refetches.cancel.called


async def test_nothing_of_released_work_is_published(shell: Shell) -> None:
    await shell.run(request("r", stream=True))
    run_id = next(iter(shell.engine.runs))
    shell.engine.say("words")  # its chunk is carried out in the next turn, which comes after the assignment
    shell.assign((HIGH, 0), generation=2)
    await shell.turns()
    assert shell.broker.results() == []
    assert shell.engine.cancelled == [run_id], "its engine is told still"


# -- faults of ours


async def test_a_fault_breaks_the_worker_down_once(shell: Shell) -> None:
    await shell.run(request("a"))
    shell.intake.fault = ZeroDivisionError("a fault of ours")
    await shell.take(request("b"))
    assert shell.on_broken.call_count == 1
    assert shell.worker.broken
    shell.intake.fault = None
    shell.deliver(LOW, request("c"))
    shell.worker.changed()
    await shell.turns()
    assert shell.on_broken.call_count == 1
    assert shell.running() == ["a"], "nothing is taken or started any more"
    assert shell.intake.looked_at == [(LOW, 0), (LOW, 1)]


# -- the journal


@pytest.mark.parametrize("broken", [True, False])
async def test_only_work_of_a_broken_worker_counts_as_a_death(shell: Shell, broken: bool) -> None:
    await shell.run(request("a"))
    shell.journal.flush()
    shell.worker.break_down() if broken else shell.worker.stop_taking()
    shell.worker.hand_back()
    await shell.turns()
    shell.journal.close()
    assert broken or not shell.flow.works
    assert shell.deaths_next_life(0, "a") == broken


@pytest.mark.parametrize("inline", [True, False])
async def test_the_journal_has_a_start_before_an_engine_outside_this_process_does(shell: Shell, inline: bool) -> None:
    """An inline engine runs in this process: its start is written with the next flush."""
    shell.engine.prepares_inline = inline
    shell.up(inline=inline)
    shell.deliver(LOW, request("a"))
    await wait_until_async(lambda: shell.engine.runs)
    written = (shell.folder / "journal").read_text()
    assert ("a" in written.split()) is not inline


class SlowDisk:
    """Each write of the journal waits in its thread until `answers` is set. One on the event loop fails at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers, self.on_loop, self._write = threading.Event(), 0, os.write
        monkeypatch.setattr(journal_module.os, "write", self.write)

    def write(self, file: int, data: bytes) -> int:
        if threading.current_thread() is threading.main_thread():
            self.on_loop += 1
        else:
            assert self.answers.wait(60)
        return self._write(file, data)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk(monkeypatch)
    yield disk
    disk.answers.set()


async def test_a_start_waits_for_the_disk_and_the_loop_does_not(shell: Shell, slow_disk: SlowDisk) -> None:
    shell.engine.prepares_inline = False
    await shell.run(request("a"), request("cancelled"), inline=False)
    await wait_until_async(lambda: len(shell.running()) == 2)
    shell.worker.on_commands([command("cancel", "cancelled")])
    await shell.turns()
    assert (slow_disk.on_loop, len(shell.engine.runs)) == (0, 0)
    assert shell.broker.ended() == {"cancelled": "cancelled"}, "the loop does its other work"
    slow_disk.answers.set()
    await wait_until_async(lambda: shell.engine.runs)
    assert [run_id.partition("#")[0] for run_id in shell.engine.runs] == ["a"]
    assert "a" in (shell.folder / "journal").read_text().split()


async def test_a_disk_that_does_not_answer_counts_as_one_that_refuses(
    shell: Shell, slow_disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "DISK_S", 0.05)
    shell.engine.prepares_inline = False
    shell.up(inline=False)
    shell.deliver(LOW, request("a"))
    await wait_until_async(lambda: shell.engine.runs)
    assert shell.journal_writer.trouble is not None
    shell.deliver(LOW, request("b"))
    await wait_until_async(lambda: len(shell.engine.runs) == 2)
    slow_disk.answers.set()
    await wait_until_async(lambda: shell.journal_writer.trouble is None)
    await shell.journal_writer.close(orderly=False)
    assert (slow_disk.on_loop, shell.deaths_next_life(0, "a"), shell.deaths_next_life(1, "b")) == (0, 1, 1)


@pytest.mark.parametrize("stage", [Stage.PUBLISHING, Stage.RETRYING])
async def test_work_between_its_run_and_its_outcome_is_no_death(shell: Shell, stage: Stage) -> None:
    await shell.run(request("a"))
    shell.journal.flush()
    shell.broker.acknowledges = False
    if stage is Stage.PUBLISHING:
        shell.engine.finish()
    else:
        shell.engine.fail(EngineFailed("try it again"), again=True)
    await shell.turns()
    assert shell.flow.works[(LOW, 0, 0)].stage is stage
    shell.journal.flush()
    assert shell.deaths_next_life(0, "a") == 0


async def test_earlier_deaths_count_until_the_broker_has_the_outcome(tmp_path: Path) -> None:
    life = CrashJournal(tmp_path / "journal")
    life.started((LOW, 0, 0), "a")
    life.close()
    shell = Shell(tmp_path)
    assert shell.journal.deaths((LOW, 0, 0), "a") == 1
    shell.assign((LOW, 0))
    await shell.run(request("a"))
    shell.broker.acknowledges = False
    await shell.end("a")
    shell.journal.flush()
    copy = tmp_path / "copy"
    copy.write_bytes((tmp_path / "journal").read_bytes())
    assert CrashJournal(copy).deaths((LOW, 0, 0), "a") == 1
    shell.broker.acknowledge()
    await shell.turns()
    shell.journal.flush()
    assert shell.deaths_next_life(0, "a") == 0


async def test_a_request_whose_outcome_breaks_the_worker_is_to_blame(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs no more, but without this it would break each worker that takes it."""
    await shell.run(request("a"), request("b"))
    await shell.end("b")
    monkeypatch.setattr(Outcomes, "terminal", Mock(side_effect=ZeroDivisionError("a fault of ours")))
    await shell.end("a")
    assert shell.on_broken.call_count == 1
    shell.journal.close()
    assert shell.deaths_next_life(0, "a") == 1
    assert shell.deaths_next_life(1, "b") == 0


# -- stopping and time


async def test_a_stop_frees_the_room_of_waiting_batches(shell: Shell) -> None:
    shell.intake.unknown = {0}
    await shell.take(request("a"))
    shell.deliver(LOW, request("b"))
    assert shell.given_back == [(LOW, 0)]
    shell.worker.stop_taking()
    assert shell.given_back == [(LOW, 0), (LOW, 0)], "once each"


async def test_a_chunk_that_can_never_be_published_fails_its_request(shell: Shell) -> None:
    await shell.run(request("a", stream=True))
    shell.engine.say("\ud800")
    await shell.turns()
    assert shell.broker.ended() == {"a": "failed"}
    assert len(shell.engine.cancelled) == 1


async def test_work_wakes_the_ticker_that_found_nothing_held(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "IDLE_TICK_S", 3_600.0)
    shell.up()
    async with shell.ticking():
        for name in ("a", "b"):
            await asyncio.sleep(0)
            await shell.take(request(name))
            shell.now += 1.0
            await wait_until_async(lambda: any(topic == NAMES.status for topic, *_ in shell.broker.sent))
            shell.finish(name)
            await wait_until_async(lambda: not shell.flow.works)
            shell.broker.sent.clear()
