"""`penstock up` on a data folder of an older release: what had ended is shown, what waited runs once, new work runs.

The older release reads what today's writes: by its own schemas, as a registry lets it.
"""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from confluent_kafka import Message
from fastavro import parse_schema, schemaless_reader, schemaless_writer

from older.folder import schema_ids, unpack
from older.make_folder import MODELS
from penstock.cli.paths import free_port
from penstock.schemas.codec import default_codec, released_schema
from penstock.schemas.records import ResultEvent
from support import wait_until
from system import System

ARCHIVES = (Path(__file__).parents[2] / "older").glob("*.tar.xz")
OLDER = sorted(one for one in ARCHIVES if not one.name.endswith("-source.tar.xz"))


def newest_schemas(ids: Iterable[int]) -> dict[str, tuple[int, Any]]:
    """By the record's name: the newest version with one of these ids, and its schema."""
    found = [known for one in sorted(ids) if (known := released_schema(one)) is not None]
    return {name: (version, parse_schema(json.loads(text), {})) for name, version, text in found}


def read_by_older(value: bytes, older: Mapping[str, tuple[int, Any]]) -> str | None:
    """The name of the record, if its version is newer than the older release's, which reads it by its own schema."""
    known = released_schema(int.from_bytes(value[1:5], "big"))
    if known is None or known[0] not in older or known[1] <= older[known[0]][0]:
        return None
    name, _, text = known
    written, reader = parse_schema(json.loads(text), {}), older[name][1]
    seen: Any = schemaless_reader(io.BytesIO(value[5:]), written, reader)
    today: Any = schemaless_reader(io.BytesIO(value[5:]), written, None)
    plain = {field: one for field, one in seen.items() if not isinstance(one, dict | list)}
    assert plain == {field: today[field] for field in plain}
    schemaless_writer(io.BytesIO(), reader, seen)
    return name


class Upgraded:
    """Today's `penstock up` on the older folder."""

    def __init__(self, archive: Path, folder: Path) -> None:
        self.data, self.notes = unpack(archive, folder)
        self.older_schemas = newest_schemas(schema_ids(self.data))
        self.log, config = folder / "up.out", folder / "penstock.toml"
        config.write_text(MODELS.replace("delay_ms = 500", "delay_ms = 5"))
        self.kafka = f"127.0.0.1:{free_port()}"
        port = free_port()
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=70, trust_env=False)
        ports = ["--port", str(port), "--kafka-port", self.kafka.rpartition(":")[2]]
        command = [sys.executable, "-m", "penstock.cli.main", "up", "--data-dir", str(self.data), *ports]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [*command, "--config", str(config)], stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        wait_until(self._serves, 120, self.logs)

    def _serves(self) -> bool:
        assert self.process.poll() is None, self.logs()
        return "Penstock is up" in self.log.read_text()

    def logs(self) -> str:
        files = [self.log, *sorted((self.data / "logs").iterdir())]
        return "\n".join(f"{one.name}: {one.read_text(errors='replace')[-4_000:]}" for one in files)

    def get(self, path: str, **parameters: Any) -> Any:
        return self.http.get(path, params=parameters).raise_for_status().json()

    def run(self, body: dict[str, Any]) -> Any:
        accepted = self.http.post("/v1/requests", json=body).raise_for_status().json()
        return self.get(accepted["status_url"], wait=60)

    def records(self, folder: Path) -> list[bytes]:
        """Of all topics but those that other software makes."""
        system = System(self.kafka, "", folder)
        topics = [topic for topic in system.reads.topics() if not topic.startswith("__")]
        return [value for topic in topics for message in system.read(topic) if (value := message.value())]

    def results(self, folder: Path) -> list[ResultEvent]:
        messages: list[Message] = System(self.kafka, "", folder).read("inference.result")
        ordered = sorted(messages, key=lambda message: (message.partition() or 0, message.offset() or 0))
        return [default_codec().decode(message.value() or b"", ResultEvent) for message in ordered]


@pytest.fixture(params=OLDER, ids=lambda archive: archive.name)
def upgraded(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Upgraded]:
    found = Upgraded(request.param, tmp_path)
    yield found
    found.http.close()
    if found.process.poll() is None:
        found.process.kill()  # its parts die with it
        found.process.wait(20)


@pytest.mark.slow
def test_a_folder_of_an_older_release_serves_on(upgraded: Upgraded, tmp_path: Path) -> None:
    notes = upgraded.notes
    whole = "".join(f"word{number} " for number in range(notes["words"]))
    shown = {request_id: upgraded.get(f"/v1/requests/{request_id}") for request_id in notes["done"]}
    for request_id, older in notes["done"].items():
        names = ("task", "status", "done", "model", "conversation_id", "result", "error", "timings")
        assert {name: shown[request_id][name] for name in names} == {name: older[name] for name in names}

    left = [*notes["begun"], *notes["waiting"]]
    ended = {request_id: upgraded.get(f"/v1/requests/{request_id}", wait=60) for request_id in left}
    assert [one for one in ended.values() if one["status"] != "completed"] == [], upgraded.logs()
    assert ended[notes["begun"][0]]["result"]["text"] == whole

    turns = upgraded.get("/v1/conversations/c1/items", order="asc", limit=100)["data"]
    asked = [part["text"] for turn in turns if turn["role"] == "user" for part in turn["content"]]
    assert asked == ["turn 0", "turn 1", "turn 2", "the one that began", "the one that waited"]
    assert [turn["role"] for turn in turns] == ["user", "assistant"] * len(asked)

    (processed,) = (one for one in shown.values() if one["task"] == "image_processing")
    image = processed["result"]["images"][0]
    assert len(upgraded.http.get(image["url"]).raise_for_status().content) == image["bytes"]
    (letter,) = upgraded.get("/v1/admin/dlq")["data"]
    assert letter["reason"] == "unknown_schema"
    message = {"role": "user", "content": "a new turn"}
    answer = upgraded.run({"task": "text_generation", "conversation_id": "c1", "payload": {"messages": [message]}})
    assert answer["status"] == "completed", answer

    ends = Counter(event.request_id for event in upgraded.results(tmp_path) if event.is_terminal)
    assert {ends[one] for one in (*notes["done"], *left)} == {1}
    read_back = {read_by_older(value, upgraded.older_schemas) for value in upgraded.records(tmp_path)}
    assert read_back >= {"InferenceRequest", "ResultEvent", "StatusEvent", "ConversationMessage", "WorkerState"}
    check = [sys.executable, "-m", "penstock.cli.main", "topics", "check", "--bootstrap-servers", upgraded.kafka]
    checked = subprocess.run(check, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    upgraded.process.send_signal(signal.SIGTERM)
    assert upgraded.process.wait(90) == 0, upgraded.logs()
