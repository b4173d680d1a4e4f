"""Traces of real processes, as a collector made of OpenTelemetry's protobuf classes receives them."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from confluent_kafka import Producer
from websockets.sync.client import connect

from breakable_server import remote, serving
from kit.batches import CHAT, Batches, line
from kit.collector import Collector, Seen, collecting
from kit.http_server import Call, serving_http
from kit.waterfall import draw
from penstock.cli.paths import free_port
from support import wait_until
from system import NOOP, System, running
from worker_requests import outcome

SECRET_TEXT = "the-prompt-nobody-may-export"
SLOW = {**NOOP, "id": "slow", "options": {"tokens": 60, "delay_ms": 60}}
SUM = {**NOOP, "id": "sum", "tasks": ["summarization"]}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


@pytest.fixture(scope="module")
def hooks() -> Iterator[list[Call]]:
    calls: list[Call] = []

    def answer(call: Call) -> tuple[int, bytes]:
        calls.append(call)
        return 204, b""

    with serving_http(answer) as server:
        calls.append(Call("", server.url, {}, b""))
        yield calls


@pytest.fixture(scope="module")
def failing() -> Iterator[Any]:
    with serving(500) as server:
        yield server


@pytest.fixture(scope="module")
def system(
    kafka: Any, collector: Collector, failing: Any, hooks: list[Call], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[System]:
    """All of its processes export, and send what they have every 100 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_TELEMETRY__TRACES", "true")
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        patch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-of=penstock")
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        options: dict[str, Any] = {
            "models": [NOOP, SLOW, SUM, {**remote(failing.server_port), "id": "remote"}],
            "webhook_options": {
                "secret": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
                "internal_hosts": [hooks[0].path.removeprefix("http://")],
            },
        }
        made = System(kafka.bootstrap_servers, f"t{uuid.uuid4().hex[:6]}-", tmp_path_factory.mktemp("s"), **options)
        with running(made):
            yield made.start_all(["w1", "w2", "g1", "h1", "s1"])


def traceparent(*, sampled: bool = True) -> tuple[str, str]:
    """A trace's id, and the header of a span of it."""
    trace_id = uuid.uuid4().hex
    return trace_id, f"00-{trace_id}-00000000000000aa-{'01' if sampled else '00'}"


def named(spans: list[Seen], name: str) -> Seen:
    (found,) = [one for one in spans if one.name == name]
    return found


def check_nested(spans: list[Seen]) -> None:
    """No span ends before it begins, and each phase lies within its process span."""
    by_id = {one.id: one for one in spans}
    assert len(by_id) == len(spans), "two spans have one id"
    for one in spans:
        start, end = one.times
        assert start <= end, one.name
        parent = by_id.get(one.span.parent_span_id)
        if parent is not None and parent.process == one.process:
            slack = 3_000_000  # timings are in milliseconds
            assert parent.times[0] - slack <= start <= end <= parent.times[1] + slack, (parent.name, one.name)


def chat(system: System, header: str, model: str, **fields: Any) -> Iterator[str]:
    """The events of a streamed chat."""
    body = {"model": model, "messages": [{"role": "user", "content": SECRET_TEXT}], "stream": True, **fields}
    url = system.process("g").url + "/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers={"traceparent": header}, timeout=90) as answer:
        assert answer.status_code == 200, answer.read()
        yield from (line for line in answer.iter_lines() if line.startswith("data: "))


def names_of(system: System) -> tuple[str, str]:
    topic = system.names.request("text_generation", 5, None)
    return f"send {topic}", f"process {topic}"


