"""The registry's client and resolver against a registry made of httpx.MockTransport."""

from __future__ import annotations

import json
import threading

import httpx
import pytest

from penstock.schemas.codec import SCHEMA_IDS, Codec, schema_text
from penstock.schemas.errors import Conflict, RegistryUnavailable, UnknownSchema
from penstock.schemas.records import ControlCommand
from penstock.schemas.registry import RegistryClient, RegistryResolver, UnknownIds, reading_codec, registry_codecs
from support import wait_until

COMMAND = ControlCommand(kind="cancel", request_id="r", tenant="default", created_at=1)


class Registry:
    """Schemas by id, and a clock; `failing` answers everything so."""

    def __init__(self) -> None:
        self.schemas: dict[int, str] = {}
        self.asked = 0
        self.failing: httpx.Response | Exception | None = None
        self.hold: threading.Event | None = None
        self.now = 100.0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked += 1
        if self.hold is not None:
            assert self.hold.wait(10)
        if isinstance(self.failing, Exception):
            raise self.failing
        if self.failing is not None:
            return self.failing
        match request.method, request.url.path.split("/")[2:]:
            case "GET", ["schemas", "ids", number]:
                text = self.schemas.get(int(number))
                if text is None:
                    return httpx.Response(404, json={"error_code": 40403, "message": "Schema not found"})
                return httpx.Response(200, json={"schema": text})
            case "POST", ["subjects", _, "versions"]:
                text = json.loads(request.content)["schema"]
                known = {found: number for number, found in self.schemas.items()}
                number = known.get(text, len(known) + 1)
                self.schemas[number] = text
                return httpx.Response(200, json={"id": number})
            case _:
                return httpx.Response(405)


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
def client(registry: Registry) -> RegistryClient:
    return RegistryClient("http://registry/base/", transport=httpx.MockTransport(registry))


def test_the_codec_reads_and_writes_a_registrys_ids(registry: Registry, client: RegistryClient) -> None:
    number = client.register("s", schema_text("ControlCommand"))
    writer = Codec(writer_ids={"ControlCommand": number})
    reader = Codec(RegistryResolver(client).ask)
    encoded = writer.encode(COMMAND)
    assert encoded[:5] == b"\0" + number.to_bytes(4, "big")
    before = registry.asked
    for _ in range(3):
        assert reader.decode(encoded, ControlCommand) == COMMAND
    assert registry.asked == before + 1
    own = Codec().encode(COMMAND)
    assert int.from_bytes(own[1:5], "big") == SCHEMA_IDS["ControlCommand"][-1]
    assert Codec(RegistryResolver(client).ask).decode(own, ControlCommand) == COMMAND
    assert registry.asked == before + 1, "our own ids need no registry"


def test_unknown_ids_take_bounded_memory(registry: Registry) -> None:
    unknown = UnknownIds(seconds=3, at_most=10, clock=lambda: registry.now)
    for number in range(1_000):
        unknown.add(number)
    assert len(unknown) == 10
    assert unknown.age(999) == 0
    assert unknown.age(0) is None
    registry.now += 3.1
    assert unknown.age(999) is None


FAILURES = {
    "refused": httpx.ConnectError("refused"),
    "slow": httpx.ReadTimeout("slow"),
    "500": httpx.Response(500),
    "503": httpx.Response(503, json={}),
    "401": httpx.Response(401),
    "html": httpx.Response(200, text="<html>"),
    "another-object": httpx.Response(200, json={"hello": "world"}),
    "a-list": httpx.Response(200, json=["schema"]),
}


@pytest.mark.parametrize("failing", [httpx.ConnectError("no"), httpx.Response(200, text="no JSON")])
def test_the_password_of_its_url_is_shown_to_nobody(failing: httpx.Response | Exception) -> None:
    registry = Registry()
    registry.failing = failing
    client = RegistryClient("http://key:hush@registry:8081/", transport=httpx.MockTransport(registry))
    with pytest.raises(RegistryUnavailable, match=r"http://\*\*\*@registry:8081") as caught:
        client.register("s", "{}")
    assert "hush" not in caught.value.message


@pytest.mark.parametrize("failing", FAILURES.values(), ids=FAILURES)
def test_nobody_to_ask_is_not_poison(
    registry: Registry, client: RegistryClient, failing: httpx.Response | Exception
) -> None:
    registry.failing = failing
    with pytest.raises(RegistryUnavailable) as caught:
        Codec(RegistryResolver(client).ask).decode(b"\0\0\0\0\x05abc", ControlCommand)
    assert caught.value.retryable
    with pytest.raises(RegistryUnavailable):
        client.register("s", "{}")
    registry.failing = None
    registry.schemas[5] = schema_text("ControlCommand")
    assert RegistryResolver(client).ask(5) == registry.schemas[5]


