"""Waiting for orders while their topic is read anew."""

from __future__ import annotations

import asyncio

import pytest

from penstock.common import admin
from penstock.common.settings import KafkaSettings
from penstock.processors.kafka.control import ControlFollower
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import BrokerUnavailable


async def test_nobody_has_caught_up_with_a_topic_that_is_about_to_be_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = KafkaSettings(bootstrap_servers="127.0.0.1:1")
    monkeypatch.setattr(admin, "end_offsets", lambda _settings, partitions, _timeout: dict.fromkeys(partitions, 1))
    follower = ControlFollower(settings, default_codec(), asyncio.get_running_loop(), lambda _: None)
    try:
        with pytest.raises(BrokerUnavailable):
            await asyncio.to_thread(follower.catch_up, 0.1)
    finally:
        await follower.stop()