def test_a_chat_is_one_trace_from_its_client_to_its_last_token(system: System, collector: Collector) -> None:
    trace_id, header = traceparent()
    assert list(chat(system, header, "noop"))[-1] == "data: [DONE]"
    send, process = names_of(system)
    result = f"send {system.names.result}"
    spans = collector.wait_for(trace_id, "POST /v1/chat/completions", send, process, "chat noop", result)
    check_nested(spans)
    http, sent, worked = (named(spans, name) for name in ("POST /v1/chat/completions", send, process))
    assert http.span.parent_span_id.hex() == "00000000000000aa"
    assert (sent.span.parent_span_id, worked.span.parent_span_id) == (http.id, sent.id)
    for child in ("chat noop", result):
        assert named(spans, child).span.parent_span_id == worked.id
    assert [one.process for one in (http, sent, worked)] == ["penstock-gateway", "penstock-gateway", "penstock-worker"]
    run = named(spans, "chat noop")
    assert [event.name for event in run.span.events] == ["gen_ai.first_token"]
    assert run.times[0] <= run.span.events[0].time_unix_nano <= run.times[1]
    assert run.attributes["gen_ai.usage.output_tokens"] == 4
    assert run.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    known = {"messaging.system": "kafka", "penstock.status": "completed", "penstock.tenant": "default"}
    assert known.items() <= worked.attributes.items()
    assert (worked.attributes["messaging.kafka.offset"], worked.attributes["messaging.destination.partition.id"]) == (
        sent.attributes["messaging.kafka.offset"],
        sent.attributes["messaging.destination.partition.id"],
    )
    assert collector.headers[-1]["x-of"] == "penstock"


def test_a_call_of_a_webhook_ends_the_trace(system: System, collector: Collector, hooks: list[Call]) -> None:
    trace_id, header = traceparent()
    body = {"task": "text_generation", "payload": {"prompt": SECRET_TEXT}, "callback_url": f"{hooks[0].path}/hook"}
    url = system.process("g").url + "/v1/requests"
    answer = httpx.post(url, json=body, headers={"traceparent": header}, timeout=30)
    assert answer.status_code == 202, answer.text
    spans = collector.wait_for(trace_id, "webhook request.completed")
    check_nested(spans)
    called = named(spans, "webhook request.completed")
    assert called.span.parent_span_id == named(spans, names_of(system)[1]).id
    assert called.attributes["http.response.status_code"] == 204
    assert hooks[-1].headers["traceparent"].split("-")[1:3] == [trace_id, called.id.hex()]
    line = next(line for line in system.process("h").log.read_text().splitlines() if "webhooks.attempt" in line)
    assert "trace_id=" in line


def test_calls_with_statuses_are_in_the_trace(system: System, collector: Collector, hooks: list[Call]) -> None:
    trace_id, header = traceparent()
    body = {
        "task": "text_generation",
        "model": "slow",
        "payload": {"prompt": SECRET_TEXT},
        "callback_url": f"{hooks[0].path}/statuses",
        "callback_statuses": True,
    }
    url = system.process("g").url + "/v1/requests"
    assert httpx.post(url, json=body, headers={"traceparent": header}, timeout=30).status_code == 202
    spans = collector.wait_for(trace_id, "webhook request.running", "webhook request.completed")
    check_nested(spans)
    called = named(spans, "webhook request.running")
    assert called.span.parent_span_id == named(spans, names_of(system)[1]).id
    got = [
        call.headers["traceparent"].split("-")[2] for call in hooks if trace_id in call.headers.get("traceparent", "")
    ]
    assert called.id.hex() in got


def socket_url(system: System) -> str:
    return system.process("g").url.replace("http", "ws") + "/v1/ws"


