"""Simulated engines: what a prompt says happens, and faults happen. Slots and tokens are counted here once more."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from zlib import crc32

from penstock.processors.core.fleet.ledger import CannotLoad, OutOfMemory
from penstock.processors.core.work.published_prefix import PublishedPrefix
from penstock.processors.core.work.work import Work
from penstock.schemas.errors import (
    ContextLengthExceeded,
    EngineFailed,
    InternalError,
    Overloaded,
    PenstockError,
    StoreUnavailable,
)
from penstock.schemas.records import InferenceRequest
from simulation.plan import LaneSpec

if TYPE_CHECKING:
    from simulation.workers import Life

MOST_WORDS = 12
LARGE_OUTPUT_BYTES = 1_000


def script_of(request: InferenceRequest) -> dict[str, Any]:
    """What the request's prompt tells the engine to do."""
    payload = request.payload
    if (told := request.metadata.get("script")) is not None:  # of a summary, which has no prompt
        return json.loads(told)
    text = payload["messages"][-1]["content"] if "messages" in payload else payload["input"][0]
    return json.loads(text)


def need_of(request: InferenceRequest) -> int:
    """Tokens of an engine's cache."""
    return int(script_of(request).get("need", 4))


def memory_of(request: InferenceRequest, spec: LaneSpec) -> int:
    """What is said that a run of it takes of the device. One that prepares as it begins says nothing before."""
    return 0 if spec.inline else int(script_of(request).get("mem", 0))


@dataclass(frozen=True, slots=True)
class Output:
    """What a run brings; the flow passes it on untouched."""

    text: str
    large: bool = False
    unwritable: bool = False
    """It can never be published as it is."""

    @property
    def size(self) -> int:
        """Bytes."""
        return LARGE_OUTPUT_BYTES if self.large else 10


@dataclass(slots=True, eq=False)
class EngineRun:
    """A run, and the text that it has produced so far."""

    work: Work
    run_id: str
    name: str
    need: int
    memory: int
    epoch: int
    attempt: int
    cancelled: bool = False
    over: bool = False
    words: int = 0
    text: str = ""
    tokens: list[int] = field(default_factory=list[int])
    ends: set[tuple[int, int]] = field(default_factory=lambda: {(0, 0)})
    """Characters and tokens up to the end of each piece: a chunk begins and ends at such a place."""

    def continues(self, told: PublishedPrefix) -> None:
        """Begin behind the output of earlier attempts."""
        self.words, self.text, self.tokens = len(told.text.split()), told.text, list(told.token_ids)
        self.ends = {(len(self.text), len(self.tokens))}

    def say(self, pieces: list[str], text: str) -> list[int]:
        """Produce text, and a token for each piece of it. Returns the tokens."""
        tokens = [crc32(f"{self.name}/{len(self.tokens) + at}".encode()) for at in range(len(pieces))]
        self.text += text
        self.tokens += tokens
        self.ends.add((len(self.text), len(self.tokens)))
        return tokens


