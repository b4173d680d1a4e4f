"""Grammars are tried in processes that can be ended, before an engine's process compiles them."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from dataclasses import asdict
from typing import BinaryIO

from penstock.common.threads import in_daemon_thread
from penstock.processors.engines.guidance.compiling import TokenizerFacts
from penstock.processors.guarded.process import GuardedPool, ProcessEnded
from penstock.processors.guarded.wire import answered
from penstock.schemas.errors import EngineFailed, Overloaded

_PROGRAM = "penstock.processors.engines.guidance.trial"
COMPILE_CPU_S = 5
"""Seconds of processor time for one grammar."""
_MEMORY_BYTES = 4 << 30
"""Address space of a process that tries grammars, its tokenizer included."""
PROCESSES = 2
MOST_WAITING = 64


class TooComplex(Exception):
    """The grammar was not compiled within its time and memory."""


class Trials:
    """PROCESSES grammars are tried at a time, and at most MOST_WAITING wait for that. Used on one event loop."""

    def __init__(self, facts: TokenizerFacts) -> None:
        # A file without a name: the processes read it when they start, and it ends with the last of them.
        self._file = os.memfd_create("tokenizer")
        with open(self._file, "wb", closefd=False) as file:
            file.write(json.dumps(asdict(facts)).encode())
        self.pool = GuardedPool(_PROGRAM, (_MEMORY_BYTES, self._file), files=(self._file,))
        self._free = asyncio.Semaphore(PROCESSES)
        self._numbers = itertools.count()
        self._waiting = 0

    async def run(self, grammar: str) -> str | None:
        """What llguidance says against the grammar, or None. Raises TooComplex, Overloaded, EngineFailed."""
        if self._waiting >= MOST_WAITING:
            raise Overloaded("too many grammars are being compiled", retry_after_s=1)
        self._waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1
        try:
            return await self._tried(grammar.encode())
        finally:
            self._free.release()

    def close(self) -> None:
        """End all processes."""
        self.pool.close()
        os.close(self._file)

    async def _tried(self, grammar: bytes) -> str | None:
        job = {"size": len(grammar), "cpu_s": COMPILE_CPU_S}
        try:
            # A caller who is cancelled leaves a process at work: the pool ends it.
            with self.pool.process(f"{next(self._numbers)}") as process:
                return await in_daemon_thread(process.ask, job, [grammar], COMPILE_CPU_S, _error)
        except ProcessEnded as error:
            if error.not_started is not None:
                raise EngineFailed(f"no process for grammars could be started: {error.not_started}") from None
            raise TooComplex from None


def _error(answers: BinaryIO) -> str | None:
    error = answered(answers)["error"]
    if error is not None and not isinstance(error, str):
        raise ValueError("the process does not say what is wrong with a grammar")
    return error
