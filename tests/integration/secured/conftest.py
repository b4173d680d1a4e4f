"""One secured broker for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kit.secured_kafka import SecuredKafka
from system import BROKERS


@pytest.fixture(scope="session")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredKafka]:
    made = SecuredKafka(tmp_path_factory.mktemp("secured"))
    with made.running():
        BROKERS.append(made.broker)
        yield made
        BROKERS.remove(made.broker)
