"""Batches as the stock OpenAI client uses them, on real workers and gateways."""

from __future__ import annotations

import base64
import json
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from kit.assets import prepared
from kit.batches import CHAT, Batches, line
from penstock.common.artifacts import ArtifactStore
from penstock.gateway.batches.keeping import BatchStore
from penstock.gateway.batches.records import batch_id_of, file_id_of
from penstock.gateway.edge.keys import create_key, list_keys, revoke_key
from support import wait_until
from system import NOOP, Process, System

Make = Callable[..., System]
SLOW = {**NOOP, "options": {"tokens": 4, "delay_ms": 25, "slots": 8}}


def SYSTEM() -> dict[str, Any]:
    minilm = {"id": "minilm", "source": str(prepared("all-minilm-l6-v2")), "engine": "embedding", "device": "cpu"}
    models = [NOOP, {**SLOW, "id": "slow"}, {**minilm, "tasks": ["embedding"]}]
    return {"models": models, "gateway_options": {"batch_lines": 50}}


@pytest.fixture
def batches(gateway: Process) -> Batches:
    return Batches.at(gateway)


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def custom_ids(lines: list[dict[str, Any]]) -> list[str]:
    return sorted(one["custom_id"] for one in lines)


def names(count: int) -> list[str]:
    return sorted(f"line-{n}" for n in range(count))


def each_ran_once(system: System, lines: int) -> None:
    """By the log: each line's request stands on its topic once and has one terminal event."""
    terminal = Counter(event.request_id for event in system.results() if event.kind == "terminal")
    assert len(terminal) == lines
    assert set(terminal.values()) == {1}


def test_a_batch_that_is_created_again_with_its_key_is_one(batches: Batches) -> None:
    """A caller whose gateway was killed before it answered: the repeat ran all lines again."""
    file_id = batches.upload([line(0, CHAT, model="noop", messages=messages("hello"))])

    def create(key: str | None, **changed: Any) -> Any:
        asked: dict[str, Any] = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h", **changed}
        headers = {} if key is None else {"Idempotency-Key": key}
        return batches.client.batches.create(**asked, extra_headers=headers)

    before = [one.id for one in batches.client.batches.list()]
    first, again, other, plain = create("night"), create("night"), create("day"), create(None)
    assert first.id == again.id
    assert first.created_at == again.created_at
    listed = [one.id for one in batches.client.batches.list()]
    assert sorted(listed) == sorted([*before, first.id, other.id, plain.id])
    with pytest.raises(openai.UnprocessableEntityError) as reused:
        create("night", metadata={"of": "another"})
    assert reused.value.code == "idempotency_key_reused"
    with pytest.raises(openai.BadRequestError):
        create("k" * 256)
    for made in (first, other, plain):
        batches.wait(made.id)


def test_a_batch_of_every_endpoint(batches: Batches, gateway: Process) -> None:
    asked: dict[str, dict[str, Any]] = {
        CHAT: {"model": "noop", "messages": messages("hello")},
        "/v1/completions": {"model": "noop", "prompt": "hello"},
        "/v1/responses": {"model": "noop", "input": "hello"},
        "/v1/embeddings": {"model": "minilm", "input": ["hello", "you"], "encoding_format": "base64"},
    }
    begun = {
        url: batches.begin([line(n, url, **body) for n in range(40)], url, metadata={"url": url})
        for url, body in asked.items()
    }
    for url, batch_id in begun.items():
        ended = batches.wait(batch_id)
        counts = ended.request_counts
        assert (ended.status, counts.total, counts.completed, counts.failed) == ("completed", 40, 40, 0), ended
        assert (ended.endpoint, ended.metadata, ended.errors, ended.error_file_id) == (url, {"url": url}, None, None)
        answers = batches.lines(ended.output_file_id)
        assert custom_ids(answers) == names(40)
        same = httpx.post(gateway.url + url, json=asked[url], timeout=30).json()
        for answer in answers:
            response = answer["response"]
            assert (answer["error"], response["status_code"]) == (None, 200)
            assert answer["id"] == f"batch_req_{response['request_id'].replace('-', '')}"
            (mine, vectors), (theirs, others) = parts(response["body"]), parts(same)
            assert mine == theirs, "as the route answers"
            # Which texts share a batch changes the last bits of a vector.
            assert vectors == pytest.approx(others, abs=1e-5)
            shown = httpx.get(f"{gateway.url}/v1/requests/{response['request_id']}").json()
            assert (shown["status"], shown["priority"]) == ("completed", 8)
        assert ended.usage.total_tokens == sum(
            answer["response"]["body"]["usage"]["total_tokens"] for answer in answers
        )
    listed = [one.id for one in batches.client.batches.list(limit=3)]
    assert listed[:4] == [*reversed(begun.values())], "all pages, the newest first"


