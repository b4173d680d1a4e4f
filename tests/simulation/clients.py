"""Clients: many tenants and priorities, conversations, cancels, new priorities, poison, odd producers."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

from penstock.schemas.records import ControlCommand, InferenceRequest, Requirements, StatusEvent
from penstock.schemas.topics import CLASSES, partition_for, priority_class, request_key
from simulation.plan import EXTRA

if TYPE_CHECKING:
    from simulation.cluster import Cluster

POISON = (b"", b"\x00\x00\x00\x00\x07broken", b"\xff\xfe", b"{not json", b'{"task": 7}', b"\x00PN\x00\x00\x01")


class Clients:
    """Sends what the plan says, at random times."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._plan = cluster.plan
        self._mood = cluster.world.stream("clients' mood")
        self._haste = cluster.world.stream("clients' haste")
        self._hunger = cluster.world.stream("clients' hunger")
        self._others = cluster.world.stream("another producer")
        self._extra = cluster.world.stream("clients of the extra model")
        self._summing = cluster.world.stream("clients that sum up")
        self._strays = cluster.world.stream("clients of an unknown pool")
        self._killers = cluster.world.stream("clients that kill workers")
        self._heavy = cluster.world.stream("clients' weight").random() < 0.25
        """All prompts are long: much is parked, and what ends is read again."""
        self._later = cluster.world.stream("clients that name a time to start")
        self._requests: dict[tuple[str, str], InferenceRequest] = {}
        cluster.clients = self

    def start(self) -> None:
        """Each request has a stream of its own: leaving some out changes no other."""
        for number in range(self._plan.requests):
            rng = self._cluster.world.stream(f"client/{number}")
            at = rng.uniform(0.0, self._plan.span_s)
            if self._plan.has("burst") and number % 2:
                at = self._plan.span_s / 2
            self._cluster.world.at(at, None, f"client {number}", self._send, number, rng)

    def _send(self, number: int, rng: Random) -> None:
        plan = self._plan
        if plan.has("poison_bytes") and rng.random() < 0.1:
            self._append(rng, self._topic(rng), rng.randbytes(4), rng.choice(POISON))
            return
        if plan.has("poison_named") and rng.random() < 0.06:
            body = {"request_id": f"p{number}", "task": "text_generation", "priority": "very"}
            self._append(rng, self._topic(rng), b"k", json.dumps(body).encode())
            return
        request = self._request(number, rng)
        self._requests[(request.tenant, request.request_id)] = request
        self._submit(request, rng)
        self._afterwards(request, rng)

    def _topic(self, rng: Random) -> str:
        return rng.choice(self._cluster.topics)

    def _append(self, rng: Random, topic: str, key: bytes, value: bytes) -> None:
        partition = partition_for(key, self._cluster.log.counts[topic])
        self._put((topic, partition), key, value)

    def _put(self, tp: tuple[str, int], key: bytes, value: bytes) -> None:
        world, latency = self._cluster.world, self._plan.latency_s
        delay = max(latency, self._cluster.broker_down_until - world.now)
        world.at(delay, None, f"a request arrives on {tp}", self._cluster.append_request, tp, key, value, [])

    def _topic_of(self, request: InferenceRequest) -> str:
        if request.task == "embedding":
            return self._cluster.topics[3]
        return self._cluster.topics[CLASSES.index(priority_class(request.priority))]

    def _submit_again(self, request: InferenceRequest, rng: Random) -> None:
        """By a producer that may have a partitioner of its own. A conversation's record would be moved to its place."""
        if self._plan.has("other_partitioner") and request.conversation_id is None:
            topic = self._topic_of(request)
            partition = self._others.randrange(self._cluster.log.counts[topic])
            self._put((topic, partition), request_key(request), self._cluster.codec.encode(request))
        else:
            self._submit(request, rng)

    def _submit(self, request: InferenceRequest, rng: Random) -> None:
        topic = self._topic_of(request)
        key = request_key(request)
        partitions = self._cluster.log.counts[topic]
        partition = partition_for(key, partitions)
        if self._plan.has("misplaced") and request.conversation_id is not None and rng.random() < 0.5:
            partition = rng.randrange(partitions)
        self._put((topic, partition), key, self._cluster.codec.encode(request))

    def _request(self, number: int, rng: Random) -> InferenceRequest:
        plan = self._plan
        script = self._script(rng)
        kills = plan.has("pause_suspects") and self._killers.random() < 0.1
        if kills:
            script["die"] = "worker"
        embedding = plan.has("embedding") and rng.random() < 0.2
        line = None
        if plan.has("line") and not embedding and rng.random() < 0.6:
            line = f"c{rng.randrange(plan.lines)}"
        priority = rng.choice([1, 2, 5, 5, 8])
        if line is not None and not plan.has("cross_class_line"):
            priority = 5
        text = json.dumps(script)
        hunger = self._hunger.choice([0, 0, 0, 70, 90]) if plan.has("hungry") else 0
        task = "embedding" if embedding else "text_generation"
        payload: dict[str, Any] = (
            {"embedding": {"input": [text]}}
            if embedding
            else {"text_generation": {"messages": [{"role": "user", "content": text}], "max_tokens": 16}}
        )
        request = InferenceRequest(
            request_id=f"r{number}",
            task=task,
            tenant=f"t{rng.randrange(plan.tenants)}",
            priority=priority,
            model=self._model(rng),
            pool="nowhere" if plan.has("unknown_pool") and self._strays.random() < 0.1 else None,
            conversation_id=line,
            stream=plan.has("stream") and not embedding and rng.random() < 0.6,
            created_at=self._cluster.world.wall_ms,
            ttl_ms=rng.choice([50, 200, 400, 800, 1500]) if plan.has("short_ttl") and rng.random() < 0.4 else None,
            execution_timeout_ms=300 if plan.has("short_timeout") and rng.random() < 0.3 else None,
            max_attempts=0 if kills else rng.choice([1, 2, 0]),
            requirements=Requirements(vram_bytes=hunger) if hunger else None,
            **payload,
        )
        if (request.execution_timeout_ms is not None or script.get("hang")) and not kills:
            # Each of its attempts may take too long.
            request = replace(request, max_attempts=request.max_attempts or 3)
        if plan.has("start_later") and self._later.random() < 0.4:
            later_ms = self._later.choice([-50, 100, 500, 1500, 4000])
            request = replace(request, start_after=self._cluster.world.wall_ms + later_ms)
        if plan.has("summary") and line is not None and self._summing.random() < 0.25:
            return replace(
                request,
                task="summarization",
                text_generation=None,
                summarization={"max_tokens": 16},
                metadata={"script": text},
            )
        return request

    def _model(self, rng: Random) -> str | None:
        if self._plan.has("unknown_model") and rng.random() < 0.05:
            return "nobody"
        if self._plan.has("change_models") and self._extra.random() < 0.15:
            return EXTRA
        return rng.choice([None, *(lane.name for lane in self._plan.lanes)])

    def _script(self, rng: Random) -> dict[str, Any]:
        """What the engine will do with it."""
        plan = self._plan
        script: dict[str, Any] = {"n": rng.randint(2, 8), "need": rng.randint(2, 30)}
        if plan.has("huge") and rng.random() < 0.1:
            script["need"] = 1_000
        if plan.has("large_output") and rng.random() < 0.4:
            script["large"] = True
        if plan.has("short_timeout") and rng.random() < 0.1:
            script["hang"] = True
        for kind, death, chance in (
            ("killer", "run", 0.05),
            ("killer_at_prepare", "prepare", 0.04),
            ("worker_killer", "worker", 0.03),
        ):
            if plan.has(kind) and rng.random() < chance:
                script["die"] = death
        if plan.has("own_memory"):
            script["mem"] = self._hunger.choice([0, 2, 5, 5, 10, 10, 30, 38, 55, 75])
        pad = rng.choice([0, 0, 200, 2_000])
        script["pad"] = "x" * (2_000 if self._heavy else pad)
        return script

    def _afterwards(self, request: InferenceRequest, rng: Random) -> None:
        """What the client does later about it."""
        world, plan = self._cluster.world, self._plan
        for kind, chance in (("cancel", 0.4), ("reprioritize", 0.2), ("erase", 0.1)):
            if plan.has(kind) and rng.random() < chance:
                delay = rng.choice([0.0, 0.02, rng.uniform(0.0, 0.5), rng.uniform(0.0, 2.0)])
                world.at(
                    delay, None, f"{kind} {request.request_id}", self._command, kind, request, rng.choice([0, 5, 9])
                )
        if plan.has("duplicate") and rng.random() < 0.15:
            delay = rng.choice([0.0, 0.05, 1.5])
            again = replace(request, priority=rng.choice([request.priority, 1, 5, 8]))
            world.at(delay, None, f"again {request.request_id}", self._submit_again, again, rng)

    def hears(self, event: StatusEvent) -> None:
        """Some clients give up when they hear how it goes, others want it sooner or later."""
        request = self._requests.get((event.tenant, event.request_id))
        if request is not None and self._plan.has("reprioritize") and self._haste.random() < 0.3:
            name = f"moves {request.request_id}"
            priority, delay = self._haste.choice([0, 5, 9]), self._haste.uniform(0.0, 0.1)
            self._cluster.world.at(delay, None, name, self._command, "reprioritize", request, priority)
        chance = {"retrying": 0.3, "running": 0.1}.get(event.status, 0.0)
        if request is None or not self._plan.has("cancel") or self._mood.random() >= chance:
            return
        name = f"gives up {request.request_id}"
        self._cluster.world.at(self._mood.uniform(0.0, 0.1), None, name, self._command, "cancel", request, 0)

    def cancel(self, tenant: str, request_id: str) -> None:
        """Its client gives it up now."""
        if (request := self._requests.get((tenant, request_id))) is not None:
            self._command("cancel", request, 0)

    def _command(self, kind: str, request: InferenceRequest, priority: int) -> None:
        self._cluster.command(
            ControlCommand(
                kind=kind,
                request_id=request.request_id,
                tenant=request.tenant,
                priority=priority if kind == "reprioritize" else None,
                created_at=self._cluster.world.wall_ms,
                conversation_id=request.conversation_id,
            )
        )
