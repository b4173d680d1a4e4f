"""A replica: one loaded engine of a model as the flow sees it. Its room, who holds it, the memory it was granted."""

from __future__ import annotations

from enum import StrEnum

from penstock.processors.core.fleet.ledger import MemoryGrant
from penstock.processors.core.work.states import Stage
from penstock.processors.core.work.suspects import SuspectGroup
from penstock.processors.core.work.work import Work
from penstock.schemas.topics import CLASSES

LOOK_AHEAD = (4, 64)
"""The least and the most requests of a class whose prompts are counted before a slot is free for them."""


class ReplicaState(StrEnum):
    """Where a replica is in its life; one that is absent is not there at all."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"  # what runs may end, nothing new starts; it can be undone
    UNLOADING = "unloading"  # its process is ending


class Replica:
    """Slots and tokens in use are counted here; the engine only says its limits. Times are seconds of the flow's clock.

    `device` is None, and `bytes` 0, for an engine that takes no memory of this machine; `devices` are all that it runs
    on, each with as many bytes.
    """

    def __init__(
        self, model: str, number: int, grant: MemoryGrant | None = None, devices: tuple[str, ...] | None = None
    ) -> None:
        self.model = model
        self.number = number
        self.state = ReplicaState.LOADING
        self.grant = grant
        self.device = None if grant is None else grant.device
        self.devices = (() if self.device is None else (self.device,)) if devices is None else devices
        self.bytes = 0 if grant is None else grant.bytes
        self.least_bytes = self.bytes
        """Of its grant: it grows beyond that with what is measured, and comes back to it."""
        self.shared = False
        """Runs have had memory of their own on it: its peaks are not its own alone."""
        self.run_bytes = 0
        """What each run needs beyond that, at least."""
        self.klass: str | None = None
        """Of the newest run."""
        self.ending_for: str | None = None
        """The model that its room is wanted for."""
        self.reason: str | None = None
        """Why it is drained or unloaded."""
        self.made_of: object = None
        """What its engine was made of, see `ModelSpec.made_of`."""
        self.orders_revision = -1
        """The newest order to unload its model when its load began."""
        self.measured_bytes: int | None = None
        self.peak_bytes = 0
        """The most that was measured."""
        self.booked_bytes = self.bytes
        """What it was granted as it was loaded."""
        self.runs_begun = 0
        self.slots = 0
        self.tokens: int | None = None
        self.inline = False
        """Its engine prepares as it begins: nothing is counted beforehand, unless a conversation must be read."""
        self.used_tokens = 0
        self.holders: dict[Work, int] = {}
        """Works that hold a slot, with their tokens."""
        self.ahead: dict[Work, None] = {}
        """Works whose prompts are being counted or are known."""
        self.exclusive: SuspectGroup | None = None
        """While set, only these suspects may start here."""
        self.busy_until = 0.0
        self.load_began = 0.0
        self.ready_at = float("inf")
        self.last_used = float("-inf")
        self.stopped_at = float("-inf")
        """When a run or a prompt was last stopped here: what it left behind may kill the engine a moment later."""

    def up(self, slots: int, tokens: int | None, *, inline: bool, now: float) -> None:
        """Its engine is ready, with these limits."""
        self.state = ReplicaState.READY
        self.slots, self.tokens, self.inline = slots, tokens, inline
        self.ready_at = self.last_used = now
        self.busy_until = 0.0

    @property
    def free_slots(self) -> int:
        return self.slots - len(self.holders)

    @property
    def free_tokens(self) -> int | None:
        return None if self.tokens is None else self.tokens - self.used_tokens

    @property
    def look_ahead(self) -> int:
        return min(max(self.slots, LOOK_AHEAD[0]), LOOK_AHEAD[1])

    def could_hold(self, tokens: int) -> bool:
        """Whether a run of these tokens fits into its cache while nothing else runs."""
        return self.tokens is None or tokens <= self.tokens

    def take(self, work: Work, tokens: int, now: float) -> None:
        """Give a slot and tokens; the caller has seen that they are free."""
        self.ahead.pop(work, None)
        self.holders[work] = tokens
        self.runs_begun += 1
        self.used_tokens += tokens
        self.last_used = now
        self.klass = work.klass

    def give_back(self, work: Work) -> bool:
        """Take back what the work holds or had counted; whether it held a slot."""
        self.ahead.pop(work, None)
        tokens = self.holders.pop(work, None)
        if tokens is None:
            return False
        self.used_tokens -= tokens
        return True

    def running(self) -> int:
        return sum(work.stage is Stage.RUNNING for work in self.holders)

    def victims(self) -> list[Work]:
        """Who may be to blame if its engine has died."""
        running = [work for work in self.holders if work.stage is Stage.RUNNING]
        return running + [work for work in self.ahead if work.stage is Stage.PREPARING]

    def most_urgent(self) -> str | None:
        """The most urgent class that runs on it, or else the one that ran on it last."""
        return min((work.klass for work in self.holders), key=CLASSES.index, default=self.klass)

    @property
    def idle(self) -> bool:
        """Nothing runs on it, nor is about to."""
        return not self.holders and not self.ahead

    def __repr__(self) -> str:
        return f"<Replica {self.model}#{self.number} {self.state}>"
