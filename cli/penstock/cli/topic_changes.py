"""`penstock topics plan` and `apply`: the differences from the settings, found on the brokers and carried out there.

All functions block, and raise BrokerUnavailable and Forbidden.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from confluent_kafka.admin import AdminClient, NewPartitions

from penstock.cli.failures import CliFailure
from penstock.cli.paths import Progress
from penstock.cli.restored.group import WorkerGroup
from penstock.cli.topic_plan import PARTITIONS, Change
from penstock.common import admin
from penstock.common.admin_clients import answer_of, asked
from penstock.common.altering import alter_topics
from penstock.common.kafka_errors import translated
from penstock.common.reader import read_to_end
from penstock.common.settings import KafkaSettings
from penstock.schemas.codec import Codec
from penstock.schemas.errors import BrokerUnavailable, InternalError, PenstockError
from penstock.schemas.records import GatewayState, WorkerState
from penstock.schemas.topics import TopicSpec, is_of_gateway

WATCHED_S = 6.0
"""A process that runs reports within this time: each does it every two seconds."""
APPLY_S = 60.0


def why_busy(kafka: KafkaSettings, configured_group: str | None, codec: Codec) -> str | None:
    """What must end before request topics may have more partitions; None: nothing that is known.

    A key's partition changes with their number. A turn that waits on the old one would run beside, or behind, a later
    turn on the new one.
    """
    topics = {
        name: count for name, count in admin.partition_counts(kafka).items() if kafka.names.is_request_topic(name)
    }
    if not topics:
        return None
    try:
        group = WorkerGroup(kafka, configured_group, topics)
    except CliFailure as failure:
        return str(failure)
    if running := _running(kafka, codec):
        return f"these run, and send requests or read them: {', '.join(running)}; stop them, and other producers"
    partitions = [(topic, number) for topic, count in topics.items() for number in range(count)]
    begins, ends = admin.begin_offsets(kafka, partitions), admin.end_offsets(kafka, partitions)
    committed = group.committed(partitions)
    waiting = sum(ends[tp] - max(begins[tp], committed.get(tp, (0, ""))[0]) for tp in partitions)
    if waiting:
        return f"{waiting} requests have not ended: let workers finish them, then stop the workers"
    return None


def _running(kafka: KafkaSettings, codec: Codec) -> list[str]:
    """The kinds and ids of the processes that report within `WATCHED_S`: workers of another group too.

    They are watched, because the clock of this machine may differ from theirs.
    """
    place = (kafka.names.worker, 0)
    end = admin.end_offsets(kafka, [place])[place]
    time.sleep(WATCHED_S)
    found: set[str] = set()
    for record in read_to_end(kafka, kafka.names.worker, end):
        if record.key is None or record.value is None:
            continue
        with suppress(PenstockError):
            if is_of_gateway(record.key):
                beside = codec.decode(record.value, GatewayState)
                found.add(f"{beside.kind} {beside.id}")
            else:
                found.add(f"worker {codec.decode(record.value, WorkerState).worker_id}")
    return sorted(found)


def carry_out(
    kafka: KafkaSettings,
    plan: Sequence[Change],
    missing: Sequence[TopicSpec],
    progress: Progress,
    busy: Callable[[], str | None],
) -> int:
    """Make what is to be made; the number of changes. A call that was killed is completed by the next one.

    `busy` is `why_busy`, asked again before partitions are added. Raises CliFailure if something was started since.
    """
    due = [one for one in plan if one.state in ("create", "change")]
    if missing:
        made = sum(report.created for report in admin.ensure_topics(kafka, missing, APPLY_S))
        progress(f"created {made} topics")
    configs: dict[str, dict[str, str]] = {}
    for one in due:
        if one.state == "change" and one.setting != PARTITIONS:
            configs.setdefault(one.topic, {})[one.setting] = one.wanted
    if configs:
        progress(f"altered settings of {len(alter_topics(kafka, configs, APPLY_S))} topics")
    counts = {one.topic: int(one.wanted) for one in due if one.state == "change" and one.setting == PARTITIONS}
    if counts:
        if any(map(kafka.names.is_request_topic, counts)) and (reason := busy()) is not None:
            raise CliFailure(f"no partitions were added: {reason}")
        add_partitions(kafka, counts)
        for topic, count in counts.items():
            progress(f"{topic} has {count} partitions")
    return len(due)


def add_partitions(kafka: KafkaSettings, counts: Mapping[str, int], timeout_s: float = APPLY_S) -> None:
    """Raise the topics to so many partitions, and wait until these are visible."""

    def ask(client: AdminClient, wait_s: float) -> None:
        wanted = [NewPartitions(topic, count) for topic, count in counts.items()]
        with translated("add partitions"):
            futures = client.create_partitions(wanted, request_timeout=wait_s)
        for topic, future in futures.items():
            try:
                answer_of(future, f"add partitions to {topic}", wait_s, topic)
            except InternalError as error:
                if "INVALID_PARTITIONS" not in str(error):  # an earlier call, whose answer was lost, has added them
                    raise

    asked(kafka, ask, timeout_s, refused_too=True)
    give_up = time.monotonic() + timeout_s
    while short := [topic for topic, count in admin.partition_counts(kafka, counts).items() if count < counts[topic]]:
        if time.monotonic() > give_up:
            raise BrokerUnavailable(f"{short[0]} has not got its partitions", retry_after_s=1.0)
        time.sleep(0.05)
