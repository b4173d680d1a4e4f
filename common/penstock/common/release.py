"""Which release of Penstock this process runs."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def release() -> str:
    """Its version; "unknown" where it runs from a folder that was not installed."""
    try:
        return version("penstock")
    except PackageNotFoundError:
        return "unknown"
