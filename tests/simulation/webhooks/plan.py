"""What a seed decides before it begins: requests, receivers, processes, faults."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

FAULTS = ("kill", "cut", "restart", "broker_away", "erase")
RECEIVERS = ("well", "down", "slow", "late", "gone", "busy")
CANARY = "canary"
"""A tenant whose receiver is always well: nobody may hold it up."""


@dataclass(frozen=True, slots=True)
class Request:
    number: int
    tenant: str
    host: str
    at_s: float
    runs_s: float
    partition: int
    record_is_gone: bool
    is_odd: bool = False
    """Its outcome cannot be made into the body of a call."""

    @property
    def request_id(self) -> str:
        return f"r{self.number}"

    @property
    def url(self) -> str:
        return f"http://{self.host}/{self.number}"


@dataclass(frozen=True, slots=True)
class Receiver:
    """`well` but from `begins_s` to `ends_s`, in which it is as its kind says."""

    kind: str
    begins_s: float
    ends_s: float

    def at(self, now_s: float) -> str:
        return self.kind if self.begins_s <= now_s < self.ends_s else "well"


@dataclass(frozen=True, slots=True)
class Plan:
    seed: int
    senders: int
    partitions: int
    in_flight: int
    held_per_group: int
    give_up_s: float
    timeout_s: float
    span_s: float
    faults: frozenset[str]
    receivers: dict[str, Receiver]
    requests: list[Request] = field(default_factory=list[Request])


def draw(seed: int) -> Plan:
    rng = Random(f"{seed}/webhooks")
    give_up_s = rng.choice([300.0, 7_200.0, 86_400.0])
    hosts = {
        f"{tenant}{number}": tenant for tenant in "abc"[: rng.randint(1, 3)] for number in range(rng.randint(1, 3))
    }
    receivers = {CANARY: Receiver("well", 0.0, 0.0)}
    for host in hosts:
        begins_s = rng.uniform(0.0, 30.0)
        lasts_s = rng.choice([20.0, give_up_s * 0.4, give_up_s * 3])
        receivers[host] = Receiver(rng.choice(RECEIVERS), begins_s, begins_s + lasts_s)
    partitions, span_s = rng.choice([1, 2, 3]), rng.choice([10.0, 60.0])
    some = {name: rng.randint(1, 15) for name in hosts}
    if rng.random() < 0.3:
        some[rng.choice(list(hosts))] = 60
    wanted = [host for host, count in some.items() for _ in range(count)] + [CANARY] * 8
    odd = Random(f"{seed}/odd")
    odd_part = odd.choice([0.0, 0.0, 0.1])
    requests = [
        Request(
            number,
            hosts.get(host, CANARY),
            host,
            at_s=rng.uniform(0.0, span_s),
            runs_s=rng.choice([0.0, 1.0, 20.0]),
            partition=rng.randrange(partitions),
            record_is_gone=rng.random() < 0.1,
            is_odd=host != CANARY and odd.random() < odd_part,
        )
        for number, host in enumerate(wanted)
    ]
    return Plan(
        seed,
        senders=rng.choice([1, 2, 3]),
        partitions=partitions,
        in_flight=rng.choice([8, 16, 64]),
        held_per_group=rng.choice([3, 20_000]),
        give_up_s=give_up_s,
        timeout_s=15.0,
        span_s=span_s,
        faults=frozenset(name for name in FAULTS if rng.random() < rng.choice([0.0, 0.5])),
        receivers=receivers,
        requests=requests,
    )
