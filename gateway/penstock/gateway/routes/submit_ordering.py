"""The order of frames about requests that a socket submits itself: `accepted` goes before any news of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar

from penstock.gateway.view.frames import Frame

MAX_HELD = 256
"""Frames of one request that are held back for its `accepted`; with more they go first."""


@dataclass(kw_only=True, slots=True)
class Reply(Frame):
    """The answer to a frame of the client, in one queue with the rest: `accepted` goes before news."""

    type: ClassVar[str] = "reply"

    content: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return self.content

    def encoded(self) -> str:
        # It may repeat what the client said, and half a surrogate pair is text that only JSON's escapes can carry.
        return json.dumps(self.content, separators=(",", ":"))


@dataclass(kw_only=True, slots=True)
class AcceptedMarker(Frame):
    """Never sent: stands in the queue behind the reply to a submit, so that news of the request may follow."""

    type: ClassVar[str] = "told"


class SubmitOrdering:
    """Holds back frames about a request that this socket submits, until its `accepted` is sent.

    The topic may tell of a request before the broker has answered the one who put it there.
    """

    def __init__(self) -> None:
        self._held: dict[str, tuple[int, list[Frame]]] = {}
        """By request: submits of it under way, and what came meanwhile."""

    def hold(self, request_id: str) -> None:
        count, frames = self._held.get(request_id, (0, []))
        self._held[request_id] = (count + 1, frames)

    def in_order(self, frame: Frame) -> list[Frame]:
        """The frames to send now that this one was taken from the queue."""
        if isinstance(frame, Reply) or frame.request_id not in self._held:
            return [] if isinstance(frame, AcceptedMarker) else [frame]
        count, frames = self._held[frame.request_id]
        if not isinstance(frame, AcceptedMarker):
            frames.append(frame)
            if len(frames) <= MAX_HELD:
                return []
        elif count > 1:
            self._held[frame.request_id] = (count - 1, frames)
            return []
        del self._held[frame.request_id]
        return frames