@pytest.mark.parametrize("where", ["frame", "handshake"])
def test_a_submission_over_a_socket_is_in_its_clients_trace_until_its_result(
    where: str, system: System, collector: Collector
) -> None:
    trace_id, header = traceparent()
    request = {"task": "text_generation", "model": "noop", "stream": True, "payload": {"prompt": SECRET_TEXT}}
    frame: dict[str, Any] = {"type": "submit", "request": request}
    if where == "frame":
        frame["traceparent"] = header
    headers = {"traceparent": header if where == "handshake" else traceparent()[1]}
    with connect(socket_url(system), additional_headers=headers) as socket:
        socket.send(json.dumps(frame))
        news = [json.loads(socket.recv(30))]
        while news[-1]["type"] not in ("result", "error"):
            news.append(json.loads(socket.recv(30)))
        assert news[-1]["type"] == "result", news
        send, process = names_of(system)
        spans = collector.wait_for(trace_id, "submit /v1/ws", send, process, "text_completion noop")
        subscribed, second = traceparent()
        follow = {"type": "subscribe", "request_id": news[-1]["request_id"], "traceparent": second}
        socket.send(json.dumps(follow))
        collector.wait_for(subscribed, "subscribe /v1/ws")
        refused, third = traceparent()
        socket.send(json.dumps({"type": "submit", "request": {"task": "no"}, "traceparent": third}))
        assert named(collector.wait_for(refused, "submit /v1/ws"), "submit /v1/ws").failed
    check_nested(spans)
    submitted, sent, worked = (named(spans, name) for name in ("submit /v1/ws", send, process))
    assert submitted.span.parent_span_id.hex() == "00000000000000aa"
    assert (sent.span.parent_span_id, worked.span.parent_span_id) == (submitted.id, sent.id)
    assert submitted.attributes["penstock.request_id"] == news[-1]["request_id"]
    assert submitted.attributes["penstock.status"] == "completed"
    assert submitted.times[1] >= named(spans, "text_completion noop").times[1], "it lasts as long as the stream"


def test_a_stream_over_a_socket_that_closes_first_ends_then(system: System, collector: Collector) -> None:
    trace_id, header = traceparent()
    request = {"task": "text_generation", "model": "slow", "stream": True, "payload": {"prompt": "p"}}
    with connect(socket_url(system)) as socket:
        socket.send(json.dumps({"type": "submit", "request": request, "traceparent": header}))
        while json.loads(socket.recv(30))["type"] != "chunk":
            pass
    spans = collector.wait_for(trace_id, "submit /v1/ws", names_of(system)[1])
    submitted = named(spans, "submit /v1/ws")
    assert "penstock.status" not in submitted.attributes
    assert submitted.times[1] < named(spans, names_of(system)[1]).times[1]


def test_a_summary_is_a_trace_from_the_summarizer_to_its_outcome(system: System, collector: Collector) -> None:
    url = system.process("g").url
    policy = {"id": "summed-up", "summarize": {"every_turns": 1, "model": "sum"}}
    assert httpx.post(f"{url}/v1/conversations", json=policy, timeout=30).status_code == 200
    for number in range(5):
        body = {"task": "text_generation", "model": "noop", "conversation_id": "summed-up", "payload": {}}
        body["payload"] = {"messages": [{"role": "user", "content": f"{SECRET_TEXT} {number}"}]}
        assert httpx.post(f"{url}/v1/requests?wait=30", json=body, timeout=60).json()["status"] == "completed"

    def summed() -> list[Seen]:
        return [one for one in list(collector.seen) if one.name == "summary"]

    wait_until(lambda: bool(summed()), 60, system.process("s").tail)
    summary = summed()[0]
    process = f"process {system.names.request('summarization', 8, None)}"
    spans = collector.wait_for(summary.span.trace_id.hex(), process)
    check_nested(spans)
    assert summary.process == "penstock-summarizer"
    assert named(spans, process).span.parent_span_id == summary.id
    assert summary.attributes["gen_ai.conversation.id"] == "summed-up"
    assert summary.attributes["penstock.request_id"] == named(spans, process).attributes["penstock.request_id"]


