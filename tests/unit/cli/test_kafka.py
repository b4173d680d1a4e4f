"""The embedded Kafka: cluster id, jars, class archive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from penstock.cli import kafka_jars
from penstock.cli.embedded_kafka import archive_options, new_cluster_id
from penstock.cli.failures import CliFailure, ExitCode

Released = Callable[[bytes], Path]


def test_a_cluster_id_never_looks_like_an_option() -> None:
    """It is an argument of Kafka's tool."""
    drawn = iter([b"\xf8" + bytes(15), b"\xfb" + bytes(15), b"\xfc" + bytes(15)])
    assert new_cluster_id(lambda: next(drawn)) == "_AAAAAAAAAAAAAAAAAAAAA"
    assert len(new_cluster_id()) == 22


class Archive:
    """Trains the archive of Kafka's classes, or fails with `failure`."""

    def __init__(self, folder: Path, failure: Exception | None = None) -> None:
        self.folder, self.failure, self.trained, self.lines = folder, failure, 0, list[str]()
        folder.mkdir()

    def _train(self, options: Sequence[str]) -> None:
        self.trained += 1
        (option,) = options
        Path(option.removeprefix("-XX:AOTCacheOutput=")).write_bytes(b"half")
        if self.failure is not None:
            raise self.failure

    def options(self) -> list[str]:
        return archive_options(self.folder, self._train, self.lines.append)


def test_the_class_archive_is_made_once(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "kafka")
    (option,) = archive.options()
    assert Path(option.removeprefix("-XX:AOTCache=")).read_bytes() == b"half"
    assert archive.options() == [option]
    assert (archive.trained, len(archive.lines)) == (1, 1)


@pytest.mark.parametrize("failure", [CliFailure("it did not answer"), OSError(28, "no space left")])
def test_kafka_starts_without_an_archive_that_cannot_be_made(tmp_path: Path, failure: Exception) -> None:
    archive = Archive(tmp_path / "kafka", failure)
    assert [archive.options(), archive.options(), archive.trained] == [[], [], 1]
    assert str(failure) in archive.lines[-1]
    (marker,) = archive.folder.iterdir()
    marker.unlink()
    archive.failure = None
    assert len(archive.options()) == 1


@pytest.fixture
def released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Released:
    """A release of one jar, whose download has this content, and an empty cache."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))

    def release(content: bytes) -> Path:
        jar = tmp_path / "kafka.jar"
        jar.write_bytes(b"jar")
        digest = kafka_jars.sha256(jar)
        monkeypatch.setattr(kafka_jars, "pinned_digests", lambda: {"kafka.jar": digest})
        jar.write_bytes(content)
        return jar

    return release


def test_the_pinned_digests_name_every_jar() -> None:
    digests = kafka_jars.pinned_digests()
    assert f"kafka_2.13-{kafka_jars.KAFKA_VERSION}.jar" in digests
    assert len(digests) == 46
    assert {len(digest) for digest in digests.values()} == {64}


def test_jars_are_fetched_once_and_again_if_they_are_damaged(
    released: Released, monkeypatch: pytest.MonkeyPatch
) -> None:
    jar, fetched = released(b"jar"), list[Path]()
    monkeypatch.setattr(kafka_jars, "_resolve", lambda workspace: fetched.append(workspace) or [jar])
    (found,) = kafka_jars.kafka_jars()
    assert kafka_jars.kafka_jars() == [found]
    assert len(fetched) == 1
    found.write_bytes(b"broken")
    kafka_jars.kafka_jars()
    assert (found.read_bytes(), len(fetched)) == (b"jar", 2)


def test_a_jar_with_another_digest_is_refused(released: Released, monkeypatch: pytest.MonkeyPatch) -> None:
    jar = released(b"something else")
    monkeypatch.setattr(kafka_jars, "_resolve", lambda workspace: [jar])
    with pytest.raises(CliFailure, match=r"kafka\.jar is not what was released"):
        kafka_jars.kafka_jars()


@pytest.mark.usefixtures("released")
def test_no_network_is_one_line_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    import jgo

    def build(*args: object, **kwargs: object) -> None:
        raise OSError("Failed to establish a new connection\nand a long story")

    monkeypatch.setattr(jgo, "build", build)
    with pytest.raises(CliFailure, match=r"cannot be fetched .*--bootstrap-servers") as caught:
        kafka_jars.kafka_jars()
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code is ExitCode.UNREACHABLE
