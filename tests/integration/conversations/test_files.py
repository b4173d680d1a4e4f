"""Conversations as files: exported, imported elsewhere and exported again, also when an import is cut off."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from conversing import Json, append, ask, output, penstock, worked
from support import wait_until
from system import NOOP, Process, System, running

TALK = {**NOOP, "id": "talk", "tasks": ["text_generation", "summarization"], "options": {"echo": True}}


@pytest.fixture(scope="module")
def places(kafka: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Process]]:
    """The gateways of two installations."""
    folders = [tmp_path_factory.mktemp("files") for _ in range(2)]
    with worked(kafka, folders[0], [TALK]) as here, worked(kafka, folders[1], [TALK]) as there:
        yield [here.process("g1"), there.process("g1")]


@pytest.fixture
def here(places: list[Process]) -> Process:
    return places[0]


@pytest.fixture
def there(places: list[Process]) -> Process:
    return places[1]


def answers(gateway: Process) -> bool:
    try:
        return httpx.get(f"{gateway.url}/v1/requests").is_success
    except httpx.HTTPError:
        return False


def export(gateway: Process, *words: str) -> str:
    return output(gateway, "export", *words)


def said(text: str) -> list[Json]:
    """What must be equal on both sides: all but ids, places and times; no summaries."""
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines[1:]:
        line.pop("source")
        for image in line.get("images", ()):
            image.pop("artifact_id")
            image.pop("data", None)
    return [line for line in lines[1:] if line["type"] == "message"]


def picture(colour: str) -> str:
    made = io.BytesIO()
    Image.new("RGB", (8, 8), colour).save(made, "PNG")
    return base64.b64encode(made.getvalue()).decode()


def image_part(colour: str) -> Json:
    return {"type": "image", "image": {"data": picture(colour), "media_type": "image/png"}}


CALL = {"id": "c1", "type": "function", "function": {"name": "gate", "arguments": '{"number": 4}'}}
MESSAGES: list[Json] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [image_part("red"), {"type": "text", "text": "Is the gate shut? ✓\n"}], "name": "ann"},
    {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "I look."},
    {"role": "tool", "content": "shut", "tool_call_id": "c1"},
    {"role": "assistant", "content": [image_part("blue")]},
]


def whole_conversation(gateway: Process, conversation: str) -> None:
    """Items of every kind, a turn and a summary."""
    append(gateway, conversation, MESSAGES)
    payload = {"messages": [{"role": "user", "content": "And now?"}]}
    turn = {"task": "text_generation", "conversation_id": conversation, "payload": payload, "metadata": {"k": "v"}}
    ask(gateway, {**turn, "model": "talk"})
    ask(gateway, {"task": "summarization", "model": "talk", "conversation_id": conversation, "payload": {}})


def test_an_export_has_facts_messages_and_marked_summaries(here: Process) -> None:
    whole_conversation(here, "kinds")
    answer = httpx.get(f"{here.url}/v1/conversations/kinds/export")
    assert answer.headers["content-type"].startswith("application/jsonl")
    head, *lines = [json.loads(line) for line in answer.text.splitlines()]
    assert (head["object"], head["version"], head["id"]) == ("conversation.export", 1, "kinds")
    assert (head["messages"], head["summaries"]) == (7, 1)
    assert [line["type"] for line in lines] == ["message"] * 7 + ["summary"]
    assert [line["role"] for line in lines[:7]] == [*(one["role"] for one in MESSAGES), "user", "assistant"]
    assert lines[1]["name"] == "ann"
    assert [image["media_type"] for image in lines[1]["images"]] == ["image/png"]
    assert (lines[2]["tool_calls"], lines[2]["reasoning_content"]) == ([CALL], "I look.")
    assert lines[3]["tool_call_id"] == "c1"
    answered = lines[6]["source"]
    assert (answered["model"], answered["direction"], answered["offset"]) == ("talk", "out", 6)
    assert answered["metadata"] == {"k": "v"}
    assert lines[7]["source"]["covers_through"] == 6
    assert httpx.get(f"{here.url}/v1/conversations/nowhere/export").status_code == 404


def test_a_round_trip_gives_the_same_messages(here: Process, there: Process, tmp_path: Path) -> None:
    whole_conversation(here, "trip")
    file = tmp_path / "trip.jsonl"
    file.write_text(export(here, "trip", "--images"))
    result = penstock(here, "import", str(file), "--id", "copy")
    assert (result.exit_code, result.stdout) == (0, "copy: 7 messages, 7 appended; 1 summaries left out\n"), (
        result.output
    )
    assert said(export(here, "copy")) == said(file.read_text())
    result = penstock(there, "import", str(file), "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"id": "trip", "messages": 7, "appended": 7, "summaries_left_out": 1}
    assert said(export(there, "trip", "--images")) == said(file.read_text())
    again = penstock(there, "import", str(file))
    assert again.stdout == "trip: 7 messages, 0 appended; 1 summaries left out\n", again.output
    append(there, "trip", [{"role": "user", "content": "It goes on."}])
    again = penstock(there, "import", str(file))
    assert (again.exit_code, "0 appended" in again.stdout) == (0, True), again.output


def test_images_of_another_installation_come_with_their_bytes_or_not_at_all(
    here: Process, there: Process, tmp_path: Path
) -> None:
    append(here, "pictures", [*MESSAGES, {"role": "user", "content": [image_part("green")]}])
    file = tmp_path / "pictures.jsonl"
    file.write_text(export(here, "pictures"))
    refused = penstock(there, "import", str(file))
    assert refused.exit_code == 1
    assert "export with --images" in refused.output
    assert httpx.get(f"{there.url}/v1/conversations/pictures").status_code == 404, "nothing was begun"
    assert penstock(here, "import", str(file), "--id", "pictures-2").exit_code == 0, "they are here"


def test_a_conversation_with_other_messages_is_left_alone(here: Process, tmp_path: Path) -> None:
    append(here, "mine", MESSAGES[:1])
    file = tmp_path / "mine.jsonl"
    file.write_text(export(here, "mine"))
    append(here, "other", [{"role": "user", "content": "Something else."}])
    refused = penstock(here, "import", str(file), "--id", "other")
    assert refused.exit_code == 1
    assert "message 1 of other is another than the file's" in refused.output
    assert len(said(export(here, "other"))) == 1


def test_many_conversations_go_into_one_file(here: Process, there: Process, tmp_path: Path) -> None:
    for name in ("many-1", "many-2"):
        append(here, name, [{"role": "user", "content": name}])
    assert httpx.post(f"{here.url}/v1/conversations", json={"id": "many-3"}).status_code == 200
    file = tmp_path / "many.jsonl"
    file.write_text(export(here, "--pattern", "many-*"))
    assert penstock(there, "import", str(file), "--id", "one").exit_code == 2
    result = penstock(there, "import", str(file))
    lines = [f"many-1: {1} messages, 1 appended", "many-2: 1 messages, 1 appended", "many-3: 0 messages, 0 appended"]
    assert result.stdout.splitlines() == lines, result.output
    assert said(export(there, "many-2"))[0]["content"] == "many-2"


def test_an_import_that_is_killed_is_gone_on_with_and_doubles_nothing(here: Process, tmp_path: Path) -> None:
    count = 2_500
    file = tmp_path / "long.jsonl"
    head = {"object": "conversation.export", "version": 1, "id": "long", "messages": count, "summaries": 0}
    lines = [{"type": "message", "role": "user", "content": f"message {number}"} for number in range(count)]
    file.write_text("".join(json.dumps(line) + "\n" for line in (head, *lines)))
    command = [sys.executable, "-m", "penstock.cli.main", "conversations", "import", str(file), "--url", here.url]
    process = subprocess.Popen(command, env={**os.environ, "COLUMNS": "200"})

    def messages() -> int:
        answer = httpx.get(f"{here.url}/v1/conversations/long/export")
        return json.loads(answer.text.splitlines()[0])["messages"] if answer.is_success else 0

    wait_until(lambda: messages() > 0, 60)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    assert messages() < count, "it was killed in the middle"
    result = penstock(here, "import", str(file))
    assert result.exit_code == 0, result.output
    assert [line["content"] for line in said(export(here, "long"))] == [line["content"] for line in lines]


def test_what_an_earlier_import_left_under_way_is_not_appended_twice(kafka: Any, tmp_path: Path, here: Process) -> None:
    """Nobody works at first: the import gives up, and its request goes on."""
    append(here, "later", [{"role": "user", "content": f"message {number}"} for number in range(3)])
    file = tmp_path / "later.jsonl"
    file.write_text(export(here, "later"))
    made = System(kafka.bootstrap_servers, f"later{uuid.uuid4().hex[:6]}-", tmp_path / "later", models=[TALK])
    with running(made) as system:
        gateway = system.gateway()
        wait_until(lambda: answers(gateway), 60)
        result = penstock(gateway, "import", str(file), "--timeout", "1")
        assert result.exit_code == 4, result.output
        assert "0 of 3 messages of later are there: run it again" in result.output
        system.worker().wait_ready()
        result = penstock(gateway, "import", str(file))
        assert result.exit_code == 0, result.output
        assert said(export(gateway, "later")) == said(file.read_text())
        requests = httpx.get(f"{gateway.url}/v1/requests").json()["data"]
        assert len(requests) == 1


def test_what_was_erased_of_an_import_is_imported_anew(here: Process, tmp_path: Path) -> None:
    append(here, "erased", MESSAGES)
    file = tmp_path / "erased.jsonl"
    file.write_text(export(here, "erased"))
    assert penstock(here, "import", str(file), "--id", "erased-2").exit_code == 0
    head, line, *_ = map(json.loads, export(here, "erased-2").splitlines())
    assert httpx.delete(f"{here.url}/v1/requests/{line['source']['request_id']}").is_success

    def erased() -> bool:
        """An export that meets the erasure fails: the next one does not."""
        exported = penstock(here, "export", "erased-2")
        return exported.exit_code == 0 and not said(exported.stdout)

    wait_until(erased, 60)
    result = penstock(here, "import", str(file), "--id", "erased-2")
    assert result.exit_code == 0, result.output
    assert said(export(here, "erased-2")) == said(file.read_text())
    assert json.loads(export(here, "erased-2").splitlines()[0])["log_id"] == head["log_id"]