OWN = ("id", "created", "created_at", "completed_at")


def parts(answer: dict[str, Any]) -> tuple[dict[str, Any], list[float]]:
    """An answer without what each has of its own (ids, times, vectors); and the values of its vectors."""
    vectors: list[float] = []

    def shared(found: dict[str, Any]) -> dict[str, Any]:
        if isinstance(text := found.pop("embedding", None), str):
            data = base64.b64decode(text)
            vectors.extend(struct.unpack(f"<{len(data) // 4}f", data))
        return {key: value for key, value in found.items() if key != "id"}

    text = json.dumps({key: value for key, value in answer.items() if key not in OWN})
    return json.loads(text, object_hook=shared), vectors


def test_files(batches: Batches, gateway: Process) -> None:
    client = batches.client
    content = b"x" * 3_000_000 + b"\nlast"
    made = client.files.create(
        file=("in.jsonl", content), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3_600}
    )
    assert (made.filename, made.bytes, made.purpose, made.object) == ("in.jsonl", len(content), "batch", "file")
    assert made.expires_at == made.created_at + 3_600
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).content == content
    other = client.files.create(file=b"y", purpose="batch")
    assert [one.id for one in client.files.list(limit=1)][:2] == [other.id, made.id]
    assert [one.id for one in client.files.list(order="asc")][-2:] == [made.id, other.id]
    assert {one.purpose for one in client.files.list(purpose="batch_output")} <= {"batch_output"}
    assert client.files.delete(other.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(other.id)
    listed = [one.id for one in client.files.list()]
    assert (listed[0], other.id in listed) == (made.id, False)
    for options, param in (
        ({"purpose": "vision", "file": b"x"}, "purpose"),
        ({"purpose": "batch", "file": b""}, "file"),
        ({"purpose": "batch", "file": b"x", "expires_after": {"anchor": "created_at", "seconds": 5}}, "expires_after"),
        ({"purpose": "batch", "file": b"x", "extra_body": {"other": "1"}}, "other"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.files.create(**options)  # type: ignore[arg-type]
        assert str(caught.value.param).startswith(param)
    assert httpx.post(gateway.url + "/v1/files", json={"purpose": "batch"}).status_code == 400


def test_a_file_is_as_large_as_the_setting_says(make_system: Make) -> None:
    system = make_system(models=[NOOP], gateway_options={"max_batch_bytes": 5_000_000, "max_body_bytes": 10_000})
    client = Batches.at(system.gateway().wait_ready()).client
    assert client.files.create(file=b"x" * 4_000_000, purpose="batch").bytes == 4_000_000
    with pytest.raises(openai.APIStatusError) as caught:
        client.files.create(file=b"x" * 5_200_000, purpose="batch")
    assert caught.value.status_code == 413


def test_a_wrong_file_fails_the_batch_with_line_numbers(batches: Batches, system: System) -> None:
    before = len(system.results())
    ended = batches.wait(batches.begin([line(0), "no json", line(0), line(1, "/v1/embeddings")]))
    assert (ended.status, ended.output_file_id, ended.request_counts.completed) == ("failed", None, 0)
    found = [(one.line, one.code, one.param) for one in ended.errors.data]
    assert found == [
        (2, "invalid_json_line", None),
        (3, "duplicate_custom_id", "custom_id"),
        (4, "mismatched_endpoint", "url"),
    ]
    assert len(system.results()) == before, "nothing ran"


def test_wrong_bodies_fail_alone(batches: Batches) -> None:
    wrong: list[tuple[dict[str, Any], int, str]] = [
        ({"model": "noop"}, 400, "invalid"),
        ({"model": "noop", "messages": messages("x"), "stream": True}, 400, "unsupported_parameter"),
        ({"model": "noop", "messages": messages("x"), "what": 1}, 400, "unsupported_parameter"),
        ({"model": "none", "messages": messages("x")}, 404, "model_not_found"),
        ({"model": "noop", "messages": messages("\ud800")}, 400, "invalid"),
    ]
    lines = [line(n, **body) for n, (body, _, _) in enumerate(wrong)] + [line(n) for n in range(len(wrong), 30)]
    ended = batches.wait(batches.begin(lines))
    counts = ended.request_counts
    assert (ended.status, counts.completed, counts.failed) == ("completed", 30 - len(wrong), len(wrong))
    errors = {one["custom_id"]: one for one in batches.lines(ended.error_file_id)}
    for number, (_, status, code) in enumerate(wrong):
        error = errors.pop(f"line-{number}")
        assert (error["error"], error["response"]["status_code"]) == (None, status), error
        assert error["response"]["body"]["error"]["code"] == code
    assert not errors
    assert custom_ids(batches.lines(ended.output_file_id)) == sorted(f"line-{n}" for n in range(len(wrong), 30))


def test_what_a_batch_may_not_be(batches: Batches) -> None:
    file_id = batches.upload([line(0)])
    for wrong, status in (
        ({"endpoint": "/v1/videos"}, 400),
        ({"completion_window": "1h"}, 422),
        ({"input_file_id": "file-" + "0" * 32}, 404),
        ({"metadata": {"a": 1}}, 400),
    ):
        options: dict[str, Any] = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h", **wrong}
        with pytest.raises(openai.APIStatusError) as caught:
            batches.client.batches.create(**options)
        assert caught.value.status_code in (status, 400)
        assert caught.value.param == next(iter(wrong)) or "metadata" in str(caught.value.param)
    with pytest.raises(openai.NotFoundError):
        batches.get("batch_" + "0" * 32)


def test_a_cancelled_batch_keeps_what_ended(batches: Batches) -> None:
    batch_id = batches.begin([line(n, model="slow", messages=messages("hi")) for n in range(2_000)])
    batches.wait_count(batch_id, 20)
    assert batches.client.batches.cancel(batch_id).status == "cancelling"
    ended = batches.wait(batch_id, 60)
    counts = ended.request_counts
    assert ended.status == "cancelled"
    assert ended.cancelled_at >= ended.cancelling_at
    assert 20 <= counts.completed < 1_000
    answers, errors = batches.lines(ended.output_file_id), batches.lines(ended.error_file_id)
    assert (len(answers), len(errors)) == (counts.completed, counts.failed)
    assert {one["error"]["code"] for one in errors} == {"batch_cancelled"}
    assert custom_ids([*answers, *errors]) == names(2_000)
    assert batches.client.batches.cancel(batch_id).status == "cancelled", "it stays as it is"


def test_a_paused_class_is_waited_for_and_told_and_others_go_on(batches: Batches, gateway: Process) -> None:
    before = gateway.metric("penstock_batch_lines_total", result="completed")
    assert httpx.post(gateway.url + "/v1/admin/classes/low/pause").status_code == 202
    batch_id = batches.begin([line(n) for n in range(20)])

    def reason() -> Any:
        return (batches.get(batch_id).penstock["waiting_for"] or {}).get("reason")

    wait_until(lambda: reason() == "paused", 30, lambda: repr(batches.get(batch_id)))
    assert gateway.metric("penstock_batches", waiting_for="paused") == 1
    answer = batches.client.chat.completions.create(model="noop", messages=[{"role": "user", "content": "x"}])
    assert answer.choices[0].message.content
    with pytest.raises(openai.ConflictError):
        batches.client.files.delete(batches.get(batch_id).input_file_id)
    assert httpx.post(gateway.url + "/v1/admin/classes/low/resume").status_code == 202
    ended = batches.wait(batch_id)
    assert ended.request_counts.completed == 20
    assert gateway.metric("penstock_batch_lines_total", result="completed") == before + 20
    assert batches.client.files.delete(ended.input_file_id).deleted, "nobody reads it any more"


def test_a_batch_expires(make_system: Make) -> None:
    """A day is not waited for: its record is made older while no gateway runs."""
    system = make_system(models=[SLOW], gateway_options={"batch_lines": 50})
    system.worker().wait_ready()
    gateway = system.gateway().wait_ready()
    batches = Batches.at(gateway)
    batch_id = batches.begin([line(n) for n in range(1_000)])
    batches.wait_count(batch_id, 20)
    assert gateway.stop() == 0
    kept = BatchStore(ArtifactStore(system.folder / "artifacts"))
    batch = kept.running(("default", batch_id_of(batch_id)))
    assert batch is not None
    kept.write(replace(batch, expires_at=batch.created_ms // 1000 + 1))
    batches = Batches.at(system.gateway().wait_ready())
    ended = batches.wait(batch_id, 90)
    answers, errors = batches.lines(ended.output_file_id), batches.lines(ended.error_file_id)
    assert (ended.status, ended.expired_at is None) == ("expired", False)
    assert len(answers) >= 20
    assert {one["error"]["code"] for one in errors} == {"batch_expired"}
    assert custom_ids([*answers, *errors]) == names(1_000)
    each_ran_once(system, len(answers))


def test_an_input_that_vanishes_ends_the_batch(make_system: Make) -> None:
    system = make_system(models=[SLOW], gateway_options={"batch_lines": 20})
    system.worker().wait_ready()
    batches = Batches.at(system.gateway().wait_ready())
    batch_id = batches.begin([line(n) for n in range(1_200)])
    batches.wait_count(batch_id, 5)
    store = ArtifactStore(system.folder / "artifacts")
    store.delete("default", file_id_of(batches.get(batch_id).input_file_id))
    ended = batches.wait(batch_id, 120)
    assert (ended.status, [one.code for one in ended.errors.data]) == ("failed", ["file_not_found"])
    kept = custom_ids([*batches.lines(ended.output_file_id), *batches.lines(ended.error_file_id)])
    assert kept == names(500), "the part that had been read"


def test_tenants_and_keys(make_system: Make, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    one, other = create_key(keys, tenant="one"), create_key(keys, tenant="other")
    system = make_system(
        models=[SLOW],
        auth={"keys_file": str(keys)},
        gateway_options={"batch_lines": 400, "limits": {"tenants": {"one": {"outstanding": 10}}}},
    )
    system.worker().wait_ready()
    gateway = system.gateway().wait_ready()
    mine, theirs = Batches.at(gateway, one), Batches.at(gateway, other)
    batch_id = mine.begin([line(n) for n in range(1_000)])
    mine.wait_count(batch_id, 10)
    found = mine.get(batch_id)
    assert found.penstock["in_flight"] <= 5, "half of what the tenant may have outstanding"
    for foreign in (
        lambda: theirs.get(batch_id),
        lambda: theirs.client.batches.cancel(batch_id),
        lambda: theirs.client.files.content(found.input_file_id),
        lambda: theirs.client.files.delete(found.input_file_id),
        lambda: theirs.client.batches.create(input_file_id=found.input_file_id, endpoint=CHAT, completion_window="24h"),
    ):
        with pytest.raises(openai.NotFoundError):
            foreign()
    assert (theirs.client.batches.list().data, theirs.client.files.list().data) == ([], [])
    answer = theirs.client.chat.completions.create(model="noop", messages=[{"role": "user", "content": "x"}])
    assert answer.choices[0].message.content, "the other tenant's work is not held up"
    (record,) = [record for record in list_keys(keys) if record.tenant == "one"]
    second = create_key(keys, tenant="one")
    assert revoke_key(keys, record.key_id)
    mine = Batches.at(gateway, second)
    ended = mine.wait(batch_id, 60)
    assert (ended.status, [error.code for error in ended.errors.data]) == ("cancelled", ["key_revoked"])
    kept = [*mine.lines(ended.output_file_id), *mine.lines(ended.error_file_id)]
    assert custom_ids(kept) == names(1_000)


def test_erasing_a_line_before_its_file_is_written(make_system: Make) -> None:
    """An erased answer is not read again, when another gateway goes on with the batch."""
    system = make_system(models=[SLOW], gateway_options={"batch_lines": 20})
    system.worker().wait_ready()
    gateway = system.gateway().wait_ready()
    batches = Batches.at(gateway)
    batch_id = batches.begin([line(n) for n in range(450)])
    batches.wait_count(batch_id, 5)
    requests = httpx.get(gateway.url + "/v1/requests", params={"status": "completed", "order": "asc"}).json()["data"]
    erased = requests[0]["request_id"]
    assert httpx.delete(f"{gateway.url}/v1/requests/{erased}").status_code == 200
    gateway.kill9()
    batches = Batches.at(system.gateway().wait_ready())
    ended = batches.wait(batch_id, 60)
    (error,) = batches.lines(ended.error_file_id)
    assert (error["response"]["status_code"], error["response"]["request_id"]) == (410, erased)
    assert ended.request_counts.completed == 449
