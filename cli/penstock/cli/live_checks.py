"""What `penstock doctor` tries on what an installation depends on. Each probe has three seconds."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.cli.rights import OFFSETS_TOPIC, Installation, Right, Role
from penstock.common import admin
from penstock.common.artifacts.configured import open_store, try_store
from penstock.common.configuration import ArtifactsSection
from penstock.common.settings import KafkaSettings
from penstock.schemas.errors import Forbidden, PenstockError
from penstock.schemas.topics import kind_of_topic


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
GRANT = "`penstock topics acls --role operator` prints the rights to grant"
TRANSACTION_S = 1.0
MAX_PROBES = 100
"""Topics of a pattern that are asked about: there may be thousands of conversations."""


def within(name: str, probe: Callable[[], list[Check]], probe_s: float = PROBE_S) -> list[Check]:
    """What the probe finds, or that it took too long. It runs on a thread, which is left behind then."""
    found: list[Check] = []

    def run() -> None:
        try:
            found.extend(probe())
        except Exception as error:
            detail = str(error) or type(error).__name__
            cure = (
                f"{GRANT}, unless this is no operator's client"
                if isinstance(error, Forbidden)
                else "see whether it is reached"
            )
            found.append(Check.fail(name, detail, cure))

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


def right_checks(
    kafka: KafkaSettings, installation: Installation, named: Sequence[Role] | None = None
) -> Iterator[Check]:
    """A line for each operation that the roles need and this client may not do.

    Without named roles it is a warning: the client may be another than that of the gateway and the worker.
    """
    roles, make = named or (Role.GATEWAY, Role.WORKER), Check.fail if named else Check.warn
    missing = {role: missing_rights(kafka, installation.rights(role)) for role in roles}
    printed = " ".join(f"--role {role}" for role in roles if missing[role])
    by_operation: dict[str, list[str]] = {}
    for right in sorted({right for rights in missing.values() for right in rights}):
        where = f"{'topics ' if right.prefixed else ''}{right.name}{'*' if right.prefixed else ''}"
        by_operation.setdefault(right.operation, []).append(
            where if right.kind == "topic" else f"the {right.kind} {right.name}"
        )
    for operation, places in by_operation.items():
        detail = f"no {operation} for {' and '.join(roles)} on {', '.join(places)}"
        yield make("rights", detail, f"`penstock topics acls {printed}` prints the rights to grant")
    if not by_operation:
        yield Check.ok("rights", f"this client may do what {' and '.join(roles)} need")


def missing_rights(kafka: KafkaSettings, rights: Sequence[Right]) -> list[Right]:
    """Those that this client does not have, as far as the brokers tell.

    A pattern is asked for by the topics that match it, and CREATE by a topic that is not made. What the brokers do not
    tell, as READ on a group that nobody has joined, counts as there.
    """
    counts = admin.partition_counts(kafka, timeout_s=PROBE_S)
    probes = {right: _probes(right, counts) for right in rights}
    asked = {name for right, names in probes.items() if right.kind == "topic" for name in names}
    topics = admin.topic_operations(kafka, sorted(asked), PROBE_S)
    groups = admin.group_operations(kafka, sorted({one.name for one in rights if one.kind == "group"}), PROBE_S)

    def is_there(right: Right) -> bool:
        if right.operation == "CREATE":
            return admin.may_create(kafka, probes[right][0], PROBE_S)
        if right.kind == "cluster":
            return _may_read_brokers(kafka)
        if right.name == OFFSETS_TOPIC:  # it may be altered and not described
            return True
        allowed = topics if right.kind == "topic" else groups
        return all(name not in allowed or right.operation in allowed[name] for name in probes[right])

    return [right for right in rights if not is_there(right)]


def _may_read_brokers(kafka: KafkaSettings) -> bool:
    try:
        admin.broker_settings(kafka, PROBE_S)
    except Forbidden:
        return False
    return True


def _probes(right: Right, existing: Iterable[str]) -> Sequence[str]:
    """The names by which the brokers are asked about it."""
    if not right.prefixed:
        return [right.name]
    matching = sorted(name for name in existing if name.startswith(right.name))
    return matching[:MAX_PROBES] or [f"{right.name}doctor"]


def queue_checks(kafka: KafkaSettings, wanted: Sequence[str]) -> list[Check]:
    """Whether the topics of `[[queues]]` are there: while one is missing no queue is read."""
    if not wanted:
        return []
    return list(missing_queue_topics(wanted, admin.partition_counts(kafka, wanted, PROBE_S)))


def missing_queue_topics(wanted: Sequence[str], there: Collection[str]) -> Iterator[Check]:
    missing = [topic for topic in wanted if topic not in there]
    for topic in missing:
        cure = "`penstock topics create` creates it; or take it out of [[queues]]: until then no queue is read"
        yield Check.fail("queues", f"the topic {topic} does not exist", cure)
    if not missing:
        yield Check.ok("queues", f"{len(wanted)} topic(s) are there")
