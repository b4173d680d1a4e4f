"""Fixtures of the gateway's unit tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.view_gateway import ViewGateway
from penstock.gateway.view.view import View


@pytest.fixture
def view_gateway(tmp_path: Path) -> Iterator[ViewGateway]:
    """With a file, and nothing read."""
    made = ViewGateway(tmp_path / "view.sqlite")
    yield made
    made.close()


@pytest.fixture
def view(view_gateway: ViewGateway) -> View:
    return view_gateway.view
