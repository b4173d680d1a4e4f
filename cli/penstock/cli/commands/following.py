"""Following one request over HTTP: its frames as they come, across restarts of the gateway, up to a deadline."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import typer

from penstock.cli.commands.api_paths import api_path
from penstock.cli.commands.common import DEFAULT_URL, Gateway, sse_frames, waiting_text
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.paths import Progress

ABSENCE_S = 60.0
"""So long a gateway that answered once may be away."""
AGAIN_S = 0.5
SILENCE_S = 30.0
"""A gateway sends a comment every 10 s: one that is silent for longer is gone."""
LONG_POLL_S = 30.0
FIRST_POLL_S = 3.0
"""So long nothing is said of a request that is waited for."""


def command_at(gateway: Gateway, words: str, request_id: str) -> str:
    """`penstock watch ID`, with the gateway where it is not the usual one."""
    return f"penstock {words} {request_id}" + ("" if gateway.base_url == DEFAULT_URL else f" --url {gateway.base_url}")


class Deadline:
    """When to give up waiting for a request; None: never. `go_on` is the command that waits on."""

    def __init__(self, timeout_s: float | None, go_on: str) -> None:
        self.timeout_s, self._go_on = timeout_s, go_on
        self._at = float("inf") if timeout_s is None else time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        return self._at - time.monotonic()

    def check(self, request_id: str, status: str) -> None:
        """Raises CliFailure (exit 4), naming how to go on, when the time is over."""
        if self.left_s <= 0:
            raise CliFailure(
                f"{request_id} is still {status} after {self.timeout_s:g} s; it goes on: `{self._go_on}`",
                exit_code=ExitCode.TIMED_OUT,
            )


class GatewayAbsence:
    """Waits for a gateway that answered before and does not now. One that never answered is not waited for."""

    def __init__(self, *, answered: bool) -> None:
        self._answered = answered
        self._away_since: float | None = None

    def answered(self) -> None:
        self._answered, self._away_since = True, None

    def wait(self, failure: CliFailure) -> None:
        """Raises the failure when it is of another kind, or has lasted too long."""
        if not self._answered or not failure.unreachable:
            raise failure
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
            typer.echo("\n[the gateway is away; waiting for it]", err=True)
        elif now - self._away_since > ABSENCE_S:
            raise failure
        time.sleep(AGAIN_S)


def follow(
    gateway: Gateway,
    request_id: str,
    *,
    after: str | None = None,
    timeout_s: float | None = None,
    submitted: bool = False,
) -> Iterator[dict[str, Any]]:
    """Frames up to the `result`, from behind the cursor `after`. A lost gateway is waited for and resumed at.

    Raises CliFailure: unreachable, timed out, or what the gateway refuses. `submitted`: it answered already.
    """
    deadline = Deadline(timeout_s, command_at(gateway, "watch", request_id))
    absence = GatewayAbsence(answered=submitted)
    cursor, status = after, "unknown"
    while True:
        deadline.check(request_id, status)
        try:
            anything = False
            for frame in _connection(gateway, request_id, cursor, deadline):
                absence.answered()
                anything = True
                cursor, status = frame.get("cursor") or cursor, frame.get("status", status)
                yield {**frame, **_why_it_waits(gateway, request_id)} if _says_nothing(frame) else frame
                if frame["type"] == "result":
                    return
            absence.answered()
            if not anything:  # nothing is left behind this cursor
                request = gateway.call("GET", api_path("/v1/requests", request_id))
                status = request["status"]
                if request["done"]:
                    yield {**request, "type": "result"}
                    return
        except CliFailure as failure:
            deadline.check(request_id, status)
            absence.wait(failure)
        else:
            time.sleep(AGAIN_S)


def wait_for(gateway: Gateway, request_id: str, timeout_s: float, say: Progress) -> dict[str, Any]:
    """Long-polls until the outcome, and says what it waits for. Raises CliFailure (exit 4) with what it last saw."""
    deadline = Deadline(timeout_s, command_at(gateway, "watch", request_id))
    absence = GatewayAbsence(answered=True)
    request: dict[str, Any] = {"status": "accepted"}
    wait_s, said = FIRST_POLL_S, ""
    while True:
        deadline.check(request_id, request["status"])
        wait_s = min(wait_s, deadline.left_s)
        try:
            path = api_path("/v1/requests", request_id)
            request = gateway.call("GET", path, wait=round(wait_s, 1), timeout_s=wait_s + 15)
        except CliFailure as failure:
            deadline.check(request_id, request["status"])
            absence.wait(failure)
            continue
        absence.answered()
        if request["done"]:
            return request
        if (text := waiting_text(request)) != said:
            say(f"[{text}]")
        wait_s, said = LONG_POLL_S, text


def _says_nothing(frame: dict[str, Any]) -> bool:
    """Whether a frame tells only that no worker has begun with the request."""
    return frame["type"] == "status" and frame["status"] == "accepted" and not frame.get("detail")


def _why_it_waits(gateway: Gateway, request_id: str) -> dict[str, Any]:
    request = gateway.call("GET", api_path("/v1/requests", request_id))
    return {} if request["done"] else {name: request.get(name) for name in ("detail", "waiting_for")}


def _connection(
    gateway: Gateway, request_id: str, after: str | None, deadline: Deadline
) -> Generator[dict[str, Any], None, None]:
    """The frames of one connection. Raises CliFailure when it is lost, as it is when the time is over."""
    left_s = max(0.1, deadline.left_s)
    headers = {"last-event-id": after} if after else {}
    timeout = httpx.Timeout(min(10.0, left_s), read=min(SILENCE_S, left_s))
    with (
        gateway.stream(
            "GET", api_path("/v1/requests", request_id, "events"), headers=headers, timeout=timeout
        ) as answer,
        _cut_when_over(answer, deadline),
    ):
        yield from sse_frames(answer)


@contextmanager
def _cut_when_over(answer: httpx.Response, deadline: Deadline) -> Generator[None]:
    """Close the connection at the deadline, whether something is being read or not."""
    if deadline.timeout_s is None:
        yield
        return
    connection: socket.socket = answer.extensions["network_stream"].get_extra_info("socket")

    def cut() -> None:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(max(0.0, deadline.left_s), cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
