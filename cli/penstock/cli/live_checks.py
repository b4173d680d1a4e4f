"""What `penstock doctor` tries on what an installation depends on. Each probe has three seconds."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.common import admin
from penstock.common.artifacts.configured import open_store, try_store
from penstock.common.configuration import ArtifactsSection
from penstock.common.settings import KafkaSettings
from penstock.schemas.errors import PenstockError
from penstock.schemas.topics import kind_of_topic, topic_specs


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One finding. `cure` says what to do when the state is not ok."""

    name: str
    state: Literal["ok", "warn", "fail"]
    detail: str
    cure: str | None = None

    @classmethod
    def ok(cls, name: str, detail: str) -> Check:
        return cls(name=name, state="ok", detail=detail)

    @classmethod
    def warn(cls, name: str, detail: str, cure: str) -> Check:
        return cls(name=name, state="warn", detail=detail, cure=cure)

    @classmethod
    def fail(cls, name: str, detail: str, cure: str) -> Check:
        return cls(name=name, state="fail", detail=detail, cure=cure)


PROBE_S = 3.0
TRANSACTION_S = 1.0


def within(name: str, probe: Callable[[], list[Check]], probe_s: float = PROBE_S) -> list[Check]:
    """What the probe finds, or that it took too long. It runs on a thread, which is left behind then."""
    found: list[Check] = []

    def run() -> None:
        try:
            found.extend(probe())
        except Exception as error:
            detail = str(error) or type(error).__name__
            found.append(Check.fail(name, detail, "see whether it is reached"))

    thread = threading.Thread(target=run, name=f"doctor-{name}", daemon=True)
    thread.start()
    thread.join(probe_s)
    if found or not thread.is_alive():
        return found
    return [Check.fail(name, f"no answer within {probe_s:g} s", "see whether it is reached")]


def artifact_checks(section: ArtifactsSection, location: str) -> list[Check]:
    """Write, read and delete one artifact, in each store that is configured."""
    try:
        try_store(open_store(section, location), str(uuid.uuid4()))
    except (PenstockError, OSError) as error:
        cure = "outputs over 256 KiB and images wait for it: see [artifacts] location and its options"
        return [Check.fail("artifacts", f"{location}: {error}", cure)]
    return [Check.ok("artifacts", f"{location}: one was written, read and deleted")]


def artifacts_location(section: ArtifactsSection, running_in: Path | None) -> str | None:
    """Where artifacts are: as configured, else where a `penstock up` in that folder keeps them; None: nobody says."""
    if "location" in section.model_fields_set:
        return section.location
    return None if running_in is None else str(running_in / "artifacts")


def transaction_checks(kafka: KafkaSettings) -> Iterator[Check]:
    """Whether the records of all request topics can be read: an open transaction of any producer holds them back."""
    prefix = kafka.names.prefix
    counts = admin.partition_counts(kafka, timeout_s=PROBE_S)
    topics = [topic for topic in counts if topic.startswith(prefix) and kind_of_topic(topic) is not None]
    partitions = [(topic, partition) for topic in topics for partition in range(counts[topic])]
    readable = admin.end_offsets(kafka, partitions, PROBE_S)
    ends = admin.log_ends(kafka, partitions, PROBE_S)
    if held := sorted(tp for tp in readable if ends[tp] > readable[tp]):
        time.sleep(TRANSACTION_S)  # one that ends by then is no trouble
        after = admin.end_offsets(kafka, held, PROBE_S)
        held = [tp for tp in held if after[tp] == readable[tp]]
    for topic, partition in held:
        count, offset = ends[topic, partition] - readable[topic, partition], readable[topic, partition]
        cure = (
            f"kafka-transactions.sh describe-producers --topic {topic} --partition {partition} names the producer:"
            " end it, or abort its transaction"
        )
        yield Check.fail(
            "transactions",
            f"{count} record(s) of {topic} partition {partition} stand behind an open transaction at offset {offset}",
            cure,
        )
    if not held:
        yield Check.ok("transactions", "none holds back requests")


def right_checks(kafka: KafkaSettings) -> list[Check]:
    """Whether the client of this configuration may read and write the topics: not every process needs each of them."""
    topics = [spec.name for spec in topic_specs(kafka.names)]
    lacking = [
        Check.warn(
            "rights",
            f"the client of this configuration has no right to {operation} on the topic {topic}",
            f"grant it {operation} on {topic}, unless it is another client than that of the worker and the gateway",
        )
        for operation in ("READ", "WRITE")
        for topic in sorted(admin.lacking(kafka, dict.fromkeys(topics, operation), PROBE_S))
    ]
    return lacking or [Check.ok("rights", "the topics may be read and written")]


def queue_checks(kafka: KafkaSettings, wanted: Sequence[str]) -> list[Check]:
    """Whether the topics of `[[queues]]` are there: while one is missing no queue is read."""
    if not wanted:
        return []
    return list(missing_queue_topics(wanted, admin.partition_counts(kafka, wanted, PROBE_S)))


def missing_queue_topics(wanted: Sequence[str], there: Collection[str]) -> Iterator[Check]:
    """Pure."""
    missing = [topic for topic in wanted if topic not in there]
    for topic in missing:
        cure = "`penstock topics create` creates it; or take it out of [[queues]]: until then no queue is read"
        yield Check.fail("queues", f"the topic {topic} does not exist", cure)
    if not missing:
        yield Check.ok("queues", f"{len(wanted)} topic(s) are there")
