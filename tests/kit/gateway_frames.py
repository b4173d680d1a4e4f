"""Frames of a request for tests of what answers with them."""

from __future__ import annotations

from penstock.gateway.service.subscriptions import Subscription
from penstock.gateway.view.frames import Frame
from penstock.gateway.view.hub import Hub


def subscribed(*frames: Frame) -> Subscription:
    """The subscription to one request whose frames are all there."""
    subscription = Subscription(Hub(), single=True)
    subscription.push(frames)
    return subscription
