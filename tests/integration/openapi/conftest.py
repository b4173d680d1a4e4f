"""One worker and one gateway, with the limits that they have by default."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from system import System, running


@pytest.fixture(scope="module")
def url(kafka: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("openapi")
    with running(System(kafka.bootstrap_servers, f"o{uuid.uuid4().hex[:6]}-", folder)) as system:
        worker, gateway = system.worker(), system.gateway()
        worker.wait_ready()
        yield gateway.wait_ready().url
