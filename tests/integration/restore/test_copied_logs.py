"""A broker's files, copied while it runs, with parts of different age: what an installation on the copy does."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from conversing import items, turn
from kit.pictures import file_of
from penstock.cli.embedded_kafka import EmbeddedKafka
from penstock.cli.paths import free_port
from restoring import reconcile, text_so_far
from system import NOOP, Process, System

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WORDS = 40
MODELS: list[dict[str, Any]] = [
    {**NOOP, "options": {"tokens": 4}},
    {**NOOP, "id": "slow", "options": {"tokens": WORDS, "delay_ms": 300, "slots": 4}},
    {"id": "imaging", "source": "pillow", "engine": "imaging", "tasks": ["image_processing"], "preload": False},
]
GROUPS = "__consumer_offsets-*"


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[tuple[EmbeddedKafka, EmbeddedKafka]]:
    """One after the other; the second has the files that the test puts into its folder."""
    made = tuple(EmbeddedKafka(tmp_path / name, free_port()) for name in ("first", "second"))
    try:
        yield made[0].start(), made[1]
    finally:
        for broker in made:
            broker.kill()


def copy_files(source: EmbeddedKafka, into: Path, pattern: str) -> None:
    for folder in (source.data_dir / "topics").glob(pattern):
        shutil.rmtree(into / folder.name, ignore_errors=True)
        shutil.copytree(folder, into / folder.name) if folder.is_dir() else shutil.copy(folder, into)


def upload(gateway: Process) -> str:
    headers, image = {"content-type": "image/png"}, file_of(Image.new("RGB", (4, 4)))
    answer = httpx.post(f"{gateway.url}/v1/artifacts", content=image, headers=headers, timeout=30)
    return str(answer.raise_for_status().json()["artifact_id"])


def rotate(artifact_id: str) -> dict[str, Any]:
    """The fields of a request that reads the image."""
    payload = {"image": {"artifact_id": artifact_id}, "operations": [{"op": "rotate", "degrees": 90}]}
    return {"task": "image_processing", "model": "imaging", "payload": payload}


def content_status(gateway: Process, artifact_id: str) -> int:
    return httpx.get(f"{gateway.url}/v1/artifacts/{artifact_id}/content", timeout=30).status_code


def test_an_older_copy_of_the_groups_runs_again_what_had_ended_and_ends_all(
    brokers: tuple[EmbeddedKafka, EmbeddedKafka], tmp_path: Path
) -> None:
    first, second = brokers
    system = System(first.bootstrap_servers, "copied-", tmp_path / "system", models=MODELS)
    system.folder.mkdir()
    system.create_topics()
    try:
        system.start_all(["w1", "g1"])
        gateway = system.process("g")
        early = gateway.submit(model="noop")
        assert gateway.request(early, wait=30)["status"] == "completed"
        system.wait_drained()
        copy = tmp_path / "copy"
        copy.mkdir()
        copy_files(first, copy, GROUPS)
        for name in ("w2", "w3"):  # each rebalance is a generation that the copy does not know
            assert system.process("w").stop() == 0
            worker = system.worker(name).wait_ready()
        with httpx.Client(base_url=gateway.url, timeout=60) as http:
            done = [gateway.submit(model="noop"), turn(http, "c", "q0", "noop")["request_id"]]
        older, artifacts = upload(gateway), system.folder / "artifacts"
        shutil.copytree(artifacts, tmp_path / "artifacts")
        newer = upload(gateway)
        rotated = gateway.submit(**rotate(newer))
        made = gateway.request(rotated, wait=60)["result"]["images"][0]["artifact_id"]
        shown = {one: gateway.request(one, wait=30) for one in [early, *done]}
        stream = gateway.submit(model="slow", stream=True)
        told = text_so_far(gateway, stream)
        worker.kill9()
        waiting = [gateway.submit(**rotate(one)) for one in (older, newer)]
        groups = tmp_path / "groups"
        shutil.move(copy, groups)
        shutil.copytree(first.data_dir / "topics", second.data_dir / "topics")
        shutil.copytree(groups, second.data_dir / "topics", dirs_exist_ok=True)
    finally:
        system.stop()
        system.reads.close()
        first.kill()
    shutil.rmtree(artifacts)
    shutil.copytree(tmp_path / "artifacts", artifacts)

    second.start()
    system = System(second.bootstrap_servers, "copied-", tmp_path / "system", models=MODELS)
    try:
        system.start_all(["w4", "g1"])  # with the view's file, which is newer than the copy
        worker, gateway = system.process("w"), system.process("g")
        ended = [gateway.request(one, wait=60) for one in waiting]
        assert [(one["status"], (one["error"] or {}).get("code")) for one in ended] == [
            ("completed", None),
            ("failed", "not_found"),
        ]
        assert [content_status(gateway, one) for one in (older, newer, made)] == [200, 404, 404]
        system.wait_drained()
        assert gateway.request(stream)["status"] == "running", "without reconcile readers ignore the lower epoch"
        assert worker.stop() == 0
        assert reconcile(system)["unfinished"] == 1
        system.worker("w5").wait_ready()
        ended = gateway.request(stream, wait=60)
        assert ended["status"] == "completed", gateway.tail()
        assert ended["result"]["text"].startswith(told)
        assert {one: gateway.request(one) for one in shown} == shown
        with httpx.Client(base_url=gateway.url, timeout=60) as http:
            assert len(items(http, "c")) == 2
            assert turn(http, "c", "q1", "noop")["status"] == "completed"
            assert len(items(http, "c")) == 4
    finally:
        system.stop()
        system.reads.close()
