"""Connections to the host of a caller's URL, only to addresses that were checked.

httpcore speaks HTTP; its connections are opened by a network backend of ours, which resolves the name, checks every
address, and connects to one that it has checked: an answer of DNS that changes a moment later changes nothing.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import httpcore

from penstock.common.urls.addresses import is_allowed
from penstock.common.urls.rules import Target

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses of a name. Raises OSError."""


def addresses(host: str, port: int) -> list[str]:
    """As the machine resolves names. Blocks, half a minute or longer where DNS does not answer. Raises OSError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # an empty label, or one that is too long
        raise OSError(f"{host[:100]} is no name") from error
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


async def resolve(host: str, port: int) -> list[str]:
    """The same on a thread of the event loop's executor. Raises OSError."""
    return await asyncio.to_thread(addresses, host, port)


class Refused(Exception):
    """An address of the host may not be connected to."""


class CheckedBackend(httpcore.AsyncNetworkBackend):
    """Opens connections of one target, and only to addresses of it that are allowed."""

    def __init__(self, target: Target, resolve: Resolve, network: httpcore.AsyncNetworkBackend) -> None:
        self._target = target
        self._resolve = resolve
        self._network = network

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Raises Refused when any address of the name is not allowed: a name that mixes them is no mistake."""
        addresses = await self._resolve(host, port)
        internal = self._target.internal
        if not addresses or not all(is_allowed(address, internal=internal) for address in addresses):
            raise Refused
        failure: httpcore.NetworkError | httpcore.TimeoutException | None = None
        for address in addresses:
            try:
                # The address, not the name: nobody resolves it a second time.
                return await self._network.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.NetworkError, httpcore.TimeoutException) as error:
                failure = error
        raise failure or httpcore.ConnectError(host)

    async def connect_unix_socket(self, path: str, timeout: float | None = None, socket_options: object = None) -> Any:
        raise Refused

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
