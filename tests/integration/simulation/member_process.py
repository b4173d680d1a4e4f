"""A member of a group as a process, so that it can be killed or stopped. Commands in, answers out, as lines."""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from penstock.processors.kafka.offsets import group_identity

POLL_S = 0.02
READ_S = 20.0


class Member:
    """Reads what it owns from what is committed, or from the start."""

    def __init__(self, bootstrap: str, group: str, topic: str, name: str, session_ms: int) -> None:
        self._topic = topic
        self._buffer: list[tuple[int, int, str]] = []
        self._assigned: list[int] = []
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": group,
                "client.id": name,
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "session.timeout.ms": session_ms,
                "heartbeat.interval.ms": 300,
                "partition.assignment.strategy": "range",
                "enable.partition.eof": False,
                "fetch.wait.max.ms": 50,
            }
        )
        self._consumer.subscribe([topic], on_assign=self._on_assign, on_revoke=self._on_revoke)

    def _on_assign(self, consumer: Any, partitions: list[TopicPartition]) -> None:
        self._buffer.clear()
        consumer.assign(partitions)
        self._assigned = sorted(partition.partition for partition in partitions)

    def _on_revoke(self, consumer: Any, partitions: list[TopicPartition]) -> None:
        consumer.unassign()
        self._assigned = []
        self._buffer.clear()

    def poll(self) -> None:
        message = self._consumer.poll(POLL_S)
        if message is not None and message.error() is None:
            value = message.value()
            self._buffer.append((message.partition(), message.offset(), "" if value is None else value.decode()))

    def answer(self, command: dict[str, Any]) -> Any:
        match command["do"]:
            case "state":
                return {"assigned": self._assigned, "generation": group_identity(self._consumer)[0]}
            case "read":
                give_up = time.monotonic() + READ_S
                while len(self._buffer) < command["count"] and time.monotonic() < give_up:
                    self.poll()
                taken, self._buffer = sorted(self._buffer), []
                return taken
            case "positions":
                asked = [TopicPartition(self._topic, partition) for partition in self._assigned]
                return [[one.partition, one.offset] for one in self._consumer.position(asked)]
            case "commit":
                return self._commit(command["offsets"])
            case "leave":
                self._consumer.close()
                return "left"
            case other:
                raise ValueError(other)

    def _commit(self, offsets: list[tuple[int, int, str]]) -> str:
        sent = [TopicPartition(self._topic, partition, offset, text) for partition, offset, text in offsets]
        try:
            self._consumer.commit(offsets=sent, asynchronous=False)
        except KafkaException as error:
            code = error.args[0].code()
            return "refused" if code in (KafkaError.ILLEGAL_GENERATION, KafkaError.UNKNOWN_MEMBER_ID) else str(error)
        return "taken"


def main() -> None:
    bootstrap, group, topic, name, session_ms = sys.argv[1:]
    commands: queue.Queue[dict[str, Any]] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            commands.put(json.loads(line))

    threading.Thread(target=listen, daemon=True).start()
    member = Member(bootstrap, group, topic, name, int(session_ms))
    while True:
        try:
            command = commands.get_nowait()
        except queue.Empty:
            member.poll()
            continue
        print(json.dumps(member.answer(command)), flush=True)
        if command["do"] == "leave":
            return


if __name__ == "__main__":
    main()
