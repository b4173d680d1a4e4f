"""What `penstock doctor` tries on what an installation depends on. Each probe has three seconds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from penstock.cli.checks import Check
from penstock.common import admin
from penstock.common.artifacts.configured import open_store
from penstock.common.configuration import ArtifactsSection
from penstock.common.settings import KafkaSettings
from penstock.schemas.errors import PenstockError

PROBE_S = 3.0
_TENANT, _DATA = "default", b"penstock doctor"


def within(name: str, probe: Callable[[], list[Check]], probe_s: float = PROBE_S) -> list[Check]:
    """What the probe finds, or that it took too long. It runs on a thread, which is left behind then."""
    found: list[Check] = []

    def run() -> None:
        try:
            found.extend(probe())
        except Exception as error:
            detail = str(error) or type(error).__name__
            found.append(Check(name=name, state="fail", detail=detail, cure="see whether it is reached"))

    thread = threading.Thread(target=run, name=f"doctor-{name}", daemon=True)
    thread.start()
    thread.join(probe_s)
    if found or not thread.is_alive():
        return found
    return [Check(name=name, state="fail", detail=f"no answer within {probe_s:g} s", cure="see whether it is reached")]


def artifact_checks(section: ArtifactsSection, location: str) -> list[Check]:
    """Write, read and delete one artifact."""
    try:
        store = open_store(section, location)
        kept = store.put(_TENANT, _DATA, media_type="text/plain", ttl_s=60)
        try:
            if store.get(_TENANT, kept.artifact_id, sha256=kept.sha256) != _DATA:
                cure = "look for another program that writes there"
                return [Check(name="artifacts", state="fail", detail=f"{location} gives other bytes", cure=cure)]
        finally:
            store.delete(_TENANT, kept.artifact_id)
    except (PenstockError, OSError) as error:
        cure = "outputs over 256 KiB and images wait for it: see [artifacts] location and its options"
        return [Check(name="artifacts", state="fail", detail=f"{location}: {error}", cure=cure)]
    return [Check(name="artifacts", state="ok", detail=f"{location}: one was written, read and deleted")]


def artifacts_location(section: ArtifactsSection, running_in: Path | None) -> str | None:
    """Where artifacts are: as configured, else where a `penstock up` in that folder keeps them; None: nobody says."""
    if "location" in section.model_fields_set:
        return section.location
    return None if running_in is None else str(running_in / "artifacts")


def queue_checks(kafka: KafkaSettings, queues: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Whether the topics of `[[queues]]` are there: while one is missing no queue is read."""
    wanted = [topic for queue in queues for topic in (queue["topic"], queue["result_topic"]) if topic]
    if not wanted:
        return []
    return list(missing_queue_topics(wanted, admin.partition_counts(kafka, wanted, PROBE_S)))


def missing_queue_topics(wanted: Sequence[str], there: Collection[str]) -> Iterator[Check]:
    """Pure."""
    missing = [topic for topic in wanted if topic not in there]
    for topic in missing:
        cure = "create it, or take it out of [[queues]]: until then no queue is read"
        yield Check(name="queues", state="fail", detail=f"the topic {topic} does not exist", cure=cure)
    if not missing:
        yield Check(name="queues", state="ok", detail=f"{len(wanted)} topic(s) are there")


def following_checks(url: str, headers: Mapping[str, str]) -> list[Check]:
    """Whether the workers have observed what was ordered; nothing where the gateway does not tell this caller."""
    try:
        answer = httpx.get(f"{url}/v1/admin/models", headers=headers, timeout=PROBE_S, trust_env=False)
        models: list[dict[str, Any]] = answer.json()["data"] if answer.status_code == 200 else []
    except (httpx.HTTPError, ValueError, KeyError):
        return []
    return list(unobserved(models))


def unobserved(models: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    """Pure."""
    waiting = {worker for model in models for worker in model["waiting_workers"]}
    late = sorted(str(model["id"]) for model in models if model["waiting_workers"])
    if late:
        cure = "the log of each says why: a worker follows inference.desired within seconds"
        detail = f"{', '.join(sorted(waiting))} have not observed what was ordered of {', '.join(late)}"
        yield Check(name="orders", state="warn", detail=detail, cure=cure)
