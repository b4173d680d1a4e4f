"""Fixtures of the gateway's unit tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.view_gateway import ViewGateway
from penstock.gateway.view.view import View


@pytest.fixture
def view(tmp_path: Path) -> Iterator[View]:
    """A view with its file, which has read nothing."""
    made = ViewGateway(tmp_path / "view.sqlite")
    yield made.view
    made.close()
