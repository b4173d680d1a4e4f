"""The AsyncAPI document: what it is made of, where it is served, and what breaks the clients of an older one."""

from __future__ import annotations

import functools
import json
import operator
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import fastavro
import pytest
from jsonschema import Draft7Validator
from typer.testing import CliRunner

from kit.gateway_http import call
from penstock.cli.config import USUAL_PARTITIONS
from penstock.cli.main import app
from penstock.cli.rights import Role
from penstock.common.configuration import KafkaSection
from penstock.gateway.app import create_app
from penstock.gateway.document import asyncapi as made
from penstock.gateway.document.asyncapi_changes import breaking_changes
from penstock.gateway.edge.keys import create_key
from penstock.gateway.queues.settings import QueueSection
from penstock.gateway.routes.socket_frames import SERVER_FRAMES
from penstock.gateway.settings import AuthSection, GatewaySettings
from penstock.gateway.view.frames import Frame

Json = dict[str, Any]
REFERENCE = Path(__file__).parents[3] / "docs/reference/asyncapi.json"
DOCUMENT = made.asyncapi()
QUEUES = [
    QueueSection(topic="jobs", result_topic="answers"),
    QueueSection(topic="crawler.pages", format="penstock", result_topic="answers"),
    QueueSection(topic="silent"),
]
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def copied() -> Json:
    return json.loads(json.dumps(DOCUMENT))


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(reference := value.get("$ref"), str):
            yield reference
        for one in value.values():
            yield from references(one)
    elif isinstance(value, list):
        for one in value:
            yield from references(one)


@pytest.mark.parametrize("document", [DOCUMENT, made.asyncapi("p.", QUEUES, webhooks=True)], ids=["plain", "queues"])
def test_every_reference_and_schema_is_good(document: Json) -> None:
    for reference in references(document):
        functools.reduce(operator.getitem, reference.removeprefix("#/").split("/"), document)
    for message in document["components"]["messages"].values():
        if "schemaFormat" in message["payload"]:
            fastavro.parse_schema(message["payload"]["schema"])
        else:
            Draft7Validator.check_schema(message["payload"])
        Draft7Validator.check_schema(message.get("headers", {}))
    for schema in document["components"]["schemas"].values():
        Draft7Validator.check_schema(schema)


def test_what_it_says_of_topics_is_what_commands_make() -> None:
    assert made.PARTITIONS == USUAL_PARTITIONS
    roles = {tag["name"] for one in DOCUMENT["operations"].values() for tag in one.get("tags", ())}
    assert roles <= set(Role)
    bindings = {name: one["bindings"]["kafka"] for name, one in DOCUMENT["channels"].items() if name != "socket"}
    policy = "cleanup.policy"
    assert bindings["result"]["topicConfiguration"] == {policy: ["delete"], "retention.ms": 3 * 86_400_000}
    assert bindings["conversation"]["topicConfiguration"] == {policy: ["compact"]}
    assert bindings["model"]["partitions"] == 1


def test_the_models_of_frames_have_each_kind_and_field() -> None:
    kinds: list[type[Any]] = [kind for kind in Frame.__subclasses__() if kind.__module__ == Frame.__module__]
    assert {kind.type for kind in kinds} | {"accepted", "pong"} == SERVER_FRAMES.keys()
    for kind in kinds:
        fields = {name for name, field in kind.__dataclass_fields__.items() if field.repr and name[0] != "_"}
        assert fields <= SERVER_FRAMES[kind.type].model_fields.keys(), kind


async def test_a_gateway_serves_it_with_its_prefix() -> None:
    gateway = create_app(GatewaySettings(kafka=KafkaSection(topic_prefix="team-")))
    answer = await call(gateway, "GET", "/asyncapi.json")
    assert (answer.status_code, answer.json()) == (200, made.asyncapi("team-"))
    assert answer.json()["channels"]["result"]["address"] == "team-inference.result"
    assert answer.json()["channels"]["conversation"]["address"] == "team-conversation.{conversation_id}"


