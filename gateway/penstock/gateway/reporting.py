"""Reports what this process is and does: a GatewayState every two seconds, a tombstone when it stops in order."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from typing import Any

from penstock.common.background import BackgroundTasks
from penstock.common.clock import now_ms
from penstock.common.release import release
from penstock.common.transport import Delivery, Transport
from penstock.gateway.view.gateways import REPORT_S
from penstock.schemas.codec import Codec
from penstock.schemas.errors import Forbidden, PenstockError
from penstock.schemas.records import GatewayState
from penstock.schemas.topics import GATEWAY_KEY, TopicNames

logger = logging.getLogger(__name__)

REFUSED_S = 60.0
"""A process that may not write reports tries so often."""
ALL_ADDRESSES = frozenset({"", "0.0.0.0", "::"})


def id_of(kind: str, port: int) -> str:
    """Stable across restarts, so that a process that comes back takes the place of the one that died."""
    return f"{kind}-{socket.gethostname()}-{port or os.getpid()}"


def url_of(host: str, port: int) -> str | None:
    """Where it serves; None where that is not known from the settings."""
    if host in ALL_ADDRESSES or not port:
        return None
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Reporter:
    """On the event loop. A report that Kafka does not take is lost: the next one says more."""

    def __init__(
        self,
        kind: str,
        address: tuple[str, int],
        transport: Transport,
        names: TopicNames,
        codec: Codec,
        look: Callable[[], dict[str, Any]],
    ) -> None:
        """`look` gives the fields that change."""
        self._transport, self._topic, self._codec, self._look = transport, names.worker, codec, look
        self._fixed: dict[str, Any] = {
            "id": id_of(kind, address[1]),
            "kind": kind,
            "version": release(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "url": url_of(*address),
            "started_at": now_ms(),
        }
        self._tasks = BackgroundTasks()
        self._refused: str | None = None

    @property
    def id(self) -> str:
        return self._fixed["id"]

    @property
    def started_at(self) -> int:
        return self._fixed["started_at"]

    @property
    def is_refused(self) -> bool:
        """Whether this process may not write reports, by Kafka's last answer."""
        return self._refused == Forbidden.code

    def start(self) -> None:
        """Report until `stop`."""
        self._tasks.start(self._run(), "reports")

    async def stop(self, *, in_order: bool) -> None:
        """A process that stops in order leaves all lists at once; one that has failed is missed."""
        await self._tasks.cancel()
        if in_order:
            self._send(None)

    async def _run(self) -> None:
        while True:
            state = GatewayState(**self._fixed, reported_at=now_ms(), **self._look())
            self._send(self._codec.encode(state))
            await asyncio.sleep(REFUSED_S if self.is_refused else REPORT_S)

    def _send(self, value: bytes | None) -> None:
        key = (GATEWAY_KEY + self.id).encode()
        try:
            self._transport.send(self._topic, value, key=key, on_delivery=self._delivered)
        except PenstockError as error:
            self._note(error)

    def _delivered(self, delivery: Delivery) -> None:
        self._note(delivery.error)

    def _note(self, error: PenstockError | None) -> None:
        """Log when reports begin to be refused, and when they are taken again."""
        refused = None if error is None else error.code
        if refused == self._refused:
            return
        self._refused = refused
        if error is None:
            logger.info("reports.taken topic=%s", self._topic)
        else:
            logger.warning("reports.refused topic=%s error=%s: others do not know of this process", self._topic, error)
