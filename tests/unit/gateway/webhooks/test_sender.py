"""A call never raises: neither for a URL of a caller nor for a response of a receiver."""

from __future__ import annotations

import asyncio
import base64
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import AsyncMock

import httpcore
import pytest

from penstock.gateway.callbacks import Callbacks, WebhooksSection
from penstock.gateway.webhooks.policy import Answer
from penstock.gateway.webhooks.sender import NAMES_OF_ONE, Sender, retry_after_s

KEY = "whsec_" + base64.b64encode(bytes(32)).decode()


async def address(_host: str, _port: int) -> list[str]:
    return ["93.184.215.14"]


def sender(*options: Any, timeout_s: float = 5) -> Sender:
    return Sender(Callbacks(WebhooksSection.model_validate({"secret": KEY})), timeout_s, *options)


async def post(sender: Sender, url: str = "http://x.example/", tenant: str = "t") -> Answer:
    return await sender.post(tenant, url, [], b"{}")


@pytest.mark.parametrize("host", ["a..com", "a" * 64 + ".com", ".x.com"])
async def test_a_name_that_cannot_be_resolved_is_an_answer(host: str) -> None:
    """Some stand on the topic: the worker keeps what it took from older producers."""
    assert await post(sender(), f"http://{host}/") == Answer(error="not reached, or broken off (OSError)")


async def test_an_unexpected_error_is_an_answer() -> None:
    network = httpcore.AsyncMockBackend([])
    network.connect_tcp = AsyncMock(side_effect=LookupError("x.example"))
    assert await post(sender(address, network)) == Answer(error="LookupError")


async def test_a_header_that_is_no_number_is_passed_over() -> None:
    answered = b"HTTP/1.1 503 x\r\nRetry-After: \xb2\r\nContent-Length: 0\r\n\r\n"
    assert await post(sender(address, httpcore.AsyncMockBackend([answered]))) == Answer(status_code=503)


@pytest.mark.parametrize(("value", "seconds"), [(b"7", 7.0), (b"\xb2", None), (b"soon", None), (b"1" * 10, None)])
def test_retry_after(value: bytes, seconds: float | None) -> None:
    assert retry_after_s(value) == seconds


async def test_names_that_do_not_resolve_hold_up_one_tenant_only(monkeypatch: pytest.MonkeyPatch) -> None:
    let_go, asked = threading.Event(), list[str]()

    def slow(host: str, port: int, **_: object) -> list[object]:
        asked.append(host)
        if host.endswith("slow.example"):
            let_go.wait(30)
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(4))
    one = sender(timeout_s=0.5)
    try:
        calls = [post(one, f"http://h{number}.slow.example/", "evil") for number in range(32)]
        answers = await asyncio.gather(*calls)
        assert {answer.error for answer in answers} == {"no answer within 0.5 s"}
        assert len(asked) == NAMES_OF_ONE, "a lookup counts until it has ended, not until its call has"
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "made"), 2) == "made"
        assert (await post(one, "http://fast.example/", "good")).error == "not reached, or broken off (gaierror)"
    finally:
        let_go.set()
        one.close()
