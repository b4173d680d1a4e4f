"""A Prometheus with the alerting rules, on the system of the file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kit.helm_chart import NAMESPACE
from kit.prometheus import Prometheus, scraping
from penstock.cli.paths import free_port
from system import System


@pytest.fixture(scope="module")
def later_gateway() -> int:
    """The port of a gateway that starts later."""
    return free_port()


@pytest.fixture(scope="module")
def prometheus(system: System, later_gateway: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    ports = {one.name: one.port for one in system.processes}
    with scraping(tmp_path_factory.mktemp("prometheus"), ports, NAMESPACE, {"g2": later_gateway}) as found:
        yield found
