"""The client without a broker, and what importing it loads."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kit.records import outcome
from penstock import producers
from penstock.cli.paths import free_port
from penstock.common.artifacts import ArtifactStore
from penstock.common.transport import AsyncTransport
from penstock.producers import AsyncClient, Client, KafkaSettings
from penstock.producers import core as core_module
from penstock.producers.core import ClientCore
from penstock.producers.follower import Follower
from penstock.schemas import errors
from penstock.schemas.errors import BrokerUnavailable, InternalError, InvalidRequest, NotFound, PenstockError
from penstock.schemas.records import ArtifactRef, InferenceRequest, ResultEvent
from support import wait_until

ROOT = Path(__file__).parents[3]

LIGHT = """
import sys
import penstock.producers
heavy = {"torch", "transformers", "fastapi", "faust", "aiokafka", "numpy", "obstore", "pydantic"} & set(sys.modules)
assert not heavy, heavy
"""


def test_importing_the_library_is_light() -> None:
    subprocess.run([sys.executable, "-c", LIGHT], check=True, timeout=60)


@pytest.mark.parametrize("root", ["schemas", "common", "producers", "processors", "gateway", "cli"])
def test_each_package_is_marked_as_typed(root: str) -> None:
    """PEP 561: one marker for each, since `penstock` itself is a namespace. Hatchling packs all that git knows."""
    marker = ROOT / root / "penstock" / root / "py.typed"
    assert marker.is_file()
    packed = subprocess.run(["git", "ls-files", str(marker)], cwd=ROOT, capture_output=True, text=True, check=True)
    assert packed.stdout.strip()


def test_each_error_that_a_caller_may_see_is_exported() -> None:
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, PenstockError)}
    assert kinds <= set(producers.__all__)
    assert all(getattr(producers, name) is getattr(errors, name) for name in kinds)


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
        with pytest.raises(BrokerUnavailable) as caught:
            call()
        assert type(caught.value) is BrokerUnavailable, "a class that producers exports"
        assert str(caught.value).count("127.0.0.1:") == 1, "the address, once"
        assert time.monotonic() - began < 8


@pytest.mark.parametrize(
    ("payload", "fields", "param"),
    [
        ({}, {"tenant": "other"}, "tenant"),
        ({"max_tokens": -1}, {}, "payload.max_tokens"),
        ({}, {"request_id": "white space"}, "request_id"),
    ],
)
def test_a_wrong_field_is_named_before_anything_is_sent(client: Client, payload: Any, fields: Any, param: str) -> None:
    with pytest.raises(PenstockError) as refused:
        client.submit(task="text_generation", payload={"prompt": "x", **payload}, **fields)
    assert refused.value.param == param


class Failing(Follower):
    """A follower that fails on demand."""

    made: ClassVar[list[Failing]] = []

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.stops = threading.Event()
        self.made.append(self)

    def fail(self) -> None:
        def divide() -> None:
            raise ZeroDivisionError

        self._reader.call(divide)
        wait_until(lambda: self.failed, 10)

    def stop(self) -> None:
        super().stop()
        self.stops.set()


def test_each_follower_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has two threads and two consumers: one that failed and was replaced, and none is made after the close."""
    monkeypatch.setattr(core_module, "Follower", Failing)
    monkeypatch.setattr(Failing, "made", [])
    core = ClientCore(KafkaSettings(bootstrap_servers="127.0.0.1:1"), {"timeout_s": 1})
    first = core.follow("r", {}, lambda: None)
    Failing.made[0].fail()
    core.follow("s", {}, lambda: None)
    assert Failing.made[0].stops.wait(10)
    with pytest.raises(InternalError, match="following has failed"):
        first.step()
    core.close(1)
    with pytest.raises(InternalError, match="closed"):
        core.follow("t", {}, lambda: None)
    assert [follower.stops.is_set() for follower in Failing.made] == [True, True]


