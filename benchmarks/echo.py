"""The floor: a bare librdkafka echo from one topic to another, as its own process. usage: echo.py BOOTSTRAP IN OUT"""

from __future__ import annotations

import sys

from confluent_kafka import Consumer, Producer


def main() -> None:
    bootstrap, source, target = sys.argv[1:4]
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": f"echo-{source}",
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 100,
            "enable.auto.commit": False,
        }
    )
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "linger.ms": 0,
            "acks": "all",
            "enable.idempotence": True,
            "queue.buffering.max.messages": 1_000_000,
        }
    )
    consumer.subscribe([source])
    print("ready", flush=True)
    while True:
        first = consumer.poll(1.0)
        for message in [first, *consumer.consume(500, 0)] if first is not None else []:
            if message.error() is None:
                producer.produce(target, message.value(), key=message.key())
        producer.poll(0)


if __name__ == "__main__":
    main()
