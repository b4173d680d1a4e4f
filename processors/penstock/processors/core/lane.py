"""A lane: one model's engine as the flow sees it. How much room it has, who holds it, when it may be loaded again."""

from __future__ import annotations

from enum import StrEnum

from penstock.processors.core.ledger import CannotLoad, MemoryShort
from penstock.processors.core.states import Stage
from penstock.processors.core.suspects import Group
from penstock.processors.core.work import Work
from penstock.schemas.errors import EngineFailed, InternalError, PenstockError
from penstock.schemas.topics import CLASSES

MEMORY_POLL_S = 1.0
"""How often a load that found too little memory free is tried again."""
MAX_LOAD_FAILURES = 3
"""So often a load may fail in a row before those who wait for it are told; then each further failure tells them."""
QUIET_DEATHS = 16
"""So many deaths in a row are followed by a restart at once: finding the culprit among many takes some."""
LOOK_AHEAD = (4, 64)
"""The least and the most requests of a class whose prompts are counted before a slot is free for them."""


class LaneState(StrEnum):
    """Whether the lane's engine can take runs."""

    ABSENT = "absent"
    LOADING = "loading"
    UP = "up"


class Lane:
    """Slots and tokens in use are counted here; the engine only says its limits."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = LaneState.ABSENT
        self.wanted = False
        """It was up: it is loaded again when its engine dies, whether somebody waits or not."""
        self.was_up = False
        self.slots = 0
        self.tokens: int | None = None
        self.inline = False
        """Its engine prepares as it begins: nothing is counted beforehand, unless a conversation must be read."""
        self.used_tokens = 0
        self.holders: dict[Work, int] = {}
        """Works that hold a slot, with their tokens."""
        self.ahead: dict[Work, None] = {}
        """Works whose prompts are being counted or are known."""
        self.parked: dict[str, int] = dict.fromkeys(CLASSES, 0)
        """Requests by class whose bytes are not here."""
        self.exclusive: Group | None = None
        """While set, only these suspects may start."""
        self.not_before = 0.0
        self.busy_until = 0.0
        self.failures = 0
        self.deaths = 0
        self.short = False
        """Its newest load found too little memory free: it waits for that."""
        self.load_span = (0.0, 0.0)
        self.fail_through = -1
        self.fail_error: PenstockError | None = None
        self.look_due = False
        self.stopped_at = float("-inf")
        """When a run or a prompt was last stopped here: what it left behind may kill the engine a moment later."""

    @property
    def free_slots(self) -> int:
        return self.slots - len(self.holders)

    @property
    def free_tokens(self) -> int | None:
        return None if self.tokens is None else self.tokens - self.used_tokens

    @property
    def look_ahead(self) -> int:
        return min(max(self.slots, LOOK_AHEAD[0]), LOOK_AHEAD[1])

    def take(self, work: Work, tokens: int) -> None:
        """Give a slot and tokens; the caller has seen that they are free."""
        self.ahead.pop(work, None)
        self.holders[work] = tokens
        self.used_tokens += tokens

    def give_back(self, work: Work) -> bool:
        """Take back what the work holds or had counted; whether it held a slot."""
        self.ahead.pop(work, None)
        tokens = self.holders.pop(work, None)
        if tokens is None:
            return False
        self.used_tokens -= tokens
        return True

    def running(self) -> int:
        """Works that are on the engine."""
        return sum(work.stage is Stage.RUNNING for work in self.holders)

    def loading_ms(self, since: float, until: float) -> int:
        """How much of a time the newest load of this model took."""
        began, ended = self.load_span
        return max(0, round((min(until, ended) - max(since, began)) * 1000))

    @property
    def lost(self) -> bool:
        """It was up, its engine died, and it cannot be loaded again."""
        return self.was_up and self.failures >= MAX_LOAD_FAILURES

    # -- loading

    def load(self, now: float) -> None:
        """Its model is being loaded from now on."""
        self.state = LaneState.LOADING
        self.load_span = (now, float("inf"))

    def up(self, slots: int, tokens: int | None, *, inline: bool, now: float) -> None:
        """Its model is loaded, with these limits."""
        if self.state is LaneState.LOADING:
            self.load_span = (self.load_span[0], now)
        self.state, self.wanted, self.was_up = LaneState.UP, True, True
        self.slots, self.tokens, self.inline = slots, tokens, inline
        self.failures, self.short, self.busy_until, self.fail_error = 0, False, 0.0, None

    def down(self, now: float, *, with_work: bool) -> None:
        """Its engine died. With work on it the work is the first suspect, so it is started again at once."""
        self.state = LaneState.ABSENT
        self.deaths += 1
        quiet = QUIET_DEATHS if with_work else 1
        self.not_before = now if self.deaths <= quiet else now + min(30.0, 0.5 * 2 ** min(self.deaths - quiet, 8))

    def survived(self) -> None:
        """A run has ended well: whatever made it die is not here now."""
        self.deaths = 0

    def load_failed(self, error: BaseException, now: float) -> PenstockError | None:
        """Plan the next try. Returns the error for those who wait, once waiting is of no use any more."""
        self.state = LaneState.ABSENT
        self.load_span = (self.load_span[0], now)
        self.short = isinstance(error, MemoryShort)
        if self.short:
            self.not_before = now + MEMORY_POLL_S
            return None
        self.not_before = now + min(30.0, 0.5 * 2 ** min(self.failures, 8))
        self.failures += 1
        hopeless = isinstance(error, CannotLoad) or not isinstance(error, EngineFailed)
        if not hopeless and self.failures < MAX_LOAD_FAILURES:
            return None
        return error if isinstance(error, PenstockError) else InternalError(f"{self.name} could not be loaded")
