"""Runs rows of the fault table, one after the other: a system, a load, a moment, a fault, a history, the checker."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import shutil
import time
import uuid
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from confluent_kafka import KafkaException

from penstock.cli.faults.checker import Row, check
from penstock.cli.faults.clients import Clients
from penstock.cli.faults.disks import SmallDisk
from penstock.cli.faults.histories import History, read, text_or_digest
from penstock.cli.faults.loads import REFERENCE, Load, load_of
from penstock.cli.faults.matrix import Plan
from penstock.cli.faults.moments import NotReached, Scene, leave, prepare, reach, wait_for
from penstock.cli.faults.site import Broker, Site, broker
from penstock.cli.faults.strikes import strike, strike_bystander
from penstock.cli.faults.stubs import Outside, outside
from penstock.common.artifacts import ArtifactStore
from penstock.common.reader import PartitionReader, RawMessage
from penstock.common.settings import KafkaSettings
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import PenstockError
from penstock.schemas.records import ArtifactRef, ResultEvent, StatusEvent, WorkerState
from penstock.schemas.topics import is_of_gateway

ASK_S = 20.0


class TopicReader:
    """Reads on a thread of its own from the topics' beginnings until `finish`."""

    def __init__(self, kafka: KafkaSettings, history: History) -> None:
        self._history, self._names = history, kafka.names
        self._codec = default_codec()
        self.artifacts: dict[str, tuple[str, ArtifactRef]] = {}
        """By request: the tenant, and the output that lies in the store."""
        self.worker: WorkerState | None = None
        """What a worker has said last of itself."""
        topics = [self._names.result, self._names.status, self._names.worker]
        self._reader = PartitionReader(kafka, topics, self._on_batch, name="faults-reader")
        self._reader.start(ASK_S)

    def finish(self, within_s: float) -> None:
        """Note what the results and statuses hold now, and end. Raises BrokerUnavailable, InternalError."""
        places = [tp for tp in self._reader.positions() if tp[0] != self._names.worker]
        self._reader.wait_until_caught_up(within_s, partitions=places)
        self.stop()

    def stop(self) -> None:
        self._reader.stop()

    def _on_batch(self, messages: Sequence[RawMessage]) -> None:
        for message in messages:
            self._note(message)

    def _note(self, message: RawMessage) -> None:
        value, place = message.value or b"", {"partition": message.partition, "offset": message.offset}
        if message.topic == self._names.result:
            event = self._codec.decode(value, ResultEvent)
            self._history.note("record", event.request_id, **place, value=base64.b64encode(value).decode())
            if event.is_terminal:
                self._history.named["terminal"].add(event.request_id)
            if event.output_artifact is not None:
                self.artifacts[event.request_id] = event.tenant, event.output_artifact
        elif message.topic == self._names.worker:
            if is_of_gateway(message.key):
                return
            self.worker = self._codec.decode(value, WorkerState) if value else None
        else:
            status = self._codec.decode(value, StatusEvent)
            facts = {"status": status.status, "epoch": status.epoch, "attempt": status.attempt}
            self._history.note("status", status.request_id, **place, **facts)


SETTLED_S = 240.0
"""So long after the fault every request may take to its outcome."""
QUIET_S = 1.0
"""After the last commit of the planted defect: its losses have no outcome that could be waited for."""
READ_S = 60.0
ENGINE_SLOTS = 64
"""Of a real model: so many requests run on it at once, half of them streams."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What all rows of one run share. `folder` gets a history of each row, and under `logs` those of its parts."""

    folder: Path
    count: int
    seed: int
    commit: str

    def history_of(self, plan: Plan) -> Path:
        return self.folder / f"{plan.name.replace(':', '.')}.jsonl"

    def logs_of(self, plan: Plan) -> Path:
        return self.folder / "logs" / plan.name.replace(":", ".")