async def test_a_gateway_describes_the_queues_and_webhooks_of_its_configuration(tmp_path: Path) -> None:
    tables = [one.model_dump(include=one.model_fields_set) for one in QUEUES]
    lines = ["[[queues]]\n" + "\n".join(f'{key} = "{value}"' for key, value in one.items()) for one in tables]
    sections = ["[kafka]", 'topic_prefix = "team-"', "[webhooks]", f'secret = "{SECRET}"', *lines]
    (config := tmp_path / "penstock.toml").write_text("\n".join(sections))
    printed = CliRunner().invoke(app, ["schemas", "asyncapi", "--config", str(config)])
    document = json.loads(printed.stdout)
    settings = GatewaySettings.model_validate(
        {"kafka": {"topic_prefix": "team-"}, "queues": QUEUES, "webhooks": {"secret": SECRET}}
    )
    answer = await call(create_app(settings), "GET", "/asyncapi.json")
    assert answer.json() == document == made.asyncapi("team-", QUEUES, webhooks=True)
    key = create_key(keys := tmp_path / "keys.json", scopes=["read"])
    guarded = create_app(settings.model_copy(update={"auth": AuthSection(keys_file=keys)}))
    for headers, served in (({}, made.asyncapi("team-")), ({"authorization": f"Bearer {key}"}, document)):
        assert (await call(guarded, "GET", "/asyncapi.json", headers=headers)).json() == served
    assert breaking_changes(made.asyncapi("team-"), document) == []
    new = {name: one for name, one in document["channels"].items() if name not in DOCUMENT["channels"]}
    assert {name: (one["address"], [*one["messages"]]) for name, one in new.items()} == {
        "queue-jobs": ("jobs", ["llmd"]),
        "queue-crawler.pages": ("crawler.pages", ["request", "requestJson"]),
        "queue-silent": ("silent", ["llmd"]),
        "answers-answers": ("answers", ["llmdAnswer", "outcome"]),
        "delivery": ("team-inference.delivery", ["delivery"]),
    }
    replies = {name: one.get("reply", {}).get("channel") for name, one in document["operations"].items()}
    answers = {"$ref": "#/channels/answers-answers"}
    assert (replies["receiveQueue-jobs"], replies["receiveQueue-silent"]) == (answers, None)
    both = CliRunner().invoke(app, ["schemas", "asyncapi", "--config", str(config), "--topic-prefix", "p."])
    assert both.exit_code == 2


# -- what breaks clients

MESSAGES, SCHEMAS = "components/messages", "components/schemas"
RESULT = f"{MESSAGES}/result/payload/schema/fields"
REMOVED = object()


def changed(path: str, value: Any) -> Json:
    """The document with another value at a path; a number counts in a list, a name in a list of fields finds one."""
    document = copied()
    *steps, last = path.split("/")
    part: Any = document
    for step in [*steps, last] if value is not REMOVED and callable(value) else steps:
        part = part[key_in(part, step)]
    if callable(value):
        value(part)
    elif value is REMOVED:
        del part[key_in(part, last)]
    else:
        part[key_in(part, last)] = value
    return document


def key_in(part: Any, step: str) -> Any:
    if isinstance(part, dict):
        return step
    return int(step) if step.isdecimal() else next(n for n, one in enumerate(part) if one.get("name") == step)