@pytest.mark.parametrize(
    ("why", "end"),
    [
        ("its time to start", "cancelled"),
        ("a paused class", "expired"),
        ("its conversation's turn", "cancelled"),
        ("its conversation's turn", "expired"),
    ],
)
def test_a_request_that_ends_while_it_waits_is_in_its_clients_trace(
    why: str, end: str, system: System, collector: Collector
) -> None:
    url = system.process("g").url
    trace_id, header = traceparent()
    body: dict[str, Any] = {"task": "text_generation", "model": "noop", "payload": {"prompt": SECRET_TEXT}}
    if end == "expired":
        body["ttl_ms"] = 1_500
    if why == "its time to start":
        body["start_after"] = time.time() + 3_600
    if why == "its conversation's turn":
        body |= {"conversation_id": f"waits-{end}", "payload": {"messages": [{"role": "user", "content": "p"}]}}
        first = {**body, "model": "slow"}
        first.pop("ttl_ms", None)
        assert httpx.post(f"{url}/v1/requests", json=first, timeout=30).status_code == 202
    if why == "a paused class":
        body["priority"] = 9
        order = httpx.post(f"{url}/v1/admin/classes/low/pause", timeout=30)
        assert order.status_code == 202, order.text
        observed = f"{url}/v1/admin/orders/{order.json()['revision']}"
        wait_until(lambda: httpx.get(observed).json()["observed"], 30, lambda: httpx.get(observed).text)
    try:
        answer = httpx.post(f"{url}/v1/requests", json=body, headers={"traceparent": header}, timeout=30)
        assert answer.status_code == 202, answer.text
        request_id = answer.json()["request_id"]
        if end == "cancelled":
            wait_until(
                lambda: httpx.get(f"{url}/v1/requests/{request_id}").json()["status"] == "queued",
                30,
                lambda: httpx.get(f"{url}/v1/requests/{request_id}").text,
            )
            assert httpx.post(f"{url}/v1/requests/{request_id}/cancel", timeout=30).status_code in (200, 202)
        assert outcome(system, request_id, 60).status == end
    finally:
        httpx.post(f"{url}/v1/admin/classes/low/resume", timeout=30)
    topic = system.names.request("text_generation", body.get("priority", 5), None)
    send, process, result = f"send {topic}", f"process {topic}", f"send {system.names.result}"
    spans = collector.wait_for(trace_id, send, process, "queue", result)
    check_nested(spans)
    worked = named(spans, process)
    assert (worked.span.parent_span_id, worked.attributes["penstock.status"]) == (named(spans, send).id, end)
    for record in (one for one in system.read(system.names.status) if one.key() == request_id.encode()):
        assert trace_id in str(dict(record.headers() or [])["traceparent"]), "each status names the trace"


def test_a_request_put_onto_kafka_is_in_its_senders_trace_or_begins_one(system: System, collector: Collector) -> None:
    trace_id, header = traceparent()
    topic = system.names.request("text_generation", 5, None)
    producer = Producer({"bootstrap.servers": system.bootstrap})
    for request_id, headers in (("with-a-trace", [("traceparent", header.encode())]), ("without", [])):
        value = json.dumps({"request_id": request_id, "task": "text_generation", "payload": {"prompt": SECRET_TEXT}})
        producer.produce(topic, value, key=request_id, headers=headers)
    assert producer.flush(30) == 0
    assert outcome(system, "without", 60).status == "completed"
    process = f"process {topic}"
    assert named(collector.wait_for(trace_id, process), process).span.parent_span_id.hex() == "00000000000000aa"

    def begun() -> list[Seen]:
        return [one for one in list(collector.seen) if one.attributes.get("penstock.request_id") == "without"]

    wait_until(lambda: bool(begun()), 30, lambda: "no span of the request without a trace came")
    assert begun()[0].span.parent_span_id == b""
    headers = dict(next(one for one in system.read(system.names.result) if one.key() == b"without").headers() or [])
    parent = headers["traceparent"]
    assert isinstance(parent, bytes)
    assert parent.decode().split("-")[1:3] == [begun()[0].span.trace_id.hex(), begun()[0].id.hex()]


