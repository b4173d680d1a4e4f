"""The channel between worker and engine process: order, sizes, both directions at once, the end."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest

from penstock.processors.engines.process.channel import Channel
from penstock.processors.images.decoded import DecodedImage


async def pair(
    on_left: Callable[[Any], None], on_right: Callable[[Any], None], lost: Callable[[str], None]
) -> tuple[Channel, Channel]:
    one, other = socket.socketpair()
    left = await Channel.open(one, on_left, lambda: lost("left"))
    right = await Channel.open(other, on_right, lambda: lost("right"))
    return left, right


async def test_values_arrive_in_order_however_large() -> None:
    got: list[Any] = []
    done = asyncio.Event()
    left, right = await pair(lambda _: None, lambda value: (got.append(value), value == "end" and done.set()), print)
    sent = [1, {"a": [1, 2]}, b"x" * 3_000_000, "", ("t", None), "end"]
    for value in sent:
        left.send(value)
    await asyncio.wait_for(done.wait(), 10)
    assert got == sent
    left.close()
    right.close()


async def test_both_sides_may_send_more_than_the_kernel_holds() -> None:
    counts = {"left": 0, "right": 0}
    done = asyncio.Event()

    def count(side: str) -> Callable[[Any], None]:
        def on_message(value: bytes) -> None:
            counts[side] += len(value)
            if set(counts.values()) == {20_000_000}:
                done.set()

        return on_message

    left, right = await pair(count("left"), count("right"), print)
    for _ in range(20):
        left.send(b"l" * 1_000_000)
        right.send(b"r" * 1_000_000)
    assert left.unsent_bytes > 0
    await asyncio.wait_for(done.wait(), 20)
    left.close()
    right.close()


async def test_only_the_side_that_did_not_close_is_told() -> None:
    lost: list[str] = []
    left, right = await pair(print, print, lost.append)
    left.close()
    async with asyncio.timeout(5):
        while not lost:
            await asyncio.sleep(0)
    assert lost == ["right"]
    right.send("nobody hears this")
    assert right.unsent_bytes == 0


@pytest.mark.parametrize("side", [10, 700])
async def test_pixels_arrive_beside_their_message(side: int) -> None:
    got: list[Any] = []
    done = asyncio.Event()
    left, right = await pair(lambda _: None, lambda value: (got.append(value), value == "end" and done.set()), print)
    images = [
        DecodedImage(
            width=side,
            height=side,
            mode="RGB",
            pixels=bytes([number]) * (3 * side * side),
            source_format="PNG",
            source_sha256="0" * 64,
        )
        for number in range(3)
    ]
    left.send(("prepare", 1, {"image": images[0], "mask": images[1]}))
    left.send("between")
    left.send(("prepare", 2, {"image": images[2]}))
    left.send("end")
    await asyncio.wait_for(done.wait(), 20)
    first, between, second, _ = got
    assert (first[1], between, second[1]) == (1, "between", 2)
    assert [*first[2].values(), second[2]["image"]] == images
    left.close()
    right.close()