BREAKING: list[tuple[str, Any, str]] = [
    ("channels/audit", REMOVED, "channel audit is gone"),
    ("channels/result/address", "results", "channel result: address is results, was inference.result"),
    ("channels/deadLetters/messages/deadLetter", REMOVED, "channel deadLetters: deadLetter is gone from its messages"),
    ("operations/cancel", REMOVED, "operation cancel is gone"),
    ("operations/sendModel/channel/$ref", "#/channels/audit", "operation sendModel: channel is audit, was model"),
    ("operations/ping/action", "send", "operation ping: action is send, was receive"),
    ("servers/kafkaSecure/security/0", REMOVED, "server kafkaSecure: saslPlain is gone from its security"),
    (f"{MESSAGES}/result/headers/properties/traceparent", REMOVED, "message result: header traceparent is gone"),
    (f"{MESSAGES}/status/contentType", "application/json", "message status: content type can now be application/json"),
    (f"{RESULT}/kind", REMOVED, "message result: field kind is gone"),
    (f"{RESULT}/attempt/type", "string", "message result: field attempt can now be string"),
    (f"{RESULT}/kind/type/symbols/1", REMOVED, "message result: field kind: chunk is gone"),
    (f"{SCHEMAS}/ChunkFrame/properties/offset", REMOVED, "message chunkFrame: field offset is gone"),
    (f"{SCHEMAS}/ChunkFrame/required", lambda names: names.remove("text"), "field text can now be absent"),
    (f"{SCHEMAS}/ChunkFrame/properties/text", {"type": ["string", "null"]}, "field text can now be null"),
    (f"{SCHEMAS}/ErrorFacts/properties/code", {"type": "integer"}, "field error.code can now be integer"),
    (f"{SCHEMAS}/CancelFrame/required", lambda names: names.append("id"), "field id is required now"),
    (f"{SCHEMAS}/SubscribeFrame/properties/after", {"type": "null"}, "field after is no longer taken as string"),
    (f"{SCHEMAS}/Request/anyOf/0", REMOVED, "field request is no longer taken as object text_generation"),
    (f"{SCHEMAS}/Output/properties/format/anyOf/0/enum/0", REMOVED, "field request.output.format: png is gone"),
    (f"{SCHEMAS}/Output/properties/quality/anyOf/0/maximum", 90, "output.quality: maximum is 90, was 100"),
    (f"{SCHEMAS}/CancelFrame/properties/request_id", {"type": "string", "enum": ["a"]}, "request_id takes only a now"),
    (f"{SCHEMAS}/CancelFrame/properties/id", {"type": "string"}, "field id is no longer taken as anything"),
    (f"{SCHEMAS}/ContentPart/additionalProperties", False, ".* is no longer taken as anything"),
    (f"{SCHEMAS}/ContentPart/additionalProperties", {"type": "string"}, ".* is no longer taken as anything"),
    (f"{SCHEMAS}/StatusFrame/properties/position", {"type": "number"}, "field position can now be number"),
    (f"{SCHEMAS}/CancelFrame/properties/request_id/format", "uuid", "request_id: format is uuid, was not there"),
    (f"{SCHEMAS}/CancelFrame/properties/request_id/not", {"const": "a"}, "not is {'const': 'a'}, was not there"),
    (f"{SCHEMAS}/Output/properties/quality", {"type": "number", "minimum": 5}, "quality: minimum is 5, was 1"),
    (f"{SCHEMAS}/Output/properties/quality/anyOf/0/multipleOf", 2, "multipleOf is 2, was not there"),
    (f"{MESSAGES}/result/headers/properties/penstock-callback/format", REMOVED, "format is not there, was uri"),
    (f"{MESSAGES}/status/bindings/kafka/schemaIdPayloadEncoding", "4", "binding.schemaIdPayloadEncoding can now be 4"),
    (f"{MESSAGES}/request/bindings/kafka/schemaIdLocation", "header", "binding.schemaIdLocation: payload is gone"),
    (f"{MESSAGES}/requestJson/bindings/kafka/schemaIdLocation", "header", "binding.schemaIdLocation is required now"),
    ("servers/kafka/security", [{"$ref": "#/a"}], "server kafka: its security is limited to a now"),
    ("components/securitySchemes/saslPlain/type", "gssapi", "securityScheme saslPlain: type is gssapi, was plain"),
    ("components/securitySchemes/apiKey/in", REMOVED, "securityScheme apiKey: in is gone, was header"),
    ("operations/ping/reply/messages", [], "operation ping: pongFrame is gone from its reply.messages"),
    ("operations/ping/reply", REMOVED, "operation ping: reply.channel is gone, was socket"),
    ("channels/socket/servers", [], "channel socket: gateway is gone from its servers"),
]
GOOD: list[tuple[str, Any]] = [
    ("info/description", "Other words."),
    ("channels/result/bindings/kafka/partitions", 128),
    ("channels/more", {"address": "more", "messages": {}}),
    ("operations/submit/messages", lambda messages: messages.append({"$ref": "#/channels/socket/messages/pingFrame"})),
    (f"{MESSAGES}/result/headers/properties/more", {"type": "string"}),
    (RESULT, lambda fields: fields.append({"name": "more", "type": ["null", "string"], "default": None})),
    (f"{RESULT}/kind/type/symbols", lambda symbols: symbols.append("MORE")),
    (f"{RESULT}/kind/doc", "Other words."),
    (f"{SCHEMAS}/ChunkFrame/properties/more", {"type": "string"}),
    (f"{SCHEMAS}/ChunkFrame/required", lambda names: names.append("logprobs")),
    (f"{SCHEMAS}/SnapshotFrame/properties/cursor", {"type": "string"}),
    (f"{SCHEMAS}/CancelFrame/properties/more", {"type": "string"}),
    (f"{SCHEMAS}/CancelFrame/required", lambda names: names.remove("request_id")),
    (f"{SCHEMAS}/PingFrame/properties/id", {}),
    (f"{SCHEMAS}/Output/properties/quality/anyOf/0/maximum", 110),
    (f"{SCHEMAS}/Output/properties/quality/anyOf/0", {"type": "number"}),
    (f"{SCHEMAS}/Output/additionalProperties", True),
    (f"{SCHEMAS}/ChunkFrame/properties/offset/minimum", 0),
    (f"{SCHEMAS}/Output/properties/format/anyOf/0/enum", lambda values: values.append("avif")),
]


