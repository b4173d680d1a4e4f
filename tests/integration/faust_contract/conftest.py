"""Groups on the session's broker."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from group import Group


@pytest.fixture
def group(kafka: Any, tmp_path: Path) -> Callable[..., Group]:
    return lambda **options: Group(kafka.bootstrap_servers, tmp_path, **options)
