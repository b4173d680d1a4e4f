"""How far a view is from the ends of its partitions, when the broker tells less than the view has read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.common import admin
from penstock.common.settings import KafkaSettings
from penstock.gateway.threads import Threads
from penstock.gateway.view import ends as ends_module
from penstock.gateway.view.ends import Ends
from penstock.schemas.errors import BrokerUnavailable

RESULT, REQUEST = ("inference.result", 0), ("inference.request.low", 0)


async def test_ends_that_were_read_beyond_are_not_believed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As its broker died, a gateway said `not_found` of a request that another one had just accepted."""
    now, told = [100.0], {RESULT: 40, REQUEST: 7}
    view: Any = SimpleNamespace(offsets=lambda: {RESULT: 50, REQUEST: 7})
    monkeypatch.setattr(admin, "end_offsets", lambda settings, partitions, timeout_s: dict(told))
    monkeypatch.setattr(ends_module.time, "monotonic", lambda: now[0])
    threads = Threads()
    ends = Ends(KafkaSettings(), view, threads)
    for _ in range(2):
        with pytest.raises(BrokerUnavailable, match=r"inference\.result that this gateway has read beyond"):
            await ends.of_now(2)
        now[0] += ends_module.SHORT_S - 1
        told[RESULT] = 50
        assert await ends.of_now(2) == told, "the broker knows its log again"
        told[RESULT] = 40
    now[0] += 3_600
    with pytest.raises(BrokerUnavailable):
        await ends.of_now(2)  # an hour later it is another time
    now[0] += ends_module.SHORT_S
    assert await ends.of_now(2) == told, "the log has lost its end"
    threads.close()
