"""An admin client that an outage made useless is replaced, and ends once no caller waits for its answers."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import Future
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from penstock.common import admin_clients
from penstock.common.settings import KafkaSettings
from penstock.schemas.errors import BrokerUnavailable

SETTINGS = KafkaSettings(bootstrap_servers="127.0.0.1:1", client_id="of-this-test")


def ask_in_vain() -> None:
    """Asks Kafka, which does not answer."""

    def ask(_: object, seconds: float) -> bool:
        silent: Future[Any] = Future()
        silent.set_exception(KafkaException(KafkaError(KafkaError._TIMED_OUT)))
        return admin_clients.is_new(silent, "ask", 0)

    with pytest.raises(BrokerUnavailable):
        admin_clients.asked(SETTINGS, ask, 0.0)


def test_clients_of_past_outages_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has threads of its own: without an end five pauses of a broker left sixty threads."""
    now = 1_000.0
    monkeypatch.setattr(admin_clients.time, "monotonic", lambda: now)
    client = admin_clients.admin_client(SETTINGS)
    ended = weakref.ref(client)
    ask_in_vain()
    assert admin_clients.admin_client(SETTINGS) is client, "a young client is kept"
    now += admin_clients.RENEW_S
    ask_in_vain()
    assert admin_clients.admin_client(SETTINGS) is not client
    gc.collect()
    assert ended() is client, "a caller may wait for its answer"
    del client
    gc.collect()
    assert ended() is None
