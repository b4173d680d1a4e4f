"""One worker and one gateway for all records of stock producers."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from system import System, running


@pytest.fixture(scope="module")
def system(kafka: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder: Path = tmp_path_factory.mktemp("stock")
    with running(System(kafka.bootstrap_servers, f"s{uuid.uuid4().hex[:6]}-", folder)) as system:
        worker, gateway = system.worker(), system.gateway()
        worker.wait_ready()
        gateway.wait_ready()
        yield system
