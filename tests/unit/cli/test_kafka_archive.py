"""The archive of Kafka's classes is made once, and Kafka starts without it where it cannot be made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from penstock.cli.failures import CliFailure
from penstock.cli.kafka_archive import archive_options


@dataclass
class Site:
    folder: Path
    failure: Exception | None = None
    trained: int = 0
    told: list[str] = field(default_factory=list[str])

    def _train(self, options: Sequence[str]) -> None:
        self.trained += 1
        (option,) = options
        Path(option.removeprefix("-XX:AOTCacheOutput=")).write_bytes(b"half")
        if self.failure is not None:
            raise self.failure

    def options(self) -> list[str]:
        return archive_options(self.folder, self._train, self.told.append)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    folder = tmp_path / "kafka"
    folder.mkdir()
    return Site(folder)


def test_it_is_made_once(site: Site) -> None:
    (option,) = site.options()
    assert Path(option.removeprefix("-XX:AOTCache=")).read_bytes() == b"half"
    assert site.options() == [option]
    assert (site.trained, len(site.told)) == (1, 1)


@pytest.mark.parametrize("failure", [CliFailure("it did not answer"), OSError(28, "no space left")])
def test_where_it_cannot_be_made_kafka_starts_without_and_it_is_said_once(site: Site, failure: Exception) -> None:
    site.failure = failure
    assert site.options() == []
    assert site.options() == []
    assert site.trained == 1
    assert str(failure) in site.told[-1]
    (marker,) = site.folder.iterdir()
    marker.unlink()
    site.failure = None
    assert len(site.options()) == 1