def run_row(plan: Plan, run: Run, shared: Broker, scratch: Path) -> Row:
    """Run one row. If the harness itself fails, the row is not proven, and `how` says why."""
    history = History(run.history_of(plan))
    facts: dict[str, Any] = {"row": plan.row, "moment": plan.moment, "control": plan.control, "expected": plan.expected}
    facts |= {"count": run.count, "seed": run.seed, "commit": run.commit}
    history.note("row", faults=plan.row != "none", least_in_flight=_least_in_flight(plan, run.count), **facts)
    place = scratch / f"{plan.name.replace(':', '.')}-{uuid.uuid4().hex[:6]}"
    place.mkdir()
    try:
        _run_at(place, plan, run, shared, history)
    except Exception as error:
        history.note("fault", target=plan.row, how=f"{type(error).__name__}: {error}", proven=False)
    finally:
        history.close()
        shutil.rmtree(place, ignore_errors=True)
    return check(read(run.history_of(plan)))


def _run_at(place: Path, plan: Plan, run: Run, shared: Broker, history: History) -> None:
    with _ground(plan, place, shared) as (ground, disk), outside(history) as server:
        folder = (place if disk is None else disk.path) / "system"
        load = load_of(plan, run.count, server.url, random.Random(f"{run.seed} {plan.name}"))
        try:
            site = Site(
                ground,
                folder,
                f"{plan.name.translate(_PLAIN)}-{uuid.uuid4().hex[:6]}-",
                models=load.models,
                receiver=server.url.removeprefix("http://"),
                faults=load.faults,
            )
            try:
                scene = _scene(site, server, history, plan, load)
                asyncio.run(_play(plan, load, scene, disk, f"{run.seed}-{plan.name.translate(_PLAIN)}"))
                site.stop()
                site.delete_topics()
            finally:
                site.stop()
        finally:
            keep_logs(folder, run.logs_of(plan))
            if disk is not None:
                keep_logs(disk.path / "kafka", run.logs_of(plan))


def keep_logs(folder: Path, into: Path) -> None:
    into.mkdir(parents=True, exist_ok=True)
    for log in folder.glob("*.log"):
        shutil.copy(log, into)


