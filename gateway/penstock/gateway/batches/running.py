"""Running one batch, in the process that holds its lease: check the input, run the lines, write the files.

All of it can be done again from what the store holds: lines that were submitted are found under their ids, parts that
were written are not run again, files are written over.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import IO, ParamSpec, TypeVar

from penstock.common.artifacts import Artifact, ArtifactStore
from penstock.common.clock import now_ms
from penstock.common.tasks import set_within
from penstock.common.tracing import STATUS, Attributes
from penstock.gateway.batches.checking import Checking, Part
from penstock.gateway.batches.keeping import BatchStore, Lease
from penstock.gateway.batches.leases import BEAT_S
from penstock.gateway.batches.line_runs import LineEnd, LineRuns, is_for_now
from penstock.gateway.batches.records import Batch, Counts, Stop, batch_name
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.limits.callers import Caller
from penstock.gateway.routes.line_reader import Line, LineReader
from penstock.gateway.routes.window import Budget, Window
from penstock.gateway.service.service import GatewayService
from penstock.gateway.traces import end_batch
from penstock.schemas.errors import InternalError, NotFound, PenstockError

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

IN_MEMORY_BYTES = 64 * 1024
"""So much of a part's answers is in memory; the rest lies in a temporary file beside the view's."""
RETRY_S = 1.0
END_S = 0.5
"""Between looks for lines to cancel."""
LINES_AT_ONCE, BYTES_AT_ONCE = 50, 256 * 1024
"""Lines that are submitted together: others on the loop wait meanwhile. A larger one is submitted alone."""


class LeaseLost(Exception):
    """Another gateway runs the batch now."""


class OpenPart:
    """A part whose lines run: what they ended with, in any order."""

    def __init__(self, number: int, lines: int, folder: str) -> None:
        self.number = number
        self.left = lines
        self.news = asyncio.Event()
        self.counts = Counts()
        self.answers: IO[bytes] = tempfile.SpooledTemporaryFile(IN_MEMORY_BYTES, dir=folder)  # noqa: SIM115
        self.errors: IO[bytes] = tempfile.SpooledTemporaryFile(IN_MEMORY_BYTES, dir=folder)  # noqa: SIM115

        self._unwritten: list[tuple[Line, LineEnd]] = []

    def add(self, line: Line, end: LineEnd) -> None:
        self._unwritten.append((line, end))
        self.counts += end.counts
        self.left -= 1
        self.news.set()

    async def write(self) -> Sequence[Line]:
        """Write what has ended, in a thread, once there is something. The lines."""
        await self.news.wait()
        self.news.clear()
        written, self._unwritten = self._unwritten, []

        def write() -> None:
            for _, end in written:
                (self.answers if end.completed else self.errors).write(end.content)

        await asyncio.to_thread(write)
        return [line for line, _ in written]

    @property
    def is_whole(self) -> bool:
        """All of its lines have ended, and are written."""
        return not (self.left or self._unwritten)

    def close(self) -> None:
        self.answers.close()
        self.errors.close()


class BatchRun:
    """One batch at this gateway. `run` returns when it has ended."""

    def __init__(
        self,
        batch: Batch,
        lease: Lease,
        keeping: BatchStore,
        service: GatewayService,
        allowances: Allowances,
        caller_now: Callable[[], Caller | None],
        share: Callable[[], int],
        budget: Budget | None = None,
        on_line: Callable[[LineEnd], None] = lambda _: None,
    ) -> None:
        """`caller_now`: None when the key was taken back. `share`: lines that this batch may have in flight. `budget`:
        their bytes, with those of the gateway's other batches. `on_line` hears of each line that ended.
        """
        self.batch = batch
        self.lease = lease
        self.woken = asyncio.Event()
        self._keeping = keeping
        self._service = service
        self._caller_now = caller_now
        self._caller = caller_now() or Caller(tenant=batch.tenant)
        self._stop = None if batch.stop is None else Stop(batch.stop)
        # The former holder of the lease may have checked the input, and begun, since the batch was read.
        resumed = batch.status != "validating" or lease.number > 1
        self._lines = LineRuns(batch, service, allowances, lambda: self._caller, self._stop_now, resumed=resumed)
        self._window = Window(share, budget)
        self._on_line = on_line
        self._folder = str(service.settings.gateway.view_path.parent)
        self._closed = Counts()
        self._open: dict[int, OpenPart] = {}
        self._commanded: set[str] = set()
        self._written: Batch | None = batch

    async def run(self) -> None:
        """Raises LeaseLost, and Stopping when the gateway stops."""
        if (ended := await self._stored(self._keeping.has_ended, self.batch.key)) is not None:
            await self._stored(self._keeping.end, ended)
            return
        await self._look()
        try:
            async with asyncio.TaskGroup() as group:
                beside = [group.create_task(self._beat()), group.create_task(self._end_flying())]
                await self._work()
                for task in beside:
                    task.cancel()
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        finally:
            self._window.close()
            self._lines.close()
            for part in self._open.values():
                part.close()

    async def _work(self) -> None:
        if self.batch.status == "validating":
            await self._check()
        if not self.batch.is_final and self.batch.parts:
            await self._run_lines()
            self._count()
            self.batch = replace(self.batch, status="finalizing", finalizing_at=_now_s(), in_flight=0, stop=self._stop)
            await self._stored(lambda: self._keeping.write(self.batch))
            output = await self._write_file("output", "out")
            errors = await self._write_file("error", "err")
            self.batch = replace(self.batch, output_file_id=output, error_file_id=errors)
        if not self.batch.is_final:
            self.batch = self.batch.ended(self._stop, _now_s())
        await self._stored(lambda: self._keeping.end(self.batch))
        status, lines, name = self.batch.status, self.batch.total, batch_name(self.batch.batch_id)
        facts: Attributes = {"penstock.batch_id": name, STATUS: status, "penstock.lines": lines}
        end_batch(*self.batch.key, self.batch.endpoint, self.batch.created_ms, facts)
        logger.info("batch.ended batch=%s status=%s lines=%d", name, status, lines)

    # -- the input

    async def _check(self) -> None:
        """Read the whole file once: its parts are known then, or its errors fail the batch."""
        checking = Checking(self.batch.endpoint)
        reader = LineReader(self._service.settings.gateway.max_body_bytes)
        artifact = await self._input()
        if artifact is None:
            return
        pieces, read = self._service.artifacts.pieces(artifact), 0

        def check_piece(_: ArtifactStore) -> int:
            piece = next(pieces, b"")
            checking.add(reader.feed(piece) if piece else reader.close(), read + len(piece))
            return len(piece)

        try:
            while self._stop is None and (size := await self._service.stored(self.batch.tenant, check_piece)):
                read += size
        except (NotFound, InternalError):  # deleted, or not what was uploaded
            self._stop = self._stop or Stop.NO_INPUT
        if self._stop is not None:
            return
        checking.close()
        if checking.errors:
            self.batch = replace(
                self.batch,
                status="failed",
                failed_at=_now_s(),
                errors=tuple(checking.errors),
                total=checking.total,
            )
            return
        self.batch = replace(
            self.batch,
            status="in_progress",
            in_progress_at=_now_s(),
            total=checking.total,
            parts=tuple(checking.parts),
        )
        await _patiently(self._look)  # the last moment to learn that another gateway runs it
        await self._stored(lambda: self._keeping.write(self.batch))

    async def _input(self) -> Artifact | None:
        """Sets the stop if it is gone."""
        found = await self._stored(self._service.artifacts.peek, self.batch.tenant, self.batch.input_file_id)
        if found is None:
            self._stop = self._stop or Stop.NO_INPUT
        return found

    async def _lines_of(self, part: Part) -> list[Line] | None:
        """The lines of a part; None if the input is gone."""
        artifact = await self._input()
        if artifact is None:
            return None

        def read() -> list[Line]:
            reader = LineReader(part.end - part.start, number=part.number, start=part.start)
            pieces = self._service.artifacts.pieces(artifact, part.start, part.end)
            return [*(line for piece in pieces for line in reader.feed(piece)), *reader.close()]

        try:
            return await self._stored(read)
        except (NotFound, InternalError):
            self._stop = self._stop or Stop.NO_INPUT
            return None

    # -- the lines

    async def _run_lines(self) -> None:
        parts = await self._stored(self._keeping.parts, self.batch.key)
        self._closed = sum(parts.values(), Counts())
        # What an earlier runner submitted is known then, and is not asked for again.
        await _patiently(self._service.lookups.catch_up)
        async with asyncio.TaskGroup() as group:
            following = group.create_task(self._lines.follow())
            async with asyncio.TaskGroup() as work:
                for number, part in enumerate(self.batch.parts):
                    if number in parts:
                        continue
                    lines = await self._lines_of(part)
                    if lines is None:
                        break
                    opened = self._open[number] = OpenPart(number, len(lines), self._folder)
                    work.create_task(self._keep_part(opened))
                    async for some in self._in_flight(lines):
                        work.create_task(self._lines.submit(some, partial(self._ended, opened)))
            following.cancel()

    async def _in_flight(self, lines: Sequence[Line]) -> AsyncIterator[Sequence[Line]]:
        """The lines in groups, as the window takes them."""
        at = 0
        while at < len(lines):
            size = _size(lines[at])
            await self._window.take(size)
            end = at + 1
            for line in lines[end : at + LINES_AT_ONCE]:
                size += _size(line)
                if size > BYTES_AT_ONCE or not self._window.take_nowait(_size(line)):
                    break
                end += 1
            yield lines[at:end]
            at = end
            await asyncio.sleep(0)  # they are submitted before more are taken

    def _ended(self, part: OpenPart, line: Line, end: LineEnd) -> None:
        part.add(line, end)
        self._on_line(end)

    async def _keep_part(self, part: OpenPart) -> None:
        """Write what its lines ended with, and the part when all have ended. A line keeps its room until then."""
        while not part.is_whole:
            for line in await part.write():
                self._window.give(_size(line))
        await self._stored(self._keeping.put_part, self.batch.key, part.number, part.answers, part.errors, part.counts)
        self._closed += part.counts
        del self._open[part.number]
        part.close()

    # -- the files

    async def _write_file(self, kind: str, name: str) -> str | None:
        """The id of the file; None if nothing is in it."""
        batch = self.batch
        file_id = batch.result_file_id(kind)
        pieces = lambda: self._keeping.lines_of(batch.key, name, len(batch.parts))  # noqa: E731
        if await self._stored(lambda: next(pieces(), None)) is None:
            return None

        async def write() -> None:
            kept = await self._service.artifacts.put_stream(
                batch.tenant,
                self._read(pieces()),
                media_type="application/jsonl",
                ttl_s=batch.output_ttl_s,
                artifact_id=file_id,
                purpose="batch_output",
                filename=f"{batch.batch_id}_{kind}.jsonl",
                max_bytes=2**63,
            )
            logger.info("batch.file batch=%s kind=%s bytes=%d", batch_name(batch.batch_id), kind, kept.size_bytes)

        await _patiently(write)
        return file_id

    async def _read(self, pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
        while piece := await self._service.stored(self.batch.tenant, lambda _: next(pieces, b"")):
            yield piece

    # -- beside them

    async def _beat(self) -> None:
        """Hold the lease, notice what stops the batch, and write how far it is."""
        while True:
            await set_within(self.woken, BEAT_S)
            self.woken.clear()
            try:
                await self._look()
            except PenstockError as error:
                logger.warning("batch.beat_failed batch=%s reason=%s", batch_name(self.batch.batch_id), error)

    async def _look(self) -> None:
        """Raises LeaseLost, StoreUnavailable."""
        key, beat = self.batch.key, Lease(self.lease.number, uuid.uuid4().hex)

        def look() -> tuple[Lease | None, int | None]:
            held = self._keeping.lease(key)
            if held is not None and held.number == beat.number:
                self._keeping.renew(key, beat)
            return held, self._keeping.cancelled_at(key)

        held, cancelled_at = await self._service.stored(self.batch.tenant, lambda _: look())
        if held is None or held.number != self.lease.number:
            raise LeaseLost
        self.lease = beat
        self._note_stop(cancelled_at)
        self._count()
        if self.batch != self._written and self.batch.status != "validating":
            self._written = self.batch
            await self._service.stored(self.batch.tenant, lambda _: self._keeping.write(self.batch))

    def _stop_now(self) -> Stop | None:
        """Why no more lines are submitted; the key is looked at before each."""
        if self._stop is None and self._caller_now() is None:
            self._stop = Stop.REVOKED
        return self._stop

    def _note_stop(self, cancelled_at: int | None) -> None:
        caller = self._caller_now()
        if caller is not None:
            self._caller = caller
        if cancelled_at is not None and self.batch.cancelling_at is None:
            self.batch = replace(self.batch, cancelling_at=cancelled_at)
        if self._stop is None and self.batch.status not in ("finalizing",):
            if cancelled_at is not None:
                self._stop = Stop.CANCELLED
            elif caller is None:
                self._stop = Stop.REVOKED
            elif _now_s() >= self.batch.expires_at:
                self._stop = Stop.EXPIRED

    async def _end_flying(self) -> None:
        """Once the batch is stopped, cancel what was submitted. A line that ends otherwise is kept as it ended.

        Beside the beats: the commands may take longer than the lease lasts.
        """
        while True:
            flying: list[str] = []
            if self._stop in (Stop.CANCELLED, Stop.REVOKED):
                flying = [one for one in self._lines.flying if one not in self._commanded]
            done: list[str] = []
            try:
                if flying:
                    control, tenant = self._service.control, self.batch.tenant
                    done = await control.abandon_some(tenant, flying, "its batch was cancelled")
            except PenstockError as error:
                logger.warning("batch.not_cancelled batch=%s reason=%s", batch_name(self.batch.batch_id), error)
            self._commanded.update(done)
            if not done:
                await asyncio.sleep(END_S)

    def _count(self) -> None:
        """Counts, and what the batch waits for if no line has ended since the last time."""
        counts = sum((part.counts for part in self._open.values()), self._closed)
        stands = counts == self.batch.counts and bool(self._window.lines)
        self.batch = replace(
            self.batch,
            counts=counts,
            in_flight=len(self._lines.flying),
            waiting_for=self._waiting_for() if stands else None,
        )

    def _waiting_for(self) -> dict[str, str | None] | None:
        oldest = next(iter(self._lines.flying), None)
        if oldest is None:
            refusal = self._lines.refusal
            return None if refusal is None else {"reason": refusal.code, "detail": refusal.message}
        entry = self._service.lookups.peek(self.batch.tenant, oldest)
        if entry is None:
            return None
        shown = self._service.facts.requests([entry])[0]
        waiting = shown.get("waiting_for")
        return None if waiting is None else {"reason": waiting["reason"], "detail": shown.get("detail")}

    async def _stored(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """What the store does, on a thread of the tenant's; waits while the store is away.

        `self.batch` may change meanwhile: what is to be the newest is read by `work`.
        """
        return await _patiently(lambda: self._service.stored(self.batch.tenant, lambda _: work(*args, **options)))


async def _patiently(work: Callable[[], Awaitable[T]]) -> T:
    """Again and again while the store or the broker is away."""
    while True:
        try:
            return await work()
        except PenstockError as error:
            if not is_for_now(error):
                raise
            logger.warning("batch.waits reason=%s", error)
            await asyncio.sleep(error.retry_after_s or RETRY_S)


def _size(line: Line) -> int:
    return len(line.content or b"")


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


def _now_s() -> int:
    return now_ms() // 1000