@pytest.mark.parametrize(("path", "value", "line"), BREAKING, ids=[path for path, _, _ in BREAKING])
def test_what_breaks_clients(path: str, value: Any, line: str) -> None:
    found = breaking_changes(DOCUMENT, changed(path, value))
    assert [one for one in found if one.endswith(line)], found


@pytest.mark.parametrize(("path", "value"), GOOD, ids=[path for path, _ in GOOD])
def test_what_breaks_none(path: str, value: Any) -> None:
    document = changed(path, value)
    assert document != DOCUMENT or value == {}
    assert breaking_changes(DOCUMENT, document) == []


def test_the_command_prints_it_and_what_breaks_clients_of_an_older_one(tmp_path: Path) -> None:
    printed = CliRunner().invoke(app, ["schemas", "asyncapi", "--topic-prefix", "p."])
    assert (printed.exit_code, json.loads(printed.stdout)) == (0, made.asyncapi("p."))
    (older := tmp_path / "older.json").write_text(json.dumps(changed(f"{SCHEMAS}/PongFrame/properties/more", {})))
    broken = CliRunner().invoke(app, ["schemas", "asyncapi", "--against", str(older)])
    assert (broken.exit_code, broken.stdout) == (1, "message pongFrame: field more is gone\n")
    older.write_text("[]")
    assert CliRunner().invoke(app, ["schemas", "asyncapi", "--against", str(older)]).exit_code == 2
    same = CliRunner().invoke(app, ["schemas", "asyncapi", "--against", str(REFERENCE)])
    assert same.exit_code == 0, same.stdout


def test_the_page_is_not_written_over_one_whose_clients_break(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(REFERENCE.parents[1]))
    generate = import_module("generate")
    monkeypatch.setattr(generate, "FOLDER", tmp_path)
    monkeypatch.setattr(generate, "PAGES", {"reference/asyncapi.json": generate.PAGES["reference/asyncapi.json"]})
    (page := tmp_path / "reference/asyncapi.json").parent.mkdir()
    page.write_text(json.dumps(changed("channels/more", DOCUMENT["channels"]["audit"])))
    for arguments in ([], ["--check"]):
        assert generate.main(arguments) == 1
        assert "channel more is gone" in capsys.readouterr().err
    monkeypatch.setattr(sys.modules["penstock.gateway.document.asyncapi"], "VERSION", "2.0.0")
    assert generate.main([]) == 0
    assert json.loads(page.read_text())["info"]["version"] == "2.0.0"
