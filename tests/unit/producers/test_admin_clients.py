"""Admin clients that an outage made useless: replaced, and ended after a while."""

from __future__ import annotations

import gc
import weakref

import pytest

from penstock.producers import admin
from penstock.producers.settings import KafkaSettings


@pytest.fixture
def settings() -> KafkaSettings:
    return KafkaSettings(bootstrap_servers="127.0.0.1:1", client_id="of-this-test")


def test_clients_of_past_outages_end(settings: KafkaSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has threads of its own: without an end five pauses of a broker left sixty threads."""
    now = 1_000.0
    monkeypatch.setattr(admin.time, "monotonic", lambda: now)
    replaced: list[weakref.ref[object]] = []
    for _ in range(admin.MAX_RETIRED + 6):
        client = admin.admin_client(settings)
        replaced.append(weakref.ref(client))
        admin._forget(settings, client)
        assert admin.admin_client(settings) is client, "one that is so young is not replaced"
        now += admin.RENEW_S
        admin._forget(settings, client)
        assert admin.admin_client(settings) is not client
        del client
    gc.collect()
    assert sum(one() is not None for one in replaced) <= admin.MAX_RETIRED + 1
    now += admin.RETIRED_S + 1
    admin.admin_client(settings)
    gc.collect()
    assert [one for one in replaced if one() is not None] == []
