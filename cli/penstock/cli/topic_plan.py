"""What differs between the topics and the settings, and what of it can be changed while what runs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from penstock.schemas.topics import HORIZON_MS, TopicNames, TopicSpec

if TYPE_CHECKING:
    from penstock.common.admin import TopicReport

State = Literal["create", "change", "keep", "refuse", "by_hand"]
PARTITIONS, REPLICATION, MIN_INSYNC = "partitions", "replication", "min.insync.replicas"
LEAST = {"retention.ms": 2 * HORIZON_MS, "min.insync.replicas": 2, "max.message.bytes": 1_000_000}
"""Settings that `[topics.config]` may raise. -1 is without limit."""
FREE = frozenset(
    {
        "compression.type",
        "delete.retention.ms",
        "file.delete.delay.ms",
        "flush.messages",
        "flush.ms",
        "local.retention.bytes",
        "local.retention.ms",
        "max.compaction.lag.ms",
        "min.cleanable.dirty.ratio",
        "preallocate",
        "remote.storage.enable",
        "segment.bytes",
        "segment.jitter.ms",
        "segment.ms",
    }
)
"""Settings that `[topics.config]` may set to any value. Penstock relies on all that are in neither: no record goes
before its time, no write that was acknowledged is lost.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One difference. `keep`: it breaks nothing and stays; `refuse`: it may not be made, now or ever, as `reason` says;
    `by_hand`: only Kafka's own tool can.
    """

    topic: str
    setting: str
    found: str
    wanted: str
    state: State
    reason: str | None = None


def wrong_override(topic: str, config: Mapping[str, str]) -> str | None:
    """Why `[topics.config]` may not set this."""
    for setting, value in config.items():
        if setting not in LEAST and setting not in FREE:
            may = ", ".join(sorted({*LEAST, *FREE}))
            return f"{topic}: {setting} cannot be set: Penstock relies on its own (these can be: {may})"
        if setting in LEAST and not _is_at_least(value, LEAST[setting]):
            without = "-1 or " if setting == "retention.ms" else ""
            return f"{topic}: {setting} must be {without}at least {LEAST[setting]}"
    return None


def _is_at_least(value: str, least: int) -> bool:
    return (value == "-1" and least == LEAST["retention.ms"]) or (value.isdigit() and int(value) >= least)


def keeps_long_enough(retention_ms: str) -> bool:
    """At least two horizons, or for ever: no request outlives its record."""
    return _is_at_least(retention_ms, LEAST["retention.ms"])


def changes(
    missing: Sequence[TopicSpec],
    reports: Iterable[TopicReport],
    specs: Iterable[TopicSpec],
    names: TopicNames,
    *,
    chosen: Mapping[str, Mapping[str, str]],
    busy: str | None,
) -> list[Change]:
    """In the order in which they are made. `chosen`: `[topics.config]` by whole names; `busy`: what forbids more
    partitions of request topics now.
    """
    found = [
        Change(topic=one.name, setting="topic", found="absent", wanted=f"{one.partitions} partitions", state="create")
        for one in missing
    ]
    by_name = {one.name: one for one in specs}
    for report in reports:
        for setting, (wanted, actual) in sorted(report.drift.items(), key=lambda item: item[0] == PARTITIONS):
            state, reason = _judged(report, setting, wanted, actual, names, chosen, by_name.get(report.name), busy)
            found.append(
                Change(topic=report.name, setting=setting, found=actual, wanted=wanted, state=state, reason=reason)
            )
    return found


def _judged(
    report: TopicReport,
    setting: str,
    wanted: str,
    actual: str,
    names: TopicNames,
    chosen: Mapping[str, Mapping[str, str]],
    spec: TopicSpec | None,
    busy: str | None,
) -> tuple[State, str | None]:
    if setting == PARTITIONS:
        is_single = spec is not None and spec.partitions == 1
        return _more_partitions(report.name, int(wanted), int(actual), names, is_single, busy)
    if setting == REPLICATION:
        if int(actual) > int(wanted):
            return "keep", "more replicas than needed"
        return "by_hand", "kafka-reassign-partitions.sh with the JSON that `penstock topics plan --json` has"
    replicas = report.drift.get(REPLICATION, ("", str(spec.replication if spec else 1)))[1]
    if setting == MIN_INSYNC and int(wanted) > max(int(actual), int(replicas) - 1):
        return "refuse", f"the topic has {replicas} replicas: first raise the replication, or writes would fail"
    if setting in chosen.get(report.name, {}):
        shorter = setting == "retention.ms" and actual != "-1" and wanted != "-1" and int(wanted) < int(actual)
        return "change", "older records are deleted" if shorter else None
    if setting == "retention.ms" and keeps_long_enough(actual):
        return "keep", "it keeps records long enough; set it in [topics.config] to change it"
    if setting == MIN_INSYNC and int(actual) > int(wanted):
        return "keep", "stricter than needed"
    return "change", None


def _more_partitions(
    topic: str, wanted: int, actual: int, names: TopicNames, is_single: bool, busy: str | None
) -> tuple[State, str | None]:
    if is_single:
        return "refuse", "it must have one partition, and Kafka removes none: delete the topic, and create it again"
    if wanted < actual:
        return "refuse", "Kafka removes no partitions"
    if topic in (names.result, names.status, names.delivery, names.idempotency, names.conversation_log):
        return "keep", "what is on it is found by the partition of its key, which would be another"
    if names.is_request_topic(topic) and busy is not None:
        return "refuse", f"turns of a conversation could run out of order: {busy}"
    return "change", None


def reassignment(
    replicas: Mapping[str, Sequence[Sequence[int]]], brokers: Sequence[int], wanted: int
) -> dict[str, object]:
    """The JSON for kafka-reassign-partitions.sh: replicas are added, none is moved. `replicas`: by topic and partition,
    the leader's first.
    """
    partitions: list[dict[str, object]] = []
    for topic, of_partitions in sorted(replicas.items()):
        for number, held in enumerate(of_partitions):
            others = [broker for broker in sorted(brokers) if broker not in held]
            turned = others[number % len(others) :] + others[: number % len(others)] if others else []
            partitions.append(
                {"topic": topic, "partition": number, "replicas": [*held, *turned][: max(wanted, len(held))]}
            )
    return {"version": 1, "partitions": partitions}
