"""`penstock demo`: what Penstock promises, shown on the system that `penstock up` runs on this machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from penstock.cli.commands.common import Gateway, Key
from penstock.cli.commands.following import follow
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.option_groups import App
from penstock.cli.paths import default_data_dir
from penstock.cli.state import Home, SystemState

app = App(no_args_is_help=True, help="Show what Penstock does, on the system that `penstock up` runs here.")

PROMPT = "Write a long story about the keeper of a dam."
GONE_S = 10.0
WITHIN_S = 180.0


@app.callback()
def demo() -> None:
    """Sub-commands follow."""


@app.command("kill")
def kill(
    part: Annotated[
        Literal["worker", "gateway"], typer.Argument(help="The process that is killed in mid-stream.")
    ] = "worker",
    model: Annotated[str | None, typer.Option(help="The model that writes (default: the system's own choice).")] = None,
    prompt: Annotated[str, typer.Option(help="What the model is asked.")] = PROMPT,
    tokens: Annotated[int, typer.Option(min=20, help="Tokens of the text.")] = 160,
    after: Annotated[int, typer.Option(min=1, help="Chunks of text before the kill.")] = 8,
    data_dir: Annotated[Path | None, typer.Option(help="The data folder of `penstock up`.")] = None,
    key: Key = None,
) -> None:
    """Stream a text, end a process with kill -9 in the middle, and see the text go on where it stopped.

    The text is on stdout, what happens to it on stderr. `penstock up` starts the process again.

    Example: penstock demo kill gateway
    """
    home = Home(data_dir or default_data_dir())
    state = home.running()
    if state is None:
        raise CliFailure(f"`penstock up{home.option}` does not run here: start it in another terminal")
    with Gateway(state.url, key) as gateway:
        payload = {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "temperature": 0}
        body = {"task": "text_generation", "model": model, "stream": True, "payload": payload}
        request_id = gateway.call("POST", "/v1/requests", body=body)["request_id"]
        shown = Shown(lambda: end_process(state, part), after)
        for frame in follow(gateway, request_id, timeout_s=WITHIN_S, submitted=True):
            shown.show(frame)
    shown.check(request_id)


class Shown:
    """The text as it was printed, and what happened to it."""

    def __init__(self, kill: Callable[[], str], after: int) -> None:
        """`kill` is called behind so many chunks, and says what it did."""
        self._kill, self._left = kill, after
        self._text: list[str] = []
        self._killed_at: float | None = None
        self._away_s: float | None = None
        self._restarts = 0
        self._result: dict[str, Any] = {}

    def show(self, frame: dict[str, Any]) -> None:
        match frame["type"]:
            case "chunk":
                if self._killed_at is not None and self._away_s is None:
                    self._away_s = time.monotonic() - self._killed_at
                    typer.secho(f" [goes on after {self._away_s:.1f} s] ", err=True, nl=False, fg="green")
                typer.echo(frame["text"], nl=False)
                self._text.append(frame["text"])
                self._left -= 1
                if self._left == 0:
                    typer.secho(f" [{self._kill()}] ", err=True, nl=False, fg="red")
                    self._killed_at = time.monotonic()
            case "restarted" | "snapshot":
                self._restarts += 1
            case "result":
                self._result = frame
            case _:
                pass

    def check(self, request_id: str) -> None:
        """Say what came of it. Raises CliFailure when it is not one text."""
        typer.echo("")
        if self._result["status"] != "completed":
            raise CliFailure(f"{request_id} {self._result['status']}", exit_code=ExitCode.FAILED)
        text = "".join(self._text)
        if self._away_s is None:
            raise CliFailure("the text was over before the kill: ask for more --tokens, or kill --after fewer chunks")
        if self._restarts or text != self._result["result"]["text"]:
            raise CliFailure("the text began anew after the kill", exit_code=ExitCode.FAILED)
        typer.secho(
            f"One text of {len(text)} characters: nothing twice, nothing missing; {self._away_s:.1f} s without news.",
            err=True,
            fg="green",
        )


def end_process(state: SystemState, part: str) -> str:
    """Kill the part and wait for its end; what was done. Raises CliFailure."""
    pid = next((one.pid for one in state.parts if one.name == part), None)
    if pid is None:
        raise CliFailure(f"`penstock up` runs no {part} now")
    os.kill(pid, signal.SIGKILL)
    give_up = time.monotonic() + GONE_S
    while is_running(pid):
        if time.monotonic() > give_up:
            raise CliFailure(f"the {part} (pid {pid}) did not end")
        time.sleep(0.01)
    return f"kill -9 of the {part}, pid {pid}: it is gone"


def is_running(pid: int) -> bool:
    """Whether the process is there, and no zombie that its parent has not noticed yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
