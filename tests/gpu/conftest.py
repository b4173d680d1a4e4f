"""What runs on a card alone: skipped where there is none."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The freest card of this machine."""
    gpu_site = pytest.importorskip("gpu_site")
    found = gpu_site.find(None, tmp_path_factory.mktemp("gpu"))
    if found is None:
        pytest.skip("there is no card here")
    return found
