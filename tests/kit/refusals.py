"""An error that a test expects, with what it says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def refused(error: Any, match: str | None = None, **facts: Any) -> Iterator[None]:
    """The block raises this kind of error, with these attributes; nothing if `error` is None."""
    if error is None:
        yield
        return
    with pytest.raises(error, match=match) as caught:
        yield
    assert {name: getattr(caught.value, name) for name in facts} == facts
