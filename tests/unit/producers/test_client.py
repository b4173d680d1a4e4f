"""The client without a broker, and what importing it loads."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from penstock.cli.paths import free_port
from penstock.producers import Client, KafkaSettings
from penstock.producers.outgoing import request_record
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import BrokerUnavailable, InvalidRequest, PenstockError
from penstock.schemas.records import InferenceRequest
from penstock.schemas.topics import TopicNames

LIGHT = """
import sys
import penstock.producers
heavy = {"torch", "transformers", "fastapi", "faust", "aiokafka", "numpy", "obstore", "pydantic"} & set(sys.modules)
assert not heavy, heavy
"""


def test_importing_the_library_is_light() -> None:
    subprocess.run([sys.executable, "-c", LIGHT], check=True, timeout=60)


@pytest.fixture
def client() -> Iterator[Client]:
    with Client(KafkaSettings(bootstrap_servers=f"127.0.0.1:{free_port()}"), timeout_s=1) as made:
        yield made


def test_without_a_broker_every_call_ends_within_its_deadline(client: Client) -> None:
    calls = [
        lambda: client.submit(task="text_generation", payload={"prompt": "hi"}),
        lambda: client.result("some-id", timeout=5),
        lambda: client.cancel("some-id"),
        lambda: client.history("c1"),
    ]
    for call in calls:
        began = time.monotonic()
        with pytest.raises(BrokerUnavailable):
            call()
        assert time.monotonic() - began < 8


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"payload": {"prompt": "x"}, "tenant": "other"}, "tenant"),
        ({"payload": {"prompt": "x", "max_tokens": -1}}, "payload.max_tokens"),
        ({"payload": {"prompt": "x"}, "request_id": "white space"}, "request_id"),
    ],
)
def test_a_wrong_field_is_named_before_anything_is_sent(client: Client, fields: dict[str, object], param: str) -> None:
    with pytest.raises(PenstockError) as refused:
        client.submit(task="text_generation", **fields)  # type: ignore[arg-type]
    assert refused.value.param == param


def test_artifacts_need_a_place(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="artifacts="):
        client.artifacts.put(b"x")


def test_a_conversation_decides_the_key_and_the_priority_the_topic() -> None:
    request = InferenceRequest(
        request_id="r",
        task="text_generation",
        tenant="acme",
        conversation_id="c1",
        priority=2,
        pool="big",
        text_generation={"prompt": "x"},
        created_at=1,
    )
    record = request_record(request, TopicNames("p-"), default_codec(), source="test", traceparent="00-a-b-01")
    assert (record.topic, record.key) == ("p-inference.request.high.big", b"acme.c1")
    assert default_codec().decode(record.value, InferenceRequest).request_id == "r"
    headers = dict(record.headers)
    assert headers["traceparent"] == b"00-a-b-01"
    assert (headers["ce_id"], headers["ce_specversion"]) == (b"r", b"1.0")
