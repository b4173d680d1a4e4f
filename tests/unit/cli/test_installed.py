"""What `make install` leaves behind."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest


def test_packages_are_compiled() -> None:
    """In a container nobody may write beside them: each start of an engine compiled torch anew."""
    if not any(Path(sys.prefix).glob(".installed-*")):
        pytest.skip("this environment was not made by make install")
    packages = Path(sysconfig.get_path("purelib"))
    for name in ("torch", "transformers", "diffusers", "faust", "fastapi"):
        compiled = packages / name / "__pycache__" / f"__init__.{sys.implementation.cache_tag}.pyc"
        assert compiled.exists(), f"{name} is not compiled"