class Engine:
    """One model's process of one worker. `alive` is the truth; the flow learns of a death a moment later."""

    def __init__(self, life: Life, spec: LaneSpec, replica: int) -> None:
        self.life = life
        self._world = life.world
        self._plan = life.cluster.plan
        name = f"{spec.name}#{replica}" if replica else spec.name
        self.name = name
        self._rng = life.world.stream(f"engine/{life.name}/{name}")
        self.spec = spec
        self.replica = replica
        self.alive = False
        self.device: str | None = None
        """Where it is loaded, or was the last time while its process is ending."""
        self.killer: Work | None = None
        """Whose prompt it died of the last time."""
        self.limit = spec.slots
        """Runs at once that a remote server takes now."""
        self._number = 0
        self._names = 0
        self.runs: dict[str, EngineRun] = {}

    def _fault(self, name: str, chance: float) -> bool:
        """Whether this fault happens now."""
        drawn = self._rng.random() < chance
        if drawn and self._plan.has(name) and not self.life.cluster.calm:
            self._world.fault(name, f"{self.life.name} {self.name}")
            return True
        return False

    def _later(self, delay_s: float, label: str, do: Callable[..., None], *args: Any) -> None:
        """In this engine's present process; nothing happens if that has ended."""
        number = self._number
        self._world.at(delay_s, None, f"{self.life.name} {self.name} {label}", self._if_same, number, do, args)

    def _if_same(self, number: int, do: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self._number == number and not self.life.gone:
            do(*args)

    def _tell(self, label: str, do: Callable[..., None], *args: Any) -> None:
        """The worker hears of it, once it runs."""
        self._world.at(0.0, self.life, f"{self.life.name} {self.name} {label}", do, *args)

    # -- loading

    @property
    def used_bytes(self) -> int:
        """What its process really holds of its device."""
        if self.device is None:
            return 0
        said = sum(max(self.spec.run_bytes, run.memory) for run in self.runs.values())
        return self.spec.load_bytes + round(said * self.spec.run_lie)

    def load(self, device: str | None) -> None:
        self._number += 1
        self.device = device
        self._later(self.spec.load_s * self._rng.uniform(0.5, 2.0), "loaded", self._loaded)

    def _loaded(self) -> None:
        if self.spec.name in self.life.host.broken:
            self.device = None
            self._tell("load failed", self.life.load_failed, self, CannotLoad("the files are missing"))
            return
        for fault, chance, error in (
            ("load_failure", 0.5, EngineFailed("the engine did not start")),
            ("load_hopeless", 0.2, CannotLoad("the files are broken")),
        ):
            if self._fault(fault, chance):
                self.device = None
                self._tell("load failed", self.life.load_failed, self, error)
                return
        if self._plan.has("out_of_memory") and self._fault("out_of_memory", 0.2):
            self.device = None
            self._tell("load failed", self.life.load_failed, self, OutOfMemory("it took more than it was granted"))
            return
        self.alive = True
        self.limit = self.spec.slots
        self._tell("up", self.life.replica_up, self)

    def end(self) -> None:
        """The process is gone, with all that it ran."""
        self.alive, self.device = False, None
        self._number += 1
        self.runs.clear()

    def end_softly(self, delay_s: float) -> None:
        """As it is asked to; the worker hears when the process has ended."""
        self.alive = False
        self._number += 1
        self.runs.clear()
        self._later(delay_s, "has ended", self._ended)

    def _ended(self) -> None:
        self.device = None
        self._tell("gone", self.life.replica_gone, self)

    def die(self, killer: Work | None = None) -> None:
        """The process dies; the worker notices a moment later."""
        if self.alive:
            self.end()
            self.killer = killer
            delay = self._rng.choice([0.0, 0.001, 0.05])
            self._world.at(delay, self.life, f"{self.life.name} {self.name} died", self._died, self._number)

    def _died(self, number: int) -> None:
        """Nobody is told of it once the engine was asked to end: that it is gone says all."""
        if self._number == number:
            self.life.replica_down(self)

    # -- preparing

    def prepare(self, work: Work, run_id: str, mark: Any) -> None:
        slow = 20.0 if self._fault("engine_slow", 0.1) else 1.0
        self._later(slow * self._rng.uniform(0.0, 0.02), f"prepares {run_id}", self._prepare, work, run_id, mark)

    def _prepare(self, work: Work, run_id: str, mark: Any) -> None:
        if work.body is None:  # it was parked, and this run cancelled
            return
        request = work.request
        script = script_of(request)
        if script.get("die") == "prepare":
            self.life.cluster.truth.killed(work)
            self.die(work)
            return
        error: PenstockError | None = None
        again = True
        if self.spec.tokens is not None and need_of(request) > self.spec.tokens:
            error, again = ContextLengthExceeded("longer than the model's window"), False
        elif self.life.cluster.store.gives_nothing(self._world.now) and crc32(work.request_id.encode()) % 3 == 0:
            error = StoreUnavailable("the store is away")  # every third names an image that lies there
        elif self._fault("prepare_refused", 0.15):
            again = self._rng.random() < 0.7
            error = (Overloaded if self._rng.random() < 0.5 else EngineFailed)("not now")
        if error is not None:
            self._tell("refuses", self.life.refused, work, run_id, error, again)
        else:
            memory = memory_of(request, self.spec)
            self._tell("prepared", self.life.prepared, work, run_id, need_of(request), mark, memory)

    # -- running

    @staticmethod
    def goes_on(run_id: str) -> bool:
        """Whether it can go on from what was told: two of three runs can."""
        return crc32(run_id.encode()) % 3 > 0

    def start(self, work: Work, run_id: str, told: PublishedPrefix | None = None) -> None:
        """The caller has seen that it is alive. The run says first what was `told`, and nobody hears it again."""
        self._names += 1
        name = f"{self.life.name}.{self.name}.{self._number}.{self._names}"
        memory = memory_of(work.request, self.spec)
        run = EngineRun(work, run_id, name, need_of(work.request), memory, work.epoch, work.attempt)
        if told is not None:
            self.life.cluster.checks.continues(work, told)
            run.continues(told)
        self.runs[run_id] = run
        self.life.cluster.truth.run_begins(run)
        self.life.cluster.checks.engine_starts(self, run)
        script = script_of(work.request)
        slow = 8.0 if self._fault("engine_slow", 0.1) else 1.0
        pace = self.spec.speed_s * slow * self._rng.uniform(0.7, 1.3)
        if self._fault("engine_hang", 0.06):
            return
        if self._fault("engine_death", 0.04):
            self._later(pace * self._rng.randint(0, 5), "is about to die", self.die)
        if self._is_remote and self._fault("remote_server", 0.2):
            self._later(pace, f"turns {name} away", self._turn_away, run)
            return
        if self._fault("engine_busy", 0.1):
            self._tell("busy", self.life.replica_busy, self, 0.2)
        self._later(pace, f"says {name}", self._word, run, script, pace, int(script.get("n", 3)))

    @property
    def _is_remote(self) -> bool:
        return self._plan.has("remote_server") and not self.spec.load_bytes

    def _turn_away(self, run: EngineRun) -> None:
        """The server answers 429: it takes fewer runs at once from now on, and none for a while."""
        if not run.cancelled:
            self._end(run)
            self._limit(max(1, self.limit // 2))
            self._tell("busy", self.life.replica_busy, self, self._rng.choice([0.1, 0.5, 2.0]))
            self._tell(f"turned {run.name} away", self.life.turned_away, run.work, run.run_id)

    def _limit(self, slots: int) -> None:
        if slots != self.limit:
            self.limit = slots
            self._tell(f"takes {slots} runs", self.life.replica_limits, self, slots)

    def _word(self, run: EngineRun, script: dict[str, Any], pace: float, words: int) -> None:
        if run.over or (run.cancelled and not self._fault("engine_late_words", 1.0)):
            return
        at = run.words
        if at == script.get("at", 1) and self._disturbed(run, script):
            return
        if at >= words or at >= MOST_WORDS:
            self._finish(run, script)
            return
        run.words += 1
        self._say(run, f"{run.name}/{at} ")
        self._later(pace, f"says {run.name}", self._word, run, script, pace, words)

    def _say(self, run: EngineRun, word: str) -> None:
        """In one token or two. Of some words the first token has no text yet, as of a character of many bytes."""
        halves = [word[:2], word[2:]]
        match crc32(word.encode()) % 4:
            case 0:
                deltas = [([""], ""), ([word], word)]
            case 1:
                deltas = [(halves, word)]
            case _:
                deltas = [([word], word)]
        for pieces, text in deltas:
            tokens = run.say(pieces, text)
            self._tell(f"says {run.name}", self.life.delta, run.work, run.run_id, text, tokens, pieces)

    def _disturbed(self, run: EngineRun, script: dict[str, Any]) -> bool:
        """What the prompt, or a fault, does to the run at this word; whether the run is over."""
        match script.get("die"):
            case "run" if not run.cancelled:
                self.life.cluster.truth.killed(run.work)
                self.die(run.work)
                return True
            case "worker" if not run.cancelled:
                self.life.cluster.kill_worker(self.life, "a prompt")
                return True
            case _:
                pass
        if script.get("hang"):
            return True
        if self._fault("engine_failure", 0.15):
            self._end(run)
            error = self._rng.choice([EngineFailed, Overloaded, InternalError])("the run failed")
            self._tell("fails", self.life.failed, run.work, run.run_id, error, self._rng.random() < 0.7)
            return True
        if self._plan.has("out_of_memory") and self._fault("out_of_memory", 0.05):
            self._tell("ran out of memory", self.life.out_of_memory, self)
        if self._fault("engine_garbage", 0.08):
            self._tell("garbage", self.life.garbage, run.work, run.run_id)
        return False

    def _finish(self, run: EngineRun, script: dict[str, Any]) -> None:
        self._end(run)
        if self._is_remote:
            self._limit(min(self.spec.slots, self.limit + 1))
        unwritable = self._fault("engine_garbage", 0.05)
        output = Output(run.text, bool(script.get("large")), unwritable)
        self._tell(f"finishes {run.name}", self.life.finished, run.work, run.run_id, output)

    def _end(self, run: EngineRun) -> None:
        run.over = True
        if self.runs.get(run.run_id) is run:
            del self.runs[run.run_id]

    def cancel(self, run_id: str) -> None:
        run = self.runs.pop(run_id, None)
        if run is not None:
            run.cancelled = True
