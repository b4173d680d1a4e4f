"""How many examples a property test tries: a quarter in `make test`, all of them in `make test-all`."""

from __future__ import annotations

import os

ALL_VARIABLE = "PENSTOCK_TEST_ALL"
ALL = bool(os.environ.get(ALL_VARIABLE))
SHARE = 4


def examples(number: int) -> int:
    """How many of `number` examples this run tries. Each run draws new ones."""
    return number if ALL else max(number // SHARE, 5)
