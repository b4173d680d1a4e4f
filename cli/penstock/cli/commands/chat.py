"""`penstock chat`: a conversation in the terminal, streamed, kept on its topic, resumed by its id."""

from __future__ import annotations

import json
import time
import uuid
from contextlib import ExitStack
from typing import Annotated, Any

import typer
from rich.prompt import Prompt
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.sync.client import ClientConnection, connect

from penstock.cli.commands.api_paths import api_path
from penstock.cli.commands.common import Gateway, auth_headers, console, errors, no_gateway, waiting_text
from penstock.cli.commands.item_words import item_role, item_text
from penstock.cli.commands.submitting import MaxTokens
from penstock.cli.failures import CliFailure, ExitCode

HELP = (
    "/new begins another conversation, /history shows this one, /retry asks again,"
    " /quit (or Ctrl-D) ends; Ctrl-C cancels an answer."
)

BUSY_LIMIT_S = 600.0
PATIENCE_S = 30.0
"""How long a gateway may be away."""


class Busy(Exception):
    """The gateway asks to come again later; `after_s` None: it does not say when."""

    def __init__(self, message: str, after_s: float | None) -> None:
        super().__init__(message)
        self.after_s = after_s


class Waiting:
    """Waits as long as a busy gateway asks, and says so; longer and longer when it does not say how long."""

    def __init__(self) -> None:
        self._unsaid_s = 1.0
        self._give_up = time.monotonic() + BUSY_LIMIT_S

    def wait(self, busy: Busy) -> None:
        """Raises CliFailure when it was busy for too long."""
        wait_s = busy.after_s
        if wait_s is None:
            wait_s, self._unsaid_s = self._unsaid_s, min(30.0, 2 * self._unsaid_s)
        if time.monotonic() + wait_s > self._give_up:
            raise CliFailure(f"{busy}; gave up after {BUSY_LIMIT_S:.0f} s", exit_code=ExitCode.TIMED_OUT) from busy
        errors.print(f"({busy}; asking again in {max(1, round(wait_s))} s)", style="yellow", markup=False)
        time.sleep(wait_s)


