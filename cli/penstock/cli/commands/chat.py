"""`penstock chat`: a conversation in the terminal, streamed, kept on its topic, resumed by its id."""

from __future__ import annotations

import json
import time
import uuid
from typing import Annotated, Any

import typer
from rich.prompt import Prompt
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from penstock.cli.commands.common import DEFAULT_URL, Gateway, Key, Url, console, errors
from penstock.cli.commands.conversations import item_text
from penstock.cli.failures import CliFailure, ExitCode

HELP = (
    "/new begins another conversation, /history shows this one, /retry asks again,"
    " /quit (or Ctrl-D) ends; Ctrl-C cancels an answer."
)


class ChatSocket:
    """One WebSocket for a whole chat; it is dialled again, with the last cursor, when it drops in mid-answer."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url.rstrip("/").replace("http", "ws", 1) + "/v1/ws"
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.socket: ClientConnection | None = None

    def send(self, frame: dict[str, Any]) -> None:
        if self.socket is None:
            self.socket = self.dial()
        try:
            self.socket.send(json.dumps(frame))
        except ConnectionClosed:
            self.socket = self.dial()
            self.socket.send(json.dumps(frame))

    def resume(self, frame: dict[str, Any], patience_s: float = 30) -> None:
        """Dial until the gateway is back: an answer that was begun goes on at it."""
        give_up = time.monotonic() + patience_s
        while True:
            try:
                self.socket = self.dial()
                self.socket.send(json.dumps(frame))
                return
            except (CliFailure, ConnectionClosed):
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.5)

    def dial(self) -> ClientConnection:
        try:
            # A proxy of the environment is for the outside.
            return connect(
                self.url,
                additional_headers=self.headers,
                subprotocols=["penstock.v1"],  # type: ignore[list-item]
                proxy=None,
            )
        except (OSError, InvalidStatus) as error:
            raise CliFailure(
                f"no gateway at {self.url} ({error}); start one with `penstock up` or name it with --url",
                exit_code=ExitCode.UNREACHABLE,
            ) from error

    def receive(self) -> dict[str, Any]:
        assert self.socket is not None
        return json.loads(self.socket.recv())

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()


def answer(chat: ChatSocket, request: dict[str, Any]) -> None:
    """Sends one turn and prints its answer as it comes."""
    chat.send({"type": "submit", "request": request})
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
            except ConnectionClosed as error:
                if request_id is None:
                    raise CliFailure(f"the gateway closed the socket: {error}") from error
                chat.resume({"type": "subscribe", "request_id": request_id, "after": cursor})
                continue
            cursor = frame.get("cursor") or cursor
            request_id = frame.get("request_id") or request_id
            if waiting and frame["type"] in ("chunk", "snapshot", "result", "error"):
                waiting.stop()
                waiting = None
            if show(frame, waiting):
                return
    finally:
        if waiting:
            waiting.stop()


def show(frame: dict[str, Any], waiting: Any) -> bool:
    """Prints what a frame means to a person; true when it was the last."""
    match frame["type"]:
        case "status" if waiting:
            place = f", position {frame['position']}" if frame.get("position") else ""
            waiting.update(f"{frame['status'].replace('_', ' ')}{place}…")
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


def print_history(url: str, key: str | None, conversation: str) -> None:
    with Gateway(url, key) as gateway:
        for item in gateway.pages(f"/v1/conversations/{conversation}/items", 1000, order="asc"):
            console.print(f"[bold]{item['role']}[/bold]: ", end="")
            console.print(item_text(item), markup=False, highlight=False)


def chat(
    conversation: Annotated[str | None, typer.Option("--conversation", "-c", help="Go on with this one.")] = None,
    model: Annotated[str | None, typer.Option(help="Default: the best for text.")] = None,
    system: Annotated[str | None, typer.Option(help="A system prompt for a new conversation.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 256,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Chat with a model; the conversation is kept on its topic and can be resumed by its id.

    Example: penstock chat -c trip --system "You are a travel guide."
    """
    conversation = conversation or f"chat-{uuid.uuid4().hex[:8]}"
    fresh, last = system, ""
    interactive = console.is_terminal
    if interactive:
        console.print(f"conversation [bold]{conversation}[/bold]. {HELP}", style="dim")
    socket = ChatSocket(url, key)
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
                    print_history(url, key, conversation)
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
            answer(
                socket,
                {
                    "task": "text_generation",
                    "model": model,
                    "conversation_id": conversation,
                    "stream": True,
                    "payload": payload,
                },
            )
            last, fresh = line, None
    finally:
        socket.close()
    if interactive:
        console.print(f"\ngo on later: penstock chat -c {conversation}", style="dim")