def _least_in_flight(plan: Plan, count: int) -> int:
    if plan.moment == "webhook":
        return 0  # whoever is called back has ended
    return min(count // 2, ENGINE_SLOTS) if plan.row == "engine" else count // 2


def _scene(site: Site, server: Outside, history: History, plan: Plan, load: Load) -> Scene:
    streams, real = sum(one.streams for one in load.asked), plan.row == "engine"
    return Scene(
        site=site,
        outside=server,
        history=history,
        count=len(load.asked),
        streams=min(streams, ENGINE_SLOTS // 2) if real else streams,
        real_model=real,
    )


_PLAIN = str.maketrans({":": "-", "+": "-", "_": "-"})


@contextmanager
def _ground(plan: Plan, place: Path, shared: Broker) -> Generator[tuple[Broker, SmallDisk | None]]:
    """The broker of the row: one on a small disk of its own where the disk is to be full."""
    if plan.row != "disk":
        yield shared, None
        return
    disk = SmallDisk(place)
    try:
        with broker(disk.path / "kafka") as own:
            yield own, disk
    finally:
        disk.remove()


async def _play(plan: Plan, load: Load, scene: Scene, disk: SmallDisk | None, key: str) -> None:
    site, history = scene.site, scene.history
    asked = await asyncio.to_thread(_with_known_texts, load, site, history)
    reader = TopicReader(site.kafka, history)
    clients = Clients(history, site.url("gateway"), site.kafka, asked.asked, key=key)
    planted = plan.control == "planted bug"
    try:
        await prepare(plan.moment, scene)
        clients.start()
        try:
            await reach(plan.moment, scene, planted=planted)
            if plan.control == "wrong target":
                await strike_bystander(scene)
            for part in [] if plan.control == "wrong target" else plan.strikes:
                await strike(part, scene, disk)
        except (NotReached, TimeoutError) as error:
            history.note("fault", target=plan.row, how=str(error), proven=False)
        leave(scene)
        await _settle(scene, clients, planted=planted)
        await clients.ask_again()
        await asyncio.to_thread(_look_at_the_end, scene, reader)
    finally:
        await clients.stop()
        await asyncio.to_thread(reader.stop)


async def _settle(scene: Scene, clients: Clients, *, planted: bool) -> None:
    """Until all have ended, or the time is over: what is missing then is the checker's."""
    named = scene.history.named

    def settled() -> bool:
        told = all(task.done() for task in clients.tasks)
        hooked = named["expects_webhook"] <= named["webhook"]
        return told and hooked and scene.acknowledged() and named["acknowledged"] <= named["terminal"]

    def committed() -> bool:
        return scene.acknowledged() and _lag(scene.site) == 0

    def outcomes_heard() -> bool:
        heard = named["heard_by_client"] & named["terminal"] <= named["outcome"]
        return heard and named["expects_webhook"] & named["terminal"] <= named["webhook"]

    try:
        if planted:  # whatever was committed and has no outcome then will never have one
            await wait_for(committed, "all is committed", SETTLED_S)
            await asyncio.sleep(QUIET_S)
            await wait_for(outcomes_heard, "each outcome is heard", READ_S)
        else:
            await wait_for(settled, "every request has its outcome", SETTLED_S)
            await wait_for(committed, "all is committed", READ_S)
    except NotReached as error:
        scene.history.note("not_settled", how=f"{error}; clients that wait: {clients.waiting()}")


def _lag(site: Site) -> int | None:
    """None while the broker or the group's coordinator does not answer."""
    try:
        return site.committed_and_lag()[1]
    except KafkaException:
        return None


def _look_at_the_end(scene: Scene, reader: TopicReader) -> None:
    history = scene.history
    now_ms = time.time() * 1000
    give_up = time.monotonic() + READ_S
    while reader.worker is None or reader.worker.updated_at < now_ms:
        if time.monotonic() > give_up:
            break
        time.sleep(0.1)
    try:
        reader.finish(READ_S)
    except PenstockError as error:
        history.note("not_settled", how=str(error))
    store = ArtifactStore(str(scene.site.artifacts))
    for request_id, (tenant, kept) in reader.artifacts.items():
        output = json.loads(store.get(tenant, kept.artifact_id, sha256=kept.sha256))
        history.note("artifact", request_id, text=text_or_digest(output["text"]))
    history.note("lag", records=scene.site.committed_and_lag()[1])
    if (state := reader.worker) is not None and state.updated_at >= now_ms:
        of_models = sum(model.reserved_bytes or 0 for model in state.models)
        history.note("grants", reserved=sum(one.reserved_bytes for one in state.devices), of_models=of_models)


def _with_known_texts(load: Load, site: Site, history: History) -> Load:
    """Have a real model write each text once, alone, before anything is struck."""
    if not load.prompts:
        return load
    texts: list[str] = []
    with httpx.Client(base_url=site.url("gateway"), timeout=READ_S, trust_env=False) as http:
        for fields in load.prompts:
            body = {"task": "text_generation", "model": REFERENCE, **fields}
            request_id = http.post("/v1/requests", json=body).raise_for_status().json()["request_id"]
            ended: dict[str, Any] = {"done": False}
            while not ended["done"]:
                ended = http.get(f"/v1/requests/{request_id}", params={"wait": 20}).raise_for_status().json()
            texts.append(ended["result"]["text"])
    if len(set(texts)) <= len(texts) // 2:
        history.note("not_settled", how=f"only {len(set(texts))} of {len(texts)} known texts are different")
    known = [replace(one, text=texts[one.number % len(texts)]) for one in load.asked]
    return replace(load, asked=known)