class ChatSocket:
    """One WebSocket for a whole chat; it is dialled again, with the last cursor, when it drops in mid-answer."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway.base_url
        self.url = self.gateway.replace("http", "ws", 1) + "/v1/ws"
        self.headers = auth_headers(gateway.key)
        self.socket: ClientConnection | None = None
        self._opened = ExitStack()

    def connect(self) -> None:
        """Dial; a gateway that is busy is waited for. Raises CliFailure when there is none, or it refuses."""
        waiting = Waiting()
        while True:
            try:
                self.socket = self.dial()
                return
            except Busy as busy:
                waiting.wait(busy)

    def send(self, frame: dict[str, Any]) -> None:
        if self.socket is None:
            self.connect()
        assert self.socket is not None
        try:
            self.socket.send(json.dumps(frame))
        except ConnectionClosed:
            self.resume(frame)

    def resume(self, frame: dict[str, Any]) -> None:
        """Dial until the gateway is back: an answer that was begun goes on at it."""
        give_up = time.monotonic() + PATIENCE_S
        while True:
            try:
                self.socket = self.dial()
                self.socket.send(json.dumps(frame))
                return
            except (CliFailure, ConnectionClosed, Busy) as error:
                if time.monotonic() > give_up or (isinstance(error, CliFailure) and not error.unreachable):
                    raise CliFailure(str(error), exit_code=ExitCode.UNREACHABLE) from error
                time.sleep(0.5)

    def dial(self) -> ClientConnection:
        """Raises Busy, or CliFailure saying why there is no socket."""
        self.close()
        try:
            # A proxy of the environment is for the outside.
            dialled = connect(
                self.url,
                additional_headers=self.headers,
                subprotocols=["penstock.v1"],  # type: ignore[list-item]
                proxy=None,
            )
            return self._opened.enter_context(dialled)
        except InvalidStatus as error:
            raise refusal(error) from error
        except (OSError, InvalidHandshake, InvalidURI) as error:
            raise no_gateway(self.gateway, error) from error

    def receive(self) -> dict[str, Any]:
        assert self.socket is not None
        return json.loads(self.socket.recv())

    def close(self) -> None:
        self._opened.close()


def refusal(error: InvalidStatus) -> Busy | CliFailure:
    """What an HTTP answer in place of a socket means."""
    answer = error.response
    try:
        text = str(json.loads(answer.body or b"")["error"]["message"])
    except (ValueError, KeyError, TypeError):
        text = f"the gateway answers with HTTP {answer.status_code}"
    if answer.status_code not in (429, 503):
        return CliFailure(text)
    try:
        return Busy(text, float(answer.headers.get("retry-after", "")))
    except ValueError:
        return Busy(text, None)


def answer(chat: ChatSocket, request: dict[str, Any]) -> None:
    """Sends one turn and prints its answer as it comes. A gateway that is busy is waited for."""
    # One key for all tries: a turn that was taken before the socket dropped is not taken twice.
    submit = {"type": "submit", "request": request, "idempotency_key": uuid.uuid4().hex}
    waiting = Waiting()
    while True:
        try:
            take_turn(chat, submit)
            return
        except Busy as busy:
            waiting.wait(busy)


def take_turn(chat: ChatSocket, submit: dict[str, Any]) -> None:
    """One try. Raises Busy when the gateway did not take it now."""
    chat.send(submit)
    request_id: str | None = None
    cursor: str | None = None
    waiting = console.status("waiting…") if console.is_terminal else None
    if waiting:
        waiting.start()
    try:
        while True:
            try:
                frame = chat.receive()
            except KeyboardInterrupt:
                if request_id is None:
                    raise
                chat.send({"type": "cancel", "request_id": request_id})
                continue
            except ConnectionClosed:
                taken = {"type": "subscribe", "request_id": request_id, "after": cursor}
                chat.resume(submit if request_id is None else taken)
                continue
            cursor = frame.get("cursor") or cursor
            request_id = frame.get("request_id") or request_id
            if waiting and frame["type"] in ("chunk", "snapshot", "result", "error"):
                waiting.stop()
                waiting = None
            if frame["type"] == "error" and request_id is None and frame["error"].get("retryable"):
                raise Busy(frame["error"]["message"], (frame["error"].get("details") or {}).get("retry_after_s"))
            if show(frame, waiting):
                return
    finally:
        if waiting:
            waiting.stop()


def show(frame: dict[str, Any], waiting: Any) -> bool:
    """Prints what a frame means to a person; true when it was the last."""
    match frame["type"]:
        case "status" if waiting:
            waiting.update(f"{waiting_text(frame)}…")
        case "chunk" | "snapshot":
            console.print(frame["text"], end="", markup=False, highlight=False, soft_wrap=True)
        case "restarted":
            errors.print("\n(the worker was lost; the answer begins again)", style="yellow")
        case "error":
            raise CliFailure(frame["error"]["message"])
        case "result":
            console.print()
            if frame.get("error"):
                errors.print(f"({frame['status']}: {frame['error']['message']})", style="yellow", markup=False)
            return True
        case _:
            pass
    return False


def print_history(gateway: Gateway, conversation: str) -> None:
    for item in gateway.pages(api_path("/v1/conversations", conversation, "items"), 1000, order="asc"):
        console.print(f"[bold]{item_role(item)}[/bold]: ", end="")
        console.print(item_text(item), markup=False, highlight=False)


def chat(
    gateway: Gateway,
    conversation: Annotated[str | None, typer.Option("--conversation", "-c", help="Go on with this one.")] = None,
    model: Annotated[str | None, typer.Option(help="Default: the best for text.")] = None,
    system: Annotated[str | None, typer.Option(help="A system prompt for a new conversation.")] = None,
    max_tokens: MaxTokens = 256,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
) -> None:
    """Chat with a model; the conversation is kept on its topic and can be resumed by its id.

    Example: penstock chat -c trip --system "You are a travel guide."
    """
    conversation = conversation or f"chat-{uuid.uuid4().hex[:8]}"
    fresh, last = system, ""
    interactive = console.is_terminal
    socket = ChatSocket(gateway)
    socket.connect()  # before anything is typed
    if interactive:
        console.print(f"conversation [bold]{conversation}[/bold]. {HELP}", style="dim")
    try:
        while True:
            try:
                line = (Prompt.ask("[bold cyan]you[/bold cyan]") if interactive else input()).strip()
            except (EOFError, KeyboardInterrupt):
                break
            match line:
                case "":
                    continue
                case "/quit" | "/exit":
                    break
                case "/help":
                    console.print(HELP, style="dim")
                    continue
                case "/new":
                    conversation, fresh = f"chat-{uuid.uuid4().hex[:8]}", system
                    console.print(f"conversation [bold]{conversation}[/bold]", style="dim")
                    continue
                case "/history":
                    print_history(gateway, conversation)
                    continue
                case "/retry" if last:
                    line = last
                case _:
                    pass
            messages = [{"role": "system", "content": fresh}] if fresh else []
            payload: dict[str, Any] = {
                "messages": [*messages, {"role": "user", "content": line}],
                "max_tokens": max_tokens,
            }
            if temperature is not None:
                payload["temperature"] = temperature
            request = {
                "task": "text_generation",
                "model": model,
                "conversation_id": conversation,
                "stream": True,
                "payload": payload,
            }
            try:
                answer(socket, request)
            except CliFailure as failure:
                if not interactive or failure.unreachable:
                    raise
                errors.print(f"({failure})", style="yellow", markup=False)
                continue
            last, fresh = line, None
    finally:
        socket.close()
    if interactive:
        console.print(f"\ngo on later: penstock chat -c {conversation}", style="dim")
