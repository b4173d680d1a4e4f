"""Small real models, prepared once into the cache."""

from __future__ import annotations

from pathlib import Path

import pytest


def prepared(model: str) -> Path:
    """The model's folder. Without the command line's parts the test is skipped."""
    return pytest.importorskip("penstock.cli.assets").prepare_model(model, print)
