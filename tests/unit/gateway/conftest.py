"""Fixtures of the gateway's unit tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.view_gateway import ViewGateway
from penstock.common.artifacts import ArtifactStore
from penstock.gateway.threads import Threads
from penstock.gateway.view.view import View


@pytest.fixture
def view_gateway(tmp_path: Path) -> Iterator[ViewGateway]:
    """With a file, and nothing read."""
    with ViewGateway(tmp_path / "view.sqlite") as made:
        yield made


@pytest.fixture
def view(view_gateway: ViewGateway) -> View:
    return view_gateway.view


@pytest.fixture
def threads() -> Iterator[Threads]:
    made = Threads()
    yield made
    made.close()


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "artifacts")
