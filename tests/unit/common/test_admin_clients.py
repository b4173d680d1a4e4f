"""Admin clients that an outage made useless: replaced, and ended when nobody awaits an answer of theirs."""

from __future__ import annotations

import gc
import weakref

import pytest

from penstock.common import admin_clients
from penstock.common.settings import KafkaSettings


def test_clients_of_past_outages_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has threads of its own: without an end five pauses of a broker left sixty threads."""
    settings = KafkaSettings(bootstrap_servers="127.0.0.1:1", client_id="of-this-test")
    now = 1_000.0
    monkeypatch.setattr(admin_clients.time, "monotonic", lambda: now)
    client = admin_clients.admin_client(settings)
    ended = weakref.ref(client)
    admin_clients._forget(settings, client)
    assert admin_clients.admin_client(settings) is client, "one that is so young is not replaced"
    now += admin_clients.RENEW_S
    admin_clients._forget(settings, client)
    assert admin_clients.admin_client(settings) is not client
    gc.collect()
    assert ended() is client, "somebody may await an answer of it"
    del client
    gc.collect()
    assert ended() is None
