"""`penstock watch`: what happens to one request, as it happens."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock.cli.commands.common import AsJson, Gateway, outcome_text, print_json, waiting_text
from penstock.cli.commands.following import follow
from penstock.cli.failures import CliFailure, ExitCode


def watch(
    gateway: Gateway,
    request_id: Annotated[str, typer.Argument(help="As `penstock submit --no-wait` printed it.")],
    after: Annotated[str | None, typer.Option(help="A cursor: go on behind it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Follow a request to its outcome: statuses on stderr, text on stdout; --json prints every frame as a line.

    A gateway that restarts meanwhile is waited for, and the text goes on where it was.

    Example: penstock watch 3f0c… --json
    """
    watched = Watched(as_json=as_json, fresh=after is None)
    for frame in follow(gateway, request_id, after=after):
        watched.show(frame)
    if not as_json:
        typer.echo(f"\n[{watched.status}]", err=True)
    if watched.status != "completed":
        raise CliFailure(f"{request_id} {watched.status}", exit_code=ExitCode.FAILED)


class Watched:
    """What was printed of a request so far. `fresh`: it is watched from its beginning."""

    def __init__(self, *, as_json: bool, fresh: bool) -> None:
        self.status: str | None = None
        self._as_json = as_json
        self._fresh = fresh
        self._told = False
        self._line = ""

    def show(self, frame: dict[str, Any]) -> None:
        self.status = frame.get("status", self.status)
        if self._as_json:
            print_json(frame)
            return
        match frame["type"]:
            case "status":
                self._say(f"[{waiting_text(frame)}]")
            case "chunk":
                self._text(frame["text"])
            case "snapshot":
                if self._told:
                    self._say("\n[the text so far, again]")
                self._text(frame["text"])
            case "restarted":
                self._say(f"\n[began again, attempt {frame.get('attempt')}]")
            case "result" if self._fresh and not self._told and frame["status"] == "completed":
                self._text(outcome_text(frame))
            case "result" if frame.get("error"):
                self._say(f"\n[{frame['error']['message']}]")
            case _:
                pass

    def _say(self, line: str) -> None:
        """What a new connection repeats is said once."""
        if line != self._line:
            typer.echo(line, err=True)
        self._line = line

    def _text(self, text: str) -> None:
        typer.echo(text, nl=False)
        self._told = True
