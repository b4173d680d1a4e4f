"""Kafka's jars: taken from the cache only when every digest is right, and one line with the cure when not to be had."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli import kafka_jars
from penstock.cli.failures import CliFailure, ExitCode


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes = b"jar") -> Path:
    """One jar that the release is said to consist of."""
    jar = tmp_path / "kafka.jar"
    jar.write_bytes(b"jar")
    digest = kafka_jars.sha256(jar)
    monkeypatch.setattr(kafka_jars, "pinned_digests", lambda: {"kafka.jar": digest})
    jar.write_bytes(content)
    return jar


def test_the_digests_that_ship_name_every_jar() -> None:
    digests = kafka_jars.pinned_digests()
    assert f"kafka_2.13-{kafka_jars.KAFKA_VERSION}.jar" in digests
    assert len(digests) == 46
    assert {len(digest) for digest in digests.values()} == {64}


def test_jars_are_fetched_once_and_damage_is_mended(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jar, fetched = released(tmp_path, monkeypatch), []

    def resolve(workspace: Path) -> list[Path]:
        fetched.append(workspace)
        return [jar]

    monkeypatch.setattr(kafka_jars, "_resolve", resolve)
    (found,) = kafka_jars.kafka_jars()
    assert kafka_jars.kafka_jars() == [found]
    assert len(fetched) == 1
    found.write_bytes(b"broken")
    kafka_jars.kafka_jars()
    assert found.read_bytes() == b"jar"
    assert len(fetched) == 2


def test_a_jar_that_is_not_the_released_one_is_refused(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jar = released(tmp_path, monkeypatch, content=b"something else")
    monkeypatch.setattr(kafka_jars, "_resolve", lambda workspace: [jar])
    with pytest.raises(CliFailure, match=r"kafka\.jar is not what was released"):
        kafka_jars.kafka_jars()


def test_no_network_is_one_line_with_the_cure(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import jgo

    def build(*args: object, **kwargs: object) -> None:
        raise OSError("Failed to establish a new connection\nand a long story")

    monkeypatch.setattr(jgo, "build", build)
    with pytest.raises(CliFailure, match=r"cannot be fetched .*--bootstrap-servers") as caught:
        kafka_jars.kafka_jars()
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code is ExitCode.UNREACHABLE