@pytest.mark.parametrize("text", ["not json", '{"type": "no-such-type"}', "{}", '"string"', '{"type": "map"}'])
def test_a_schema_that_is_none_of_ours_is_unknown(registry: Registry, client: RegistryClient, text: str) -> None:
    registry.schemas[5] = text
    with pytest.raises(UnknownSchema):
        Codec(RegistryResolver(client).ask).decode(b"\0\0\0\0\x05abc", ControlCommand)


@pytest.mark.parametrize("status", [409, 422])
def test_an_incompatible_schema_is_a_conflict(registry: Registry, client: RegistryClient, status: int) -> None:
    registry.failing = httpx.Response(status, json={"message": "incompatible"})
    with pytest.raises(Conflict):
        client.register("s", "{}")


def answered(resolver: RegistryResolver, schema_id: int) -> str:
    """What the resolver says when it has an answer; until then it must say so without waiting."""
    found: list[str] = []

    def there() -> bool:
        try:
            found.append(resolver.ask_aside(schema_id))
        except RegistryUnavailable:
            return False
        return True

    wait_until(there, 10, "the schema was fetched")
    return found[0]


def test_an_event_loop_never_waits(registry: Registry, client: RegistryClient) -> None:
    registry.schemas[5] = '"string"'
    release = threading.Event()
    registry.hold = release
    resolver = RegistryResolver(client, retry_s=0.01)
    for _ in range(3):
        with pytest.raises(RegistryUnavailable):
            resolver.ask_aside(5)
    release.set()
    assert answered(resolver, 5) == '"string"'
    assert registry.asked == 1


def test_a_thread_asks_until_the_registry_is_back(registry: Registry, client: RegistryClient) -> None:
    registry.schemas[5] = '"string"'
    registry.failing = httpx.ConnectError("refused")
    resolver = RegistryResolver(client, retry_s=0.01)

    def refused() -> bool:
        with pytest.raises(RegistryUnavailable) as caught:
            resolver.ask_aside(5)
        return "refused" in str(caught.value)

    wait_until(refused, 10, "the reason is told")
    registry.failing = None
    assert answered(resolver, 5) == '"string"'


@pytest.mark.parametrize("aside", [False, True])
def test_an_unknown_id_is_asked_for_once_and_again_after_a_while(
    registry: Registry, client: RegistryClient, aside: bool
) -> None:
    resolver = RegistryResolver(client, unknown=UnknownIds(seconds=3, clock=lambda: registry.now))
    first = (lambda: answered(resolver, 5)) if aside else (lambda: resolver.ask(5))
    with pytest.raises(UnknownSchema):
        first()
    for _ in range(1_000):
        with pytest.raises(UnknownSchema):
            (resolver.ask_aside if aside else resolver.ask)(5)
    assert registry.asked == 1
    registry.schemas[5] = '"string"'
    registry.now += 10 if aside else 3.1
    assert [first() for _ in range(3)] == ['"string"'] * 3
    assert registry.asked == 2


def test_an_unknown_id_that_keeps_coming_is_asked_for_aside(registry: Registry, client: RegistryClient) -> None:
    resolver = RegistryResolver(client, unknown=UnknownIds(seconds=3, clock=lambda: registry.now))
    with pytest.raises(UnknownSchema):
        answered(resolver, 5)
    registry.schemas[5] = '"string"'
    registry.now += 2
    with pytest.raises(UnknownSchema):  # still remembered, and asked for meanwhile
        resolver.ask_aside(5)

    def there() -> bool:
        try:
            return resolver.ask_aside(5) == '"string"'
        except UnknownSchema:
            return False

    wait_until(there, 10, "the id is known without a stall")


def test_both_ways_of_asking_share_what_they_know(registry: Registry, client: RegistryClient) -> None:
    number = client.register("s", schema_text("ControlCommand"))
    resolver = RegistryResolver(client)
    prompt, blocking = Codec(resolver.ask_aside), Codec(resolver.ask)
    encoded = Codec(writer_ids={"ControlCommand": number}).encode(COMMAND)
    missing = b"\0" + (999).to_bytes(4, "big") + encoded[5:]
    before = registry.asked
    assert blocking.decode(encoded, ControlCommand) == prompt.decode(encoded, ControlCommand) == COMMAND
    for codec in (blocking, prompt, blocking):
        with pytest.raises(UnknownSchema):
            codec.decode(missing, ControlCommand)
    assert registry.asked == before + 2


def test_codecs_without_a_registry_are_the_package_s_own() -> None:
    codecs = registry_codecs(None, write=True)
    assert codecs.blocking is codecs.prompt is reading_codec(None)
