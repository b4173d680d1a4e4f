"""What one seed simulates: how many workers, which models, which faults. Drawn from the seed; made smaller to shrink.

Each seed turns a random part of the faults on (swarm testing, Groce 2012): some defects only show where others are off.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import get_args

from penstock.processors.core.fleet.residents import ModelSpec
from penstock.processors.core.fleet.views import PlacementSettings
from penstock.processors.core.queue.slack import SlackSettings
from penstock.processors.core.settings import FlowSettings
from penstock.processors.kafka.lost_logs import OnLostLog

FAULTS = (
    "crash",  # kill -9 of a worker, started again a little later
    "pause",  # SIGSTOP for longer than the group waits: a zombie when it goes on
    "short_pause",
    "cut",  # a worker's network, both ways, for longer than the group waits
    "restart",  # orderly stop and start
    "join",  # a worker more, later
    "outage",  # the broker is away
    "lost_commit_ack",
    "refused_commit",
    "late_ack",  # an acknowledgement was lost: the producer sends again, the log has it once
    "slow_broker",  # what is sent takes long, now and then
    "unknown_offsets",  # the coordinator cannot tell the committed offsets just now
    "skipped_batch",  # the consumer loses a delivery and goes on behind it
    "rewind",  # the consumer goes back to what is committed
    "truncated_batches",
    "markers",
    "lost_records",  # retention took what was read once already
    "engine_death",
    "engine_failure",
    "engine_hang",
    "engine_busy",
    "engine_garbage",
    "engine_late_words",
    "engine_slow",
    "load_failure",
    "load_hopeless",
    "foreign_memory",  # others use the devices too, more or less of them
    "sizes_lie",  # what is said of a model's memory is wrong by up to a half
    "size_failure",
    "unload",
    "engine_gone",  # it dies just when a run is put on it
    "prepare_refused",
    "begin_refused",
    "store_failed",
    "unmovable",
)
KINDS = (
    "plain",
    "stream",
    "line",
    "cross_class_line",
    "embedding",
    "poison_bytes",
    "poison_named",
    "killer",
    "killer_at_prepare",
    "worker_killer",
    "duplicate",
    "misplaced",
    "cancel",
    "reprioritize",
    "erase",
    "short_ttl",
    "short_timeout",
    "huge",
    "large_output",
    "unknown_model",
    "hungry",  # it asks for much memory beyond what its model holds
    "pause_and_desire",  # operators pause and resume, load, unload and pin
    "burst",
)
START_LATER = "start_later"
"""Some requests name a time to start. It is drawn beside the others."""

OPERATORS = (
    # What operators order is kept outside of workers, as on `inference.desired`: each life of a worker reads it first.
    "load_unload",
    "pin",
    "pause_model",
    "pause_class",
    "change_models",  # one is added, replaced or removed
    "standing_orders",  # some orders are kept to the end of the history
    "delete_conversation",
    "fork_conversation",
    "add_partitions",
    "rollout",  # workers are restarted with files that lack models which others have, or cannot load them, for a while
    # What other systems do.
    "registry_away",  # some records cannot be read for a while
    "store_away",  # artifacts: the store fails, or hangs, and comes back
    "remote_server",  # engines without memory of this machine turn runs away (429) and change their limits
    "out_of_memory",
    "retention",  # records vanish while their requests wait
    "moved_offsets",  # a tool commits offsets further on than the worker did
    "foreign_metadata",  # the metadata of a commit is no map of its offset
    "other_partitioner",  # a producer sends its duplicates to any partition
    "slack",  # slots are left free of low work
    "delete_records",  # all records of a log below an offset are deleted; gateways ask for the ends of what is lost
    "lose_end",  # a broker loses the end of a log whose records were acknowledged
    "unknown_pool",  # a producer names a pool that there is not
    "pause_suspects",  # some requests kill their workers; the model of one that must run by itself is paused for good
    # Chosen when topics were created.
    "sharded",  # all conversations share a topic
    "slow_copy",  # a worker's copy of it is behind, and who reads waits
    "churn",  # conversations are deleted again and again while clients write to them
)
LAYOUT = ("sharded", "slow_copy", "churn")
"""Of those, what seeds without operators have too, and what changes nothing else of a plan."""
SELDOM = frozenset({"pause_suspects"})
"""Half as often as others: a seed that has it has one worker only."""
CHECKS = (
    "reasons",  # what a waiting request says it waits for is true, and it starts when that is over
    "blame",  # the crash journal names only what runs
    "answers",  # an answer that stands in a conversation is its request's outcome
    "questions",  # an answer stands only where its question does
    "answers_of_letters",  # also of one that is dead-lettered
    "bytes_read_again",  # parked records that are read again keep to the share of their class and model
)
KNOWN_OPEN: dict[str, str] = {}
"""What is left out unless it is asked for by name, and why: a defect that is not mended yet."""

MEMORY_KINDS = ("own_memory",)
"""Its run takes memory beyond what its model holds, a little or nearly all that there is."""
DEVICE_BYTES = 100
FREE_SEEDS = 4
"""After one seed of each theme come so many without one."""
THEMES: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    # Faults and requests that together reach what chance alone seldom does.
    (("crash", "pause", "late_ack", "slow_broker"), ("line", "cancel", "short_ttl", "large_output")),
    (("crash", "restart", "slow_broker"), ("line", "cancel", "short_ttl", "large_output")),
    (("crash", "cut", "join", "late_ack"), ("line", "misplaced", "duplicate", "stream")),
    (("crash", "lost_records", "truncated_batches"), ("burst", "line", "cancel")),
    (("engine_death", "engine_gone"), ("killer", "killer_at_prepare", "line", "cross_class_line", "stream")),
    (("load_failure", "load_hopeless", "unload"), ("cross_class_line", "cancel", "short_ttl")),
    (("engine_failure", "engine_death", "engine_gone", "load_hopeless"), ("burst", "killer", "stream")),
    (("engine_failure", "prepare_refused"), ("cancel", "short_ttl", "stream")),
    (("engine_failure", "prepare_refused", "slow_broker"), ("cancel", "short_ttl", "line", "killer")),
    (("cut", "join", "restart", "late_ack", "slow_broker"), ("poison_bytes", "poison_named", "misplaced", "line")),
    (("cut", "pause", "engine_slow", "late_ack"), ("stream", "burst")),
    (("cut", "join", "pause", "restart", "slow_broker"), ("burst", "misplaced", "line")),
    (("engine_slow", "cut", "short_pause", "restart"), ("burst", "short_ttl", "embedding", "cancel")),
    (("prepare_refused", "engine_failure", "engine_slow"), ("line", "cross_class_line", "burst", "short_ttl")),
    (("load_hopeless", "engine_death", "engine_failure", "unload"), ("burst", "stream", "killer")),
    (("crash", "restart", "slow_broker", "pause"), ("line", "short_ttl", "cancel", "burst")),
    (("foreign_memory", "sizes_lie", "engine_death"), ("own_memory", "hungry", "stream", "line", "cancel")),
    (("foreign_memory", "sizes_lie", "load_failure", "crash"), ("hungry", "pause_and_desire", "killer", "line")),
)


OPERATOR_THEMES: tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    # Operators, faults and requests that together reach what chance alone seldom does.
    (("load_unload",), ("crash", "restart"), ("own_memory",)),
    (("load_unload", "pin", "out_of_memory"), ("foreign_memory",), ("hungry",)),
    (("pause_model", "pause_class"), ("crash", "pause"), ("worker_killer", "burst", "line")),
    (("pause_class", "slack", "standing_orders"), (), ("burst", "stream")),
    (("change_models",), ("restart",), ("cross_class_line", "burst", "cancel")),
    (("change_models", "pause_model", "standing_orders"), ("load_failure",), ("line", "short_ttl")),
    (("delete_conversation",), ("slow_broker", "late_ack"), ("line", "cancel")),
    (("remote_server",), ("crash", "engine_busy"), ("worker_killer", "burst", "line")),
    (("retention", "moved_offsets", "foreign_metadata"), ("crash", "cut", "restart"), ("burst", "duplicate")),
    (("other_partitioner",), ("cut", "join", "restart"), ("burst", "duplicate")),
    (
        ("registry_away", "store_away", "add_partitions"),
        ("crash", "cut"),
        ("large_output", "line", "duplicate", "short_ttl"),
    ),
)
EXTRA = "x0"
"""A model that is not configured: an operator may add it."""


@dataclass(frozen=True, slots=True)
class LaneSpec:
    """A model as each worker serves it."""

    name: str
    slots: int
    tokens: int | None
    inline: bool
    load_s: float
    speed_s: float
    """Seconds a token."""
    load_bytes: int = 0
    """What its engine really takes of a device; 0: none."""
    lie: float = 1.0
    """What is said of it, as a part of that."""
    run_bytes: int = 0
    """Said of each run, at least."""
    run_lie: float = 1.0
    """What a run really takes, as a part of what is said of it."""
    replicas: tuple[int, int] = (1, 1)
    """The least and the most."""
    keep_alive_s: float | None = None
    version: int = 0
    """Above 0: what an operator put in its place."""

    @property
    def source(self) -> str:
        return f"{self.name}/{self.version}"

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(
            model=self.name,
            devices=("simulated",) if self.load_bytes else (),
            min_replicas=self.replicas[0],
            max_replicas=self.replicas[1],
            keep_alive_s=self.keep_alive_s,
            source=self.source if self.version else "",
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a seed decides before it begins."""

    seed: int
    workers: int
    partitions: int
    requests: int
    tenants: int
    lines: int
    span_s: float
    """How long clients send."""
    lanes: tuple[LaneSpec, ...]
    settings: FlowSettings
    faults: frozenset[str]
    kinds: frozenset[str]
    latency_s: float
    records_a_turn: int
    tick_s: float
    commit_s: float
    endings: int
    """Ends under way at which a partition pauses."""
    devices: tuple[tuple[str, int, int], ...] = ()
    """Of each host: name, total bytes and those left to others."""
    observe_s: float = 0.5
    operators: frozenset[str] = frozenset()
    checks: frozenset[str] = frozenset()
    variants: tuple[LaneSpec, ...] = ()
    """Models that operators may add, or put in the place of others."""
    on_lost_log: OnLostLog = "beginning"

    def has(self, name: str) -> bool:
        return name in self.faults or name in self.kinds or name in self.operators

    @property
    def reports(self) -> bool:
        """Whether workers report what they serve: where some may lack what is asked for."""
        return any(map(self.has, ("rollout", "unknown_model", "change_models")))

    def lane_of(self, source: str) -> LaneSpec:
        """The model that an entry of the catalog speaks of."""
        return next(lane for lane in (*self.lanes, *self.variants) if lane.source == source)

    def smaller(self) -> Iterator[Plan]:
        """Plans that are this one with something left out, the biggest steps first."""
        if self.requests > 1:
            yield replace(self, requests=self.requests // 2)
        if self.workers > 1:
            yield replace(self, workers=self.workers - 1)
        for operator in sorted(self.operators):
            yield replace(self, operators=self.operators - {operator})
        for fault in sorted(self.faults):
            yield replace(self, faults=self.faults - {fault})
        for kind in sorted(self.kinds - {"plain"}):
            yield replace(self, kinds=self.kinds - {kind})
        if len(self.lanes) > 1:
            yield replace(self, lanes=self.lanes[:-1])
        if self.partitions > 1:
            yield replace(self, partitions=1)
        if self.tenants > 1:
            yield replace(self, tenants=1)
        if self.requests > 1:
            yield replace(self, requests=self.requests - 1)
        if len(self.devices) > 1:
            yield replace(self, devices=self.devices[:1])

    def describe(self) -> str:
        lanes = ", ".join(
            f"{lane.name}({lane.slots} slots, {lane.tokens} tokens{', inline' if lane.inline else ''})"
            for lane in self.lanes
        )
        return (
            f"{self.workers} workers, {self.partitions} partitions, {self.requests} requests, "
            f"{self.tenants} tenants; lanes {lanes};\n  faults {sorted(self.faults)};\n  requests {sorted(self.kinds)}"
            f";\n  operators {sorted(self.operators)}; checks {sorted(self.checks)}"
        )


def draw(seed: int, without: Collection[str] = KNOWN_OPEN) -> Plan:
    """The plan of a seed. What is left out changes nothing else of it."""
    plan = _with_operators(_draw(seed), without)
    later = frozenset({START_LATER} if Random(f"{seed}/{START_LATER}").random() < 0.3 else ())
    return replace(
        plan,
        faults=plan.faults.difference(without),
        kinds=(plan.kinds | later).difference(without),
        checks=frozenset(CHECKS).difference(without),
    )


def _with_operators(plan: Plan, without: Collection[str]) -> Plan:
    """A third of the seeds has none. They are drawn beside the rest of the plan, which is the same without them."""
    rng = Random(f"{plan.seed}/operators")
    intensity = rng.choice([0.0, 0.15, 0.4])
    drawn = {name: Random(f"{plan.seed}/operators/{name}").random() for name in OPERATORS if name not in LAYOUT}
    operators = {name for name in drawn if drawn[name] < intensity / (2 if name in SELDOM else 1)}
    faults, kinds = plan.faults, plan.kinds
    if intensity and rng.random() < 0.6:
        more, more_faults, more_kinds = rng.choice(OPERATOR_THEMES)
        operators |= set(more)
        faults, kinds = faults | set(more_faults), kinds | set(more_kinds)
    operators -= set(without)
    if "pause_suspects" in operators:
        operators.add("standing_orders")
        plan = replace(plan, workers=1)  # each host counts the deaths of its own workers
    rng = Random(f"{plan.seed}/variants")
    scarce = any(lane.load_bytes for lane in plan.lanes)
    variants = [
        replace(_with_memory(_lane(rng, name), rng, scarce=scarce, lies=False), version=version)
        for name in (*(lane.name for lane in plan.lanes), EXTRA)
        for version in (1, 2)
    ]
    settings = plan.settings
    if "slack" in operators:
        settings = replace(settings, slack=SlackSettings(half_life_s=rng.choice([0.3, 1.0])))
    if "standing_orders" in operators:  # what is kept paused must not fill a partition, which would hide what is not
        settings = replace(settings, commit_span=50_000, intake_bytes=4 << 20)
    kinds = kinds if operators else plan.kinds
    reads_first = not any(lane.inline for lane in (*plan.lanes, *variants))
    if "line" in kinds and reads_first and Random(f"{plan.seed}/summaries").random() < 0.5:
        kinds |= {"summary"}
    return replace(
        plan,
        operators=frozenset(operators | _layout(plan.seed).difference(without)),
        variants=tuple(variants),
        on_lost_log=Random(f"{plan.seed}/on_lost_log").choice(get_args(OnLostLog)),
        settings=settings,
        faults=faults if operators else plan.faults,
        kinds=kinds,
    )


def _layout(seed: int) -> frozenset[str]:
    """A third of the seeds has the shared topic."""
    rng = Random(f"{seed}/layout")
    if rng.random() >= 1 / 3:
        return frozenset()
    return frozenset(name for name in LAYOUT if name == "sharded" or rng.random() < 0.5)


def _draw(seed: int) -> Plan:
    rng, memory = Random(f"{seed}/plan"), Random(f"{seed}/memory")
    intensity = rng.choice([0.0, 0.15, 0.3, 0.5])
    faults = frozenset(name for name in FAULTS if rng.random() < intensity)
    kinds = frozenset(["plain", *(name for name in KINDS if rng.random() < 0.4)])
    themed = seed % (len(THEMES) + FREE_SEEDS) < len(THEMES)
    if themed:
        more_faults, more_kinds = THEMES[seed % (len(THEMES) + FREE_SEEDS)]
        faults, kinds = faults | set(more_faults), kinds | set(more_kinds)
    kinds |= {name for name in MEMORY_KINDS if memory.random() < 0.4}
    scarce = not kinds.isdisjoint({"hungry", "own_memory"}) or "foreign_memory" in faults or memory.random() < 0.3
    lies = "sizes_lie" in faults
    return Plan(
        seed=seed,
        workers=rng.choice([1, 1, 2, 2, 3, 4]),
        partitions=rng.choice([1, 2, 4]),
        requests=rng.choice([40, 60, 120] if themed else [5, 15, 30, 30, 60, 120]),
        tenants=rng.choice([1, 2, 3]),
        lines=rng.choice([1, 2, 4]),
        span_s=rng.choice([0.2, 1.0, 4.0]),
        lanes=tuple(
            _with_memory(_lane(rng, f"m{number}"), memory, scarce=scarce, lies=lies)
            for number in range(rng.choice([1, 1, 2, 3]))
        ),
        settings=replace(
            _settings(rng),
            model_absent_s=Random(f"{seed}/absent").choice([1.5, 3.0]),
            placement=_placement(memory),
            longest_reservation_s=memory.choice([1.0, 30.0]),
            output_bytes=Random(f"{seed}/outputs").choice([2_500, 128 << 20]),
        ),
        devices=tuple(
            (f"sim{number}", DEVICE_BYTES, memory.choice([0, 5])) for number in range(memory.choice([1, 1, 2]))
        ),
        observe_s=memory.choice([0.1, 0.3, 0.8]),
        faults=faults,
        kinds=kinds,
        latency_s=rng.choice([0.001, 0.005, 0.02]),
        records_a_turn=rng.choice([1, 4, 128]),
        tick_s=rng.choice([0.02, 0.05, 0.1]),
        commit_s=rng.choice([0.05, 0.2, 0.6]),
        endings=rng.choice([4, 16, 512]),
    )


def _lane(rng: Random, name: str) -> LaneSpec:
    inline = rng.random() < 0.3
    return LaneSpec(
        name=name,
        slots=rng.choice([1, 2, 4, 8]),
        tokens=None if inline else rng.choice([None, 40, 100]),
        inline=inline,
        load_s=rng.choice([0.05, 0.5]),
        speed_s=rng.choice([0.002, 0.01, 0.03]),
    )


def _with_memory(lane: LaneSpec, rng: Random, *, scarce: bool, lies: bool) -> LaneSpec:
    """Models of which all fit, or of which only some fit at a time."""
    replicas = rng.choice([(1, 1), (1, 1), (1, 2), (2, 2)])
    if not scarce or rng.random() < 0.15:
        return replace(lane, replicas=replicas)
    return replace(
        lane,
        replicas=replicas,
        load_bytes=rng.choice([20, 40, 60]),
        lie=_lie(rng) if lies else 1.0,
        run_bytes=rng.choice([0, 0, 5, 15]),
        run_lie=rng.uniform(0.5, 1.5) if lies else 1.0,
        keep_alive_s=rng.choice([None, None, 0.5]),
    )


def _lie(rng: Random) -> float:
    """Half of the models take much more than is said: their grants grow, also where a device is nearly full."""
    lie = rng.uniform(0.5, 1.5)
    return lie if lie > 1 else lie * 0.8


def _placement(rng: Random) -> PlacementSettings:
    return PlacementSettings(
        turn_factor=rng.choice([1.0, 3.0]),
        min_turn_s=rng.choice([0.1, 0.5]),
        lookahead_s=rng.choice([0.0, 0.5]),
        scale_after_s=rng.choice([0.1, 1.0]),
        reserve_after_s=rng.choice([0.2, 1.0]),
        aging_s=rng.choice([0.5, 2.0]),
    )


def _settings(rng: Random) -> FlowSettings:
    return FlowSettings(
        aging_s=rng.choice([0.2, 0.5, 2.0]),
        aged_share=rng.choice([2, 4, 8]),
        commit_span=rng.choice([8, 32, 50_000]),
        intake_bytes=rng.choice([20_000, 60_000, 4 << 20]),
        chunk_linger_s=rng.choice([0.0, 0.03]),
        status_linger_s=rng.choice([0.0, 0.025]),
        max_execution_s=rng.choice([3.0, 6.0]),
        keep_least_s=0.5,  # a store is away for two seconds at most
    )
