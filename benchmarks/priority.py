"""Priority under flood: how long high work takes beside a flood of low work, over how long it takes alone.

No-op work of 20 ms on an engine of 8 slots. Low work waits by the thousand, high work comes at a steady rate. A time is
from the log append of the request to the record of its outcome, so both are of one clock. Sides: `alone` (no low
work) and `flood`, each without slack and with it; `full`: high work at 95 % of what the engine can do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from backlog import Outcomes, Record, encoded_requests, produce, warm
from common import Figures, Row, broker, options, percentile, rotate, save, system
from confluent_kafka import Consumer, Producer, TopicPartition

from penstock.schemas.codec import default_codec
from penstock.schemas.records import ResultEvent
from penstock.schemas.topics import partition_for
from system import Process, System

SLOTS, RUN_MS = 8, 20
FLOOD = 2_000
HIGH_PER_S = 40
FULL_PER_S = 0.95 * SLOTS * 1_000 / RUN_MS
SETTLES_S = 3.0
"""High work of the first seconds is not measured: slack is learnt from it."""
ENGINE = {"tokens": 1, "delay_ms": RUN_MS, "slots": SLOTS}
MODEL = {"id": "noop", "source": "noop", "engine": "noop", "tasks": ["text_generation"], "options": ENGINE}


def send_steadily(bootstrap: str, topic: str, records: Sequence[Record], partitions: int, per_s: float) -> None:
    """One record after the other at a fixed rate; a late one is sent at once."""
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 0})
    began = time.monotonic()
    for number, (key, value) in enumerate(records):
        time.sleep(max(0.0, began + number / per_s - time.monotonic()))
        producer.produce(topic, value, key=key, partition=partition_for(key, partitions))
        producer.poll(0)
    assert producer.flush(30) == 0


class Ends:
    """Reads terminal events from the result topic's end on."""

    def __init__(self, found: System) -> None:
        self._consumer = Consumer(
            {"bootstrap.servers": found.bootstrap, "group.id": "bench", "enable.auto.commit": False}
        )
        topic = found.names.result
        partitions = self._consumer.list_topics(topic, 10).topics[topic].partitions
        self._consumer.assign(
            [
                TopicPartition(topic, n, self._consumer.get_watermark_offsets(TopicPartition(topic, n), timeout=10)[1])
                for n in partitions
            ]
        )

    def of(self, keys: set[bytes], until: float) -> dict[str, ResultEvent]:
        """The terminal events that came until all of `keys` have one."""
        codec, events = default_codec(), dict[str, ResultEvent]()
        left = set(keys)
        while left:
            assert time.monotonic() < until, f"{len(left)} have no outcome"
            for message in self._consumer.consume(5_000, 0.2):
                if message.error() is None:
                    event = codec.decode(message.value() or b"", ResultEvent)
                    if event.is_terminal:
                        events[event.request_id] = event
                        left.discard(event.request_id.encode())
        return events

    def close(self) -> None:
        self._consumer.close()


def measure(found: System, *, low: int, per_s: float, seconds: float) -> Figures:
    """High work at a rate, beside so much low work that waits when it begins."""
    names = found.names
    high_topic, low_topic = names.request("text_generation", 0), names.request("text_generation", 9)
    partitions = len(found.ends([high_topic]))
    high, flood = encoded_requests(round(per_s * seconds), priority=0), encoded_requests(low, priority=9)
    ends, drained = Ends(found), Outcomes(found.bootstrap, names.result)
    if flood:
        produce(found.bootstrap, low_topic, flood, partitions)
        time.sleep(0.5)
    began_ms = time.time() * 1000
    sender = threading.Thread(target=send_steadily, args=(found.bootstrap, high_topic, high, partitions, per_s))
    sender.start()
    events = ends.of({key for key, _ in high}, time.monotonic() + seconds + 120)
    sender.join()
    ends.close()
    high_ids = {key.decode() for key, _ in high}
    settled = {key.decode() for key, _ in high[round(SETTLES_S * per_s) :]}
    times = [event.created_at - event.origin.append_time_ms for name, event in events.items() if name in settled]
    last_ms = max(event.created_at for name, event in events.items() if name in high_ids)
    ended_ms = [event.created_at for name, event in events.items() if name not in high_ids]
    low_per_s = sum(began_ms <= at <= last_ms for at in ended_ms) / ((last_ms - began_ms) / 1000)
    drained.times_ms((key for key, _ in flood), 300)
    drained.close()
    return {"p50": percentile(times, 0.5), "p95": percentile(times, 0.95), "low_per_s": low_per_s}


def main() -> None:
    chosen = options(__doc__, rounds=5)
    seconds = SETTLES_S + (3.0 if chosen.quick else 8.0)
    low = FLOOD + round(seconds * SLOTS * 1_000 / RUN_MS)  # 2,000 still wait at the end
    sides = {False: "strict order", True: "slack"}
    with (
        broker() as bootstrap,
        system(bootstrap, models=[MODEL]) as plain,
        system(bootstrap, models=[MODEL], worker_options={"slack": True}) as slack,
    ):
        systems = {False: plain, True: slack}
        workers: list[Process] = [found.worker().wait_ready() for found in systems.values()]
        for found, worker in zip(systems.values(), workers, strict=True):
            warm(found, worker, 200 if chosen.quick else 1_500)
        results, steals = rotate(
            chosen.rounds,
            {
                f"{kind} {on}": lambda found=found, kind=kind: measure(
                    found,
                    low=0 if kind == "alone" else low,
                    per_s=FULL_PER_S if kind == "full" else HIGH_PER_S,
                    seconds=seconds,
                )
                for on, found in systems.items()
                for kind in ("alone", "flood", "full")
            },
        )
    rows: list[Row] = []
    for on, name in sides.items():
        aim = "≤ 1.1" if on else "≤ 1.3"
        flood, alone, full = results[f"flood {on}"], results[f"alone {on}"], results[f"full {on}"]
        for figure in ("p50", "p95"):
            what = f"high at {HIGH_PER_S}/s beside {FLOOD:,} low waiting, {name}: {figure} (floor: alone)"
            rows.append(Row(what, "ms", flood[figure], alone[figure], steals, aim if figure == "p95" else "reported"))
        rows.append(Row(f"low work beside it, {name}", "requests/s", flood["low_per_s"], [], steals, "reported"))
        what = f"low work while high asks for 95 % of the slots, {name}"
        rows.append(Row(what, "requests/s", full["low_per_s"], [], steals, "> 0"))
    save("priority", rows)


if __name__ == "__main__":
    main()
