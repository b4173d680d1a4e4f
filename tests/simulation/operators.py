"""People and other systems at work on a cluster: orders, deleted conversations, partitions, stores that are away."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from penstock.processors.core.work.states import IN_SCHEDULER
from penstock.schemas.desired import CLASS, MODEL, desired_key
from penstock.schemas.records import ControlCommand
from penstock.schemas.topics import CLASSES, conversation_key, conversation_of_key
from simulation.plan import EXTRA, LaneSpec

if TYPE_CHECKING:
    from simulation.cluster import Cluster

MOST_TIMES = 6
TIMES = {"add_partitions": 1, "churn": 12}
LOOK_FOR_SUSPECTS_S = 0.1
STANDING = 0.5
"""The share of the orders that are kept to the end, where orders are kept at all."""


class Operators:
    """Each kind has a stream of its own, so that leaving one out changes no other."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._orders = cluster.orders
        self._paused_for_good: str | None = None
        self._kinds: dict[str, Callable[[Random], None]] = {
            "load_unload": self._load_or_unload,
            "pin": lambda rng: self._orders.give(MODEL, self._model(rng), rng.choice(["pin", "unpin"])),
            "pause_model": lambda rng: self._pause(MODEL, self._model(rng), rng),
            "pause_class": lambda rng: self._pause(CLASS, rng.choice(CLASSES), rng),
            "change_models": self._change_models,
            "rollout": self._rollout,
            "delete_conversation": self._delete_conversation,
            "churn": self._delete_one_that_is_there,
            "fork_conversation": self._fork_conversation,
            "add_partitions": self._add_partitions,
            "registry_away": self._registry_away,
            "store_away": self._store_away,
            "retention": self._retention,
            "delete_records": self._delete_records,
            "lose_end": self._lose_end,
        }

    def start(self, until_s: float) -> None:
        for name, do in self._kinds.items():
            rng = self._world.stream(f"operator/{name}")
            span_s = self._cluster.plan.span_s if name == "churn" else until_s  # while clients send
            for _ in range(TIMES.get(name) or rng.randint(1, MOST_TIMES)):
                at = rng.uniform(0.0, span_s)
                if self._cluster.plan.has(name):
                    self._world.at(at, None, f"operator {name}", self._happens, name, do, rng)

        if self._cluster.plan.has("pause_suspects"):
            self._look_for_suspects()

    def _look_for_suspects(self) -> None:
        """The model of the first request that must run by itself is paused, and stays so: also after all faults."""
        for life in self._cluster.lives():
            suspect = next((work for work in life.inside.works() if work.alone and work.stage in IN_SCHEDULER), None)
            if suspect is not None:
                self._world.fault("pause_suspects", suspect.request_id)
                self._orders.give(MODEL, suspect.lane, "pause")
                self._paused_for_good = desired_key(MODEL, suspect.lane, None)
                return
        self._world.at(LOOK_FOR_SUSPECTS_S, None, "operator looks for suspects", self._look_for_suspects)

    def _happens(self, name: str, do: Callable[[Random], None], rng: Random) -> None:
        if not self._cluster.calm:
            self._world.fault(name)
            do(rng)

    def calm(self) -> None:
        """Everything works again. Orders are withdrawn, but for those that stand for good.

        No pin stands: what is pinned may leave no memory for others, and how long they wait nobody can say.
        """
        rng = self._world.stream("operator/calm")
        for host in self._cluster.hosts:
            host.broken = frozenset()
            if host.lacks:
                host.lacks = frozenset()
                if host.life is not None:
                    self._cluster.kill_worker(host.life, "the end of a rollout")
        self._cluster.registry_away_until = self._cluster.store.away_until = self._world.now
        for key, wish in self._orders.standing():
            if key == self._paused_for_good:
                if wish.pinned:
                    self._orders.give(MODEL, wish.name, "unpin")
                continue
            if not self._cluster.plan.has("standing_orders") or wish.pinned or rng.random() >= STANDING:
                self._orders.withdraw(key)

    # -- orders

    def _model(self, rng: Random) -> str:
        names = [lane.name for lane in self._cluster.plan.lanes]
        return rng.choice([*names, EXTRA] if self._cluster.plan.has("change_models") else names)

    def _load_or_unload(self, rng: Random) -> None:
        self._orders.give(MODEL, self._model(rng), rng.choice(["load", "unload", "unload"]))

    def _pause(self, kind: str, name: str, rng: Random) -> None:
        """For a while, or until the end of all faults."""
        self._orders.give(kind, name, "pause")
        if rng.random() < 0.8:
            self._world.at(
                rng.uniform(0.1, 4.0), None, f"operator resumes {name}", self._orders.give, kind, name, "resume"
            )

    def _rollout(self, rng: Random) -> None:
        """A worker is stopped, or killed, and the next one of its host has a file with other models, or broken ones."""
        names = [lane.name for lane in self._cluster.plan.lanes]
        host = rng.choice(self._cluster.hosts)
        host.lacks = frozenset(name for name in names if rng.random() < 0.5)
        killed = rng.random() < 0.5
        chance = self._world.stream("operator/broken")
        host.broken = frozenset(name for name in names if chance.random() < 0.3)
        if host.life is None:
            return
        lacks, broken = sorted(host.lacks), sorted(host.broken)
        self._world.note(f"{host.name} lacks {lacks} from its next worker on, and cannot load {broken}")
        if killed:
            self._cluster.kill_worker(host.life, "a rollout")
        elif not (host.life.paused or host.life.gone):
            host.life.stop()

    def _change_models(self, rng: Random) -> None:
        """Remove one, add one, or put another in its place."""
        name = self._model(rng)
        version = rng.choice([0, 1, 2])
        if rng.random() < 0.4:
            self._orders.give(MODEL, name, "remove")
        else:
            self._orders.give(MODEL, name, "add", self._variant(name, version))

    def _variant(self, name: str, version: int) -> LaneSpec:
        return self._cluster.plan.lane_of(f"{name}/{version or (1 if name == EXTRA else 0)}")

    # -- conversations and topics

    def _delete_conversation(self, rng: Random) -> None:
        plan = self._cluster.plan
        self._delete(f"t{rng.randrange(plan.tenants)}", f"c{rng.randrange(plan.lines)}", rng)

    def _delete_one_that_is_there(self, rng: Random) -> None:
        if lines := sorted(self._cluster.talks.layout.lines()):
            self._delete(*conversation_of_key(rng.choice(lines)), rng)

    def _delete(self, tenant: str, conversation_id: str, rng: Random) -> None:
        """The command first, then the topic goes: as a gateway does it, with its pauses."""
        command = ControlCommand(
            kind="delete_conversation",
            request_id="",
            tenant=tenant,
            created_at=self._world.wall_ms,
            conversation_id=conversation_id,
        )
        self._cluster.command(command)
        line = conversation_key(tenant, conversation_id)
        delay = rng.choice([0.0, rng.uniform(0.0, 0.05), rng.uniform(0.0, 1.0)])
        self._world.at(delay, None, f"the topic of {line} is deleted", self._cluster.talks.delete, line)

    def _fork_conversation(self, rng: Random) -> None:
        """Into one of the conversations that clients write to, if it is not there yet."""
        tenant, lines = f"t{rng.randrange(self._cluster.plan.tenants)}", self._cluster.plan.lines
        parent, fork = f"c{rng.randrange(lines)}", f"c{rng.randrange(lines)}"
        self._cluster.talks.fork(tenant, parent, fork, rng.random())

    def _add_partitions(self, rng: Random) -> None:
        self._cluster.add_partitions(rng.choice([1, self._cluster.plan.partitions]))

    def _retention(self, rng: Random) -> None:
        """Records vanish while their requests wait, in a worker or in front of it."""
        truth = self._cluster.truth
        waiting = [
            record
            for (tp, offset), record in truth.records.items()
            if record.subject is not None
            and self._cluster.log.partitions[tp].slots[offset] is not None
            and not truth.replaced(tp, offset)
        ]
        for record in rng.sample(waiting, min(len(waiting), rng.randint(1, 3))):
            self._world.note(f"retention takes {record.tp} {record.stored.offset}")
            truth.lose(record)

    def _delete_records(self, rng: Random) -> None:
        logs = self._cluster.log.partitions
        tp = rng.choice(sorted(tp for tp, log in logs.items() if log.end > log.start) or sorted(logs))
        start = rng.randint(logs[tp].start, logs[tp].end)
        self._world.note(f"the records of {tp} below {start} are deleted")
        self._cluster.truth.lose_beginning(tp, start)

    def _lose_end(self, rng: Random) -> None:
        """A disk that failed, an older backup: records of a log are gone, and their offsets are given again.

        Not while a worker goes on with records that it has yet to read again since an assignment: its position is lower
        than they are, and no broker refuses it.
        """
        logs, lives = self._cluster.log.partitions, self._cluster.lives()
        tp = rng.choice(sorted(tp for tp, log in logs.items() if log.end) or sorted(logs))
        end = rng.randint(0, logs[tp].end)
        if any(life.consumer.goes_over_again(tp, life.inside.delivered_up_to(tp)) for life in lives):
            return
        self._world.note(f"{tp} loses what it holds from {end} to {logs[tp].end}")
        self._cluster.truth.lose_end(tp, end)
        self._cluster.checks.loses_end(tp)
        self._cluster.wake_consumers()

    # -- other systems

    def _registry_away(self, rng: Random) -> None:
        self._cluster.registry_away_until = self._world.now + rng.uniform(0.1, 2.0)

    def _store_away(self, rng: Random) -> None:
        self._cluster.store.away_until = self._world.now + rng.uniform(0.1, 2.0)
        self._cluster.store.hangs = rng.random() < 0.5


class Store:
    """Where artifacts are kept."""

    def __init__(self) -> None:
        self.away_until = 0.0
        self.hangs = False
        """While it is away it answers nothing; else it says that it is away."""

    def gives_nothing(self, now: float) -> bool:
        """Whether it says that it is away."""
        return now < self.away_until and not self.hangs
