"""Erasing requests with the images that they brought: the store (S3) away, gateways killed, two gateways at once."""

from __future__ import annotations

import base64
import json
import signal
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.common.artifacts import ArtifactStore
from penstock.schemas.records import ArtifactRef
from s3_proxy import BreakableS3
from support import wait_until
from system import Process, System

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


class Erasing:
    """Gateways as processes, a scribe in the place of a worker, and a store that can be broken."""

    def __init__(self, place: Any, folder: Path) -> None:
        self.broken = BreakableS3(failures=(500,), timeout="2s")
        self.store: ArtifactStore = self.broken.direct()
        self.system = System(place.bootstrap, place.prefix, folder)
        self.scribe = place.scribe

    def gateway(self, name: str) -> Process:
        return self.system.gateway(name, env=self.broken.env)

    def bring(self, gateway: Process, number: int) -> str:
        """A request with an image of its own bytes, and an output, that has ended; its id."""
        data = base64.b64encode(PNG + bytes([number])).decode()
        body = {"task": "image_editing", "payload": {"prompt": "snow", "image": {"data": data}}}
        answer = httpx.post(f"{gateway.url}/v1/requests", json=body, timeout=30)
        assert answer.status_code == 202, answer.text
        request_id = str(answer.json()["request_id"])
        made = self.store.put("default", bytes([number]), request_id=request_id)
        reference = ArtifactRef(
            artifact_id=made.artifact_id,
            uri=made.uri,
            media_type=made.media_type,
            size_bytes=made.size_bytes,
            sha256=made.sha256,
        )
        self.scribe.job(request_id).end("", output_artifact=reference)
        return request_id

    def ended(self, gateway: Process, request_id: str) -> bool:
        answer = httpx.get(f"{gateway.url}/v1/requests/{request_id}?wait=20", timeout=30)
        return answer.status_code == 200 and answer.json()["done"]

    def erase(self, gateway: Process, request_id: str, timeout_s: float = 60) -> int:
        return httpx.delete(f"{gateway.url}/v1/requests/{request_id}", timeout=timeout_s).status_code

    def kept(self) -> list[bytes]:
        """The inputs and outputs that are left, by their last byte."""
        found = self.store.list("default", limit=100).artifacts
        return sorted(self.store.get("default", one.artifact_id)[-1:] for one in found)

    def close(self) -> None:
        self.system.stop()
        self.broken.stop()


@pytest.fixture
def erasing(own_place: Any, tmp_path: Path) -> Iterator[Erasing]:
    made = Erasing(own_place, tmp_path)
    yield made
    made.close()


def test_a_store_that_is_away_refuses_and_the_repeat_erases_all(erasing: Erasing) -> None:
    gateway = erasing.gateway("g1").wait_ready()
    request_id = erasing.bring(gateway, 1)
    assert erasing.ended(gateway, request_id)
    assert erasing.kept() == [b"\1", b"\1"]
    erasing.broken.begin("fails")
    assert erasing.erase(gateway, request_id) == 503
    assert httpx.get(f"{gateway.url}/v1/requests/{request_id}", timeout=30).status_code == 200, "it is not erased"
    erasing.broken.heal()
    assert erasing.erase(gateway, request_id) == 200
    assert erasing.erase(gateway, request_id) == 410
    assert list(erasing.store.places[None].items("default")) == []


def test_a_gateway_that_is_killed_while_it_erases_leaves_it_to_another_one(erasing: Erasing) -> None:
    first, second = erasing.gateway("g1").wait_ready(), erasing.gateway("g2").wait_ready()
    request_id, other = erasing.bring(first, 1), erasing.bring(second, 2)
    assert all(erasing.ended(gateway, one) for gateway in (first, second) for one in (request_id, other))
    erasing.broken.begin("hangs")
    calling = threading.Thread(target=lambda: _refused(lambda: erasing.erase(first, request_id)))
    calling.start()
    wait_until(lambda: erasing.broken.struck("hangs", []), describe="it waits for the store")
    first.kill9()
    calling.join(30)
    erasing.broken.heal()
    assert erasing.erase(second, request_id) == 200
    assert erasing.kept() == [b"\2", b"\2"]
    third = erasing.gateway("g3").wait_ready()
    assert (erasing.erase(third, request_id), erasing.erase(third, other)) == (410, 200)
    assert list(erasing.store.places[None].items("default")) == []


def test_requests_with_the_same_image_at_two_gateways(erasing: Erasing) -> None:
    first, second = erasing.gateway("g1").wait_ready(), erasing.gateway("g2").wait_ready()
    one, other = erasing.bring(first, 7), erasing.bring(second, 7)
    assert erasing.ended(second, one)
    assert erasing.ended(first, other)
    assert erasing.kept() == [b"\7", b"\7", b"\7"], "the input is stored once"
    assert erasing.erase(second, one) == 200
    assert erasing.kept() == [b"\7", b"\7"], "the other request has its input and its output"
    assert erasing.erase(first, other) == 200
    assert erasing.kept() == []


def test_a_gateway_that_has_yet_to_read_the_command_answers_410(erasing: Erasing) -> None:
    """It showed the request until it had read the command: 2 of 30 calls right after the answer."""
    first, second = erasing.gateway("g1").wait_ready(), erasing.gateway("g2").wait_ready()
    ids = [first.submit() for _ in range(20)]
    for request_id in ids:
        erasing.scribe.job(request_id).end("text")
    assert all(erasing.ended(gateway, one) for gateway in (first, second) for one in ids)
    connections = {one: HTTPConnection("127.0.0.1", second.port, timeout=30) for one in ids}
    for one, connection in connections.items():  # it is open: what is sent on it is the first that the gateway reads
        connection.request("GET", f"/v1/requests/{one}")
        assert json.load(connection.getresponse())["done"]
    second.popen.send_signal(signal.SIGSTOP)
    try:
        assert {erasing.erase(first, one) for one in ids} == {200}
        for one, connection in connections.items():
            connection.request("GET", f"/v1/requests/{one}")
    finally:
        second.popen.send_signal(signal.SIGCONT)
    assert {connection.getresponse().status for connection in connections.values()} == {410}
    listed = httpx.get(f"{second.url}/v1/requests", timeout=30).json()
    assert listed["data"] == []


def _refused(call: Callable[[], int]) -> None:
    with pytest.raises(httpx.HTTPError):
        call()