def test_a_trace_that_is_not_sampled_exports_nothing(system: System, collector: Collector) -> None:
    unsampled, header = traceparent(sampled=False)
    list(chat(system, header, "noop"))
    trace_id, header = traceparent()
    list(chat(system, header, "noop"))
    collector.wait_for(trace_id, "POST /v1/chat/completions", names_of(system)[1])
    assert collector.trace(unsampled) == []


def test_each_attempt_has_a_span_and_a_link_to_the_one_before(
    system: System, collector: Collector, failing: Any
) -> None:
    trace_id, header = traceparent()
    body = {"task": "text_generation", "model": "remote", "payload": {"prompt": "retried"}}
    answer = httpx.post(system.process("g").url + "/v1/requests", json=body, headers={"traceparent": header})
    request_id = answer.json()["request_id"]
    wait_until(lambda: failing.asked["retried"] >= 2, 60, lambda: f"asked {failing.asked}")
    failing.status = 200
    assert outcome(system, request_id, 60).status == "completed"
    run = "text_completion remote"
    spans = collector.wait_for(trace_id, run, run, run)
    check_nested(spans)
    runs = [one for one in spans if one.name == run]
    assert [one.failed for one in runs] == [True] * (len(runs) - 1) + [False]
    assert [one.attributes["penstock.attempt"] for one in runs] == list(range(1, len(runs) + 1))
    for before, after in pairwise(runs):
        assert after.links == {"retry_of": before.id}
    assert {one.span.parent_span_id for one in runs} == {named(spans, names_of(system)[1]).id}


def test_a_turn_is_linked_to_the_turn_before(system: System, collector: Collector) -> None:
    traces: list[str] = []
    for number in range(2):
        trace_id, header = traceparent()
        body = {"task": "text_generation", "conversation_id": "linked", "payload": {}}
        body["payload"] = {"messages": [{"role": "user", "content": f"turn {number}"}]}
        url = system.process("g").url + "/v1/requests"
        request_id = httpx.post(url, json=body, headers={"traceparent": header}).json()["request_id"]
        assert outcome(system, request_id, 60).status == "completed"
        traces.append(trace_id)
    process = names_of(system)[1]
    first, second = (named(collector.wait_for(trace_id, process), process) for trace_id in traces)
    assert (first.links, second.links) == ({}, {"turn_after": first.id})
    assert second.span.links[0].trace_id == first.span.trace_id
    assert second.attributes["gen_ai.conversation.id"] == "linked"


def test_the_lines_of_a_batch_are_linked_to_its_span(system: System, collector: Collector) -> None:
    batches = Batches.at(system.process("g"))
    ended = batches.wait(batches.begin([line(0), line(1)]))
    assert ended.status == "completed"

    def of_batch() -> list[Seen]:
        return [one for one in list(collector.seen) if one.attributes.get("penstock.batch_id") == ended.id]

    wait_until(lambda: len(of_batch()) == 1, 30, lambda: f"spans of the batch: {of_batch()}")
    (batch,) = of_batch()
    assert (batch.name, batch.span.parent_span_id) == (f"batch {CHAT}", b"")
    assert {name: batch.attributes[f"penstock.{name}"] for name in ("status", "lines", "tenant")} == {
        "status": "completed",
        "lines": 2,
        "tenant": "default",
    }
    sent = [one for one in list(collector.seen) if one.links.get("batch") == batch.id]
    assert len({one.span.trace_id for one in sent}) == 2, "each line is a trace of its own"
    process = f"process {system.names.request('text_generation', 8, None)}"
    for one in sent:
        assert one.span.links[0].trace_id == batch.span.trace_id
        spans = collector.wait_for(one.span.trace_id.hex(), process, "chat noop")
        assert named(spans, process).span.parent_span_id == one.id


