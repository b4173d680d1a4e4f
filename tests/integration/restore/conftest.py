"""A second broker, into which an installation's topics are brought."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.cli.embedded_kafka import EmbeddedKafka
from penstock.cli.paths import free_port


@pytest.fixture(scope="module")
def second_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedKafka]:
    broker = EmbeddedKafka(tmp_path_factory.mktemp("second-kafka"), free_port())
    try:
        yield broker.start()
    finally:
        broker.kill()
