"""The checks of `make gpu-check`, one by one, on a card."""

from __future__ import annotations

from typing import Any

import pytest

CHECKS = ("fork_server", "admission", "turns", "unload", "out_of_memory", "batching")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
async def test_a_check(site: Any, name: str) -> None:
    from gpu_checks import CHECKS as checks

    assert await checks[name](site)