@pytest.mark.slow
def test_a_chat_that_survives_the_kill_of_its_worker_is_one_trace(system: System, collector: Collector) -> None:
    trace_id, header = traceparent()
    lines = chat(system, header, "slow")
    text = [next(lines) for _ in range(12)]
    writer = next(one.worker_id for one in system.results() if one.kind == "chunk" and one.text == "word0 ")
    states = {one.worker_id: one for one in system.worker_states()}
    victim = next(one for one in system.processes if one.popen.pid == states[writer].pid)
    victim.kill9()
    text += list(lines)
    assert text[-1] == "data: [DONE]"
    pieces = [json.loads(line[6:])["choices"] for line in text[:-1]]
    said = "".join(one[0]["delta"].get("content") or "" for one in pieces if one)
    assert said == "".join(f"word{number} " for number in range(60))
    send, process = names_of(system)
    spans = collector.wait_for(trace_id, "POST /v1/chat/completions", send, process, "chat slow", "chat slow")
    check_nested(spans)
    lost, run = (one for one in spans if one.name == "chat slow")
    assert (lost.failed, run.failed) == (True, False)
    assert lost.attributes["penstock.lost"] is True
    assert (lost.attributes["penstock.worker_id"], lost.span.parent_span_id) == (writer, named(spans, send).id)
    assert run.links == {"continues": lost.id}
    assert run.span.parent_span_id == named(spans, process).id
    assert lost.times[1] < named(spans, process).times[0] < named(spans, "POST /v1/chat/completions").times[1]
    assert lost.times[1] - lost.times[0] > 5 * 60_000_000, "it published more than one piece"
    assert lost.attributes["penstock.epoch"] < run.attributes["penstock.epoch"]
    if folder := os.environ.get("PENSTOCK_SCREENSHOTS"):
        for one in spans:  # the prefix of the test's topics
            one.span.name = one.name.replace(system.prefix, "")
        draw(spans, bytes.fromhex("00000000000000aa"), Path(folder) / "trace.svg")


def test_no_prompt_and_no_output_was_exported(system: System, collector: Collector) -> None:
    """Of all that the tests before have had exported."""
    assert collector.bodies
    for body in collector.bodies:
        assert SECRET_TEXT.encode() not in body
        assert b"word1" not in body


def test_a_collector_that_is_away_costs_spans_that_are_counted_and_nothing_else(
    make_system: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_TELEMETRY__TRACES", "true")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    for name, value in (("SCHEDULE_DELAY", "100"), ("MAX_QUEUE_SIZE", "8"), ("MAX_EXPORT_BATCH_SIZE", "8")):
        monkeypatch.setenv(f"OTEL_BSP_{name}", value)
    system: System = make_system(models=[NOOP])
    system.start_all(["w1", "g1"])
    worker, gateway = system.process("w"), system.process("g")
    ids = [gateway.submit() for _ in range(20)]
    assert {gateway.request(one, wait=30)["status"] for one in ids} == {"completed"}
    for process in (worker, gateway):
        wait_until(
            lambda process=process: process.metric("penstock_trace_spans_total", outcome="dropped") >= 20,
            30,
            process.tail,
        )
        assert process.metric("penstock_trace_spans_total", outcome="exported") == 0
        assert process.log.read_text().count("telemetry.spans_dropped") == 1
        assert process.stop() == 0, process.tail()


def test_content_is_exported_only_if_it_is_asked_for(
    make_system: Any, monkeypatch: pytest.MonkeyPatch, collector: Collector
) -> None:
    monkeypatch.setenv("PENSTOCK_TELEMETRY__TRACES", "true")
    monkeypatch.setenv("PENSTOCK_TELEMETRY__CONTENT", "true")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    system: System = make_system(models=[NOOP])
    system.start_all(["w1", "g1"])
    trace_id, header = traceparent()
    list(chat(system, header, "noop"))
    for process in list(system.processes):  # an orderly stop sends what waits
        assert process.stop() == 0
    spans = collector.trace(trace_id)
    run = named(spans, "chat noop")
    assert SECRET_TEXT in run.attributes["gen_ai.input.messages"]
    assert "word0" in run.attributes["gen_ai.output.messages"]
    assert {one.process for one in spans} == {"ours"}
