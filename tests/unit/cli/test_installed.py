"""What `make install` leaves behind."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest


def test_packages_are_compiled() -> None:
    """In a container nobody may write beside them: each start of an engine compiled torch anew."""
    if not any(Path(sys.prefix).glob(".installed-*")):
        pytest.skip("this environment was not made by make install")
    names = ("torch", "transformers", "diffusers", "faust", "fastapi")
    for name in names:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.cached is not None
        assert Path(spec.cached).exists(), f"{name} is not compiled"