FORKING = """
import os, socket, sys, threading
from penstock.producers import Client, KafkaSettings
from penstock.common import admin, admin_clients
from penstock import producers
from penstock.schemas import errors
from penstock.schemas.errors import BrokerUnavailable, InternalError

settings = KafkaSettings(bootstrap_servers="127.0.0.1:1")
client = Client(settings, timeout_s=1)
before = admin_clients.admin_client(settings)

def resolve():
    # A lock of glibc's that is held in the moment of the fork stays held in the child, and its resolver hangs.
    while True:
        socket.getaddrinfo("127.0.0.1", 1)

for _ in range(4):
    threading.Thread(target=resolve, daemon=True).start()
with admin_clients._clients_lock:  # as another thread may, at that moment
    child = os.fork()
if child == 0:
    assert admin_clients.admin_client(settings) is not before
    try:
        admin.broker_count(settings, timeout_s=0.5)
    except BrokerUnavailable:
        pass
    try:
        client.cancel("r")
    except InternalError as error:
        assert "fork" in str(error)
    client.close()
    sys.exit(7)  # and not os._exit: what was inherited must not be waited for at the end either
_, status = os.waitpid(child, 0)
assert admin_clients.admin_client(settings) is before
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_has_kafka_clients_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", FORKING], timeout=60, capture_output=True, text=True)
    assert done.returncode == 7, done.stderr


async def test_one_transport_serves_all_sends_of_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[AsyncTransport] = []
    made_as_before = AsyncTransport.__init__

    def counting(self: AsyncTransport, *arguments: Any) -> None:
        made.append(self)
        made_as_before(self, *arguments)

    monkeypatch.setattr(AsyncTransport, "__init__", counting)
    client = AsyncClient(KafkaSettings(bootstrap_servers=f"127.0.0.1:{free_port()}"), timeout_s=0.2)
    done = await asyncio.gather(*(client.cancel(f"r-{n}") for n in range(20)), return_exceptions=True)
    assert {type(outcome) for outcome in done} == {BrokerUnavailable}
    assert len(made) == 1
    await client.close()


def large(tenant: str, store: ArtifactStore) -> ResultEvent:
    kept = store.put(tenant, json.dumps({"embeddings": [[1.0, 2.0]]}).encode(), media_type="application/json")
    fields = ("artifact_id", "uri", "media_type", "size_bytes", "sha256")
    artifact = ArtifactRef(**{name: getattr(kept, name) for name in fields})
    return outcome(tenant=tenant, task="embedding", output_artifact=artifact)


def core(**options: Any) -> ClientCore:
    return ClientCore(KafkaSettings(bootstrap_servers="127.0.0.1:1"), {"tenant": "acme", **options})


def test_a_large_output_is_fetched_and_verified(tmp_path: Path) -> None:
    outcome = large("acme", ArtifactStore(tmp_path))
    made = core(artifacts=tmp_path)
    assert made.with_output(outcome).output == {"embeddings": [[1.0, 2.0]]}
    assert outcome.output_artifact is not None
    forged = dataclasses.replace(outcome.output_artifact, sha256="0" * 64)
    with pytest.raises(InternalError, match="digest"):
        made.with_output(dataclasses.replace(outcome, output_artifact=forged))
    with pytest.raises(NotFound):
        core(artifacts=tmp_path / "elsewhere").with_output(outcome)


def test_a_large_output_is_never_silently_nothing(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="artifacts=") as refused:
        core().with_output(large("acme", ArtifactStore(tmp_path)))
    assert refused.value.details["artifact"]["media_type"] == "application/json"


def test_a_call_that_this_client_may_not_make_is_refused(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="artifacts="):
        client.artifacts.put(b"x")
    request = InferenceRequest(request_id="r", tenant="other", task="text_generation", text_generation={}, created_at=1)
    with pytest.raises(InvalidRequest, match="this client is the tenant default's"):
        client.send(request)
