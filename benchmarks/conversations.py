"""Long conversations and many of them: the next turn, the first page, and the summarizer that follows all.

    make bench BENCHMARKS=conversations ARGS="--turns 10000 --rounds 3"
    make bench BENCHMARKS=conversations ARGS="--turns 10 --many 1500"
    make bench BENCHMARKS=conversations ARGS="--crowd 100000 --turns 20"

The turns are written straight onto the topics. Then both conversations, the long one and one of ten turns (the floor),
get no-op turns one by one, by turns; a page of the newest 20 items is asked for, of a gateway that has never read the
conversation and of one that has. With `--many` so many conversations of ten turns are written, and a summarizer is
started that has each summed up; then it is killed and started again. With `--crowd` so many conversations share a topic
(the sharded layout); turns of some of them that nobody has read yet are compared with those of an installation that
holds no others.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import httpx
import psutil
from common import broker, system
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from penstock.common.forks import begin_record
from penstock.common.settings import KafkaSettings
from penstock.common.shards.addresses import address_of
from penstock.schemas.codec import default_codec
from penstock.schemas.records import ConversationMessage, conversation_message_key
from penstock.schemas.topics import conversation_topic_config
from support import wait_until
from system import NOOP, Process, System

FLOOR_TURNS = 10
WORDS = "some more words than two or three, as people and models say them to one another."
AT_ONCE = 200
SAMPLED = 200
PARTITIONS = 4
"""Those that `System` makes."""
CODEC = default_codec()
IDLE_S = 20.0
COMPLETED = 'penstock_summaries_total{outcome="completed"}'


def write(kafka: KafkaSettings, turns: dict[str, int]) -> None:
    """Conversations of so many turns, by id."""
    admin = AdminClient(kafka.librdkafka())
    topics = {name: kafka.names.conversation("default", name) for name in turns}
    new = [NewTopic(topic, 1, 1, config=conversation_topic_config()) for topic in topics.values()]
    for start in range(0, len(new), AT_ONCE):
        for made in admin.create_topics(new[start : start + AT_ONCE], operation_timeout=60).values():
            made.result(90)
    producer = Producer({**kafka.librdkafka(), "linger.ms": 10})
    for name, count in turns.items():
        for number in range(count):
            for key, value in turn(name, number):
                producer.produce(topics[name], value, key=key, partition=0)
                producer.poll(0)
    producer.flush(120)


def turn(name: str, number: int) -> list[tuple[bytes, bytes]]:
    """The records of a turn: keys and values."""
    found: list[tuple[bytes, bytes]] = []
    for direction, role in (("in", "user"), ("out", "assistant")):
        message = ConversationMessage(
            request_id=f"{name}-{number}",
            tenant="default",
            conversation_id=name,
            direction=direction,
            role=role,
            content=f"{role} {number}: {WORDS}",
            created_at=1,
        )
        found.append((conversation_message_key(message).encode(), CODEC.encode(message)))
    return found


def write_shared(made: System, names: list[str], turns: int) -> None:
    """Conversations of so many turns in the shared topic; all have their first turn before one has its second."""
    kafka = KafkaSettings(bootstrap_servers=made.bootstrap, topic_prefix=made.prefix)
    topic, partitions = made.names.conversation_log, PARTITIONS
    producer = Producer({**kafka.librdkafka(), "linger.ms": 10, "queue.buffering.max.messages": 1_000_000})

    def send(name: str, key: bytes, value: bytes) -> None:
        address = address_of(made.names, made.names.conversation("default", name), partitions)
        while True:
            try:
                producer.produce(topic, value, key=address.key(key), partition=address.partition)
            except BufferError:
                producer.poll(0.1)
            else:
                producer.poll(0)
                return

    for name in names:
        head = begin_record("default", name, name, 1)
        send(name, head.key.encode(), CODEC.encode(head.message))
    for number in range(turns):
        for name in names:
            for key, value in turn(name, number):
                send(name, key, value)
    producer.flush(300)


def turn_ms(client: httpx.Client, conversation: str) -> float:
    body = {
        "task": "text_generation",
        "model": "talk",
        "conversation_id": conversation,
        "payload": {"messages": [{"role": "user", "content": "And then?"}]},
    }
    began = time.perf_counter()
    answer = client.post("/v1/requests?wait=60", json=body)
    took = (time.perf_counter() - began) * 1_000
    assert answer.json()["status"] == "completed", answer.text
    return took


def page_ms(client: httpx.Client, conversation: str) -> float:
    began = time.perf_counter()
    client.get(f"/v1/conversations/{conversation}/items?limit=20").raise_for_status()
    return (time.perf_counter() - began) * 1_000


def long_one(made: System, turns: int, rounds: int) -> None:
    write(
        KafkaSettings(bootstrap_servers=made.bootstrap, topic_prefix=made.prefix), {"short": FLOOR_TURNS, "long": turns}
    )
    worker, gateway = made.worker().wait_ready(), made.gateway().wait_ready()
    with httpx.Client(base_url=gateway.url, timeout=120) as client:
        cold = {name: page_ms(client, name) for name in ("short", "long")}
        first = {name: turn_ms(client, name) for name in ("short", "long")}
        print(f"first turn here, ms: short {first['short']:.0f}, long {first['long']:.0f}")
        for _ in range(rounds):
            took: dict[str, list[float]] = {"short": [], "long": []}
            for _ in range(30):
                for name, values in took.items():
                    values.append(turn_ms(client, name))
            short, long = (statistics.median(values) for values in took.values())
            print(f"next turn, ms: short {short:.1f}, long {long:.1f}, ratio {long / short:.2f}")
        warm = {name: statistics.median(page_ms(client, name) for _ in range(20)) for name in cold}
    for name, pages in (("never read here", cold), ("read before", warm)):
        print(f"newest 20 items, {name}, ms: short {pages['short']:.1f}, long {pages['long']:.1f}")
    print(f"memory, MB: worker {memory_mb(worker)}, gateway {memory_mb(gateway)}")


def memory_mb(process: Process) -> int:
    return psutil.Process(process.popen.pid).memory_info().rss >> 20


def crowd(made: System, count: int, turns: int) -> dict[str, list[float]]:
    """What turns and pages of conversations take that nobody has read, in ms."""
    began = time.perf_counter()
    names = [f"c{number}" for number in range(count)]
    write_shared(made, names, turns)
    print(f"{count} conversations of {turns} turns written in {time.perf_counter() - began:.0f} s")
    began = time.perf_counter()
    worker, gateway = made.worker(), made.gateway()
    gateway.wait_ready(600)
    worker.wait_ready(600)
    print(f"the gateway has its copy after {time.perf_counter() - began:.0f} s")
    step = max(1, count // SAMPLED)
    took: dict[str, list[float]] = {"page": [], "turn": [], "next turn": []}
    with httpx.Client(base_url=gateway.url, timeout=300) as client:
        began = time.perf_counter()
        for number in range(PARTITIONS * 4):  # the worker copies each partition when it is first needed
            turn_ms(client, f"warm-{number}")
        print(f"the worker has its copy {time.perf_counter() - began:.0f} s later")
        for name in names[::step][:SAMPLED]:
            took["page"].append(page_ms(client, name))
            took["turn"].append(turn_ms(client, name))
            took["next turn"].append(turn_ms(client, name))
    files = sum(path.stat().st_size for path in made.folder.rglob("*conversations*") if path.is_file()) >> 20
    print(f"memory, MB: worker {memory_mb(worker)}, gateway {memory_mb(gateway)}; their copies together {files} MB")
    for one in (worker, gateway):
        one.stop()
    return took


def p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


def compare_crowds(kafka: str, models: list[dict[str, Any]], count: int, turns: int) -> None:
    found: list[dict[str, list[float]]] = []
    for size in (SAMPLED, count):
        with system(kafka, models=models, sharded=True) as made:
            found.append(crowd(made, size, turns))
    few, all_of_them = found
    for what in few:
        short, long = p95(few[what]), p95(all_of_them[what])
        middle = statistics.median(few[what]), statistics.median(all_of_them[what])
        print(
            f"{what}, ms: among {SAMPLED} p50 {middle[0]:.1f}, p95 {short:.1f}; among {count} p50 {middle[1]:.1f},"
            f" p95 {long:.1f}; ratio of p95 {long / short:.2f}"
        )


def many(made: System, count: int) -> None:
    kafka = KafkaSettings(bootstrap_servers=made.bootstrap, topic_prefix=made.prefix)
    write(kafka, {f"c{number}": FLOOR_TURNS for number in range(count)})
    made.worker().wait_ready()
    for name in ("first", "again"):
        began = time.perf_counter()
        summarizer = made.summarizer(f"s-{name}").wait_ready()

        def idle(summarizer: Process = summarizer, due: int = count if name == "first" else 0) -> bool:
            found = metrics(summarizer)
            rest = found["penstock_summaries_due"] + found["penstock_summaries_in_flight"]
            done = found.get(COMPLETED, 0) >= due and not rest
            return found["penstock_conversations_followed"] == count and done

        wait_until(idle, 600, lambda one=summarizer: str(metrics(one)), poll_s=0.5)
        took = time.perf_counter() - began
        summed = metrics(summarizer).get(COMPLETED, 0)
        process = psutil.Process(summarizer.popen.pid)
        before = sum(process.cpu_times()[:2])
        time.sleep(IDLE_S)
        share = 100 * (sum(process.cpu_times()[:2]) - before) / IDLE_S
        print(
            f"{name}: {count} conversations followed, {summed:.0f} summed up, in {took:.0f} s; then idle:"
            f" {share:.1f} % of a core, {memory_mb(summarizer)} MB"
        )
        summarizer.kill9()


def metrics(process: Process) -> dict[str, float]:
    lines = httpx.get(f"{process.url}/metrics", timeout=30).text.splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line and line[0] != "#"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--many", type=int, default=0)
    parser.add_argument("--crowd", type=int, default=0)
    args = parser.parse_args()
    models: list[dict[str, Any]] = [
        {**NOOP, "id": "talk", "options": {"window": 4_000}},
        {**NOOP, "id": "sum", "tasks": ["summarization"]},
    ]
    policy = {"every_turns": 5, "model": "sum", "look_s": 5.0} if args.many else {}
    if args.crowd:
        with broker() as kafka:
            compare_crowds(kafka, models, args.crowd, args.turns)
        return
    with broker() as kafka, system(kafka, models=models, summarizer_options=policy) as made:
        if args.many:
            many(made, args.many)
        else:
            long_one(made, args.turns, args.rounds)


if __name__ == "__main__":
    main()
