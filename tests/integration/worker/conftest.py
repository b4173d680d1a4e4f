"""Workers as processes on the session's broker, with the no-op engine; no gateway."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from system import System, running


@pytest.fixture
def make_system(kafka: Any, tmp_path: Path) -> Iterator[Callable[..., System]]:
    with ExitStack() as stack:

        def make(**options: Any) -> System:
            prefix = f"w{uuid.uuid4().hex[:6]}-"
            return stack.enter_context(running(System(kafka.bootstrap_servers, prefix, tmp_path / prefix, **options)))

        yield make
