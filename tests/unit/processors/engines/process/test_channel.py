"""The channel between worker and engine process: order, sizes, both directions at once, the end."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest

from penstock.processors.engines.process.channel import Channel
from penstock.processors.images.decoded import DecodedImage
from support import wait_until_async


async def pair(
    on_left: Callable[[Any], None], on_right: Callable[[Any], None], lost: Callable[[str], None] = print
) -> tuple[Channel, Channel]:
    one, other = socket.socketpair()
    left = await Channel.open(one, on_left, lambda: lost("left"))
    right = await Channel.open(other, on_right, lambda: lost("right"))
    return left, right


async def passed(*sent: Any) -> list[Any]:
    """What arrives of these values."""
    got: list[Any] = []
    left, right = await pair(print, got.append)
    for value in sent:
        left.send(value)
    await wait_until_async(lambda: len(got) == len(sent), 20)
    left.close()
    right.close()
    return got


async def test_values_arrive_in_order_however_large() -> None:
    sent = [1, {"a": [1, 2]}, b"x" * 3_000_000, "", ("t", None), "end"]
    assert await passed(*sent) == sent


async def test_both_sides_may_send_more_than_the_kernel_holds() -> None:
    counts = {"left": 0, "right": 0}
    done = asyncio.Event()

    def count(side: str) -> Callable[[Any], None]:
        def on_message(value: bytes) -> None:
            counts[side] += len(value)
            if set(counts.values()) == {20_000_000}:
                done.set()

        return on_message

    left, right = await pair(count("left"), count("right"))
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
    await wait_until_async(lambda: lost, 5)
    assert lost == ["right"]
    right.send("nobody hears this")
    assert right.unsent_bytes == 0


@pytest.mark.parametrize("side", [10, 700])
async def test_pixels_arrive_beside_their_message(side: int) -> None:
    first, mask, second = (
        DecodedImage(side, side, "RGB", bytes([number]) * (3 * side * side), "PNG", "0" * 64) for number in range(3)
    )
    sent = [("prepare", 1, {"image": first, "mask": mask}), "between", ("prepare", 2, {"image": second}), "end"]
    assert await passed(*sent) == sent
