"""`penstock submit`: one request of any task, waited for or left to run; images have commands of their own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from penstock.cli.commands import submit_image
from penstock.cli.commands.common import (
    DEFAULT_URL,
    AsJson,
    BuiltTask,
    Gateway,
    Key,
    Url,
    outcome_text,
    print_json,
    waiting_text,
)
from penstock.cli.commands.following import follow, wait_for
from penstock.cli.failures import CliFailure, ExitCode


class SubmitGroup(TyperGroup):
    """`penstock submit PROMPT` stays what it was: what names no sub-command is the prompt, or an option of `text`."""

    default = "text"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = [self.default, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=SubmitGroup,
    no_args_is_help=True,
    help="""Submit one request and wait for its outcome. What names no command below is a prompt for `text`.

Examples:

  penstock submit "What is the capital of France?"

  penstock submit --stream -c trip "Plan a day in Paris"

  penstock submit --no-wait --priority 9 -f request.json

  penstock submit image generate "a dam at dawn" --size 512x512 -o dam.png""",
)
app.add_typer(submit_image.app, name="image")


def request_body(prompt: str | None, file: Path | None, task: BuiltTask) -> dict[str, Any]:
    """A request's JSON form from a file (or `-`), or built around a prompt."""
    if (prompt is None) == (file is None):
        raise CliFailure("give a prompt or --file, one of the two", exit_code=ExitCode.USAGE)
    if file is not None:
        try:
            text = sys.stdin.read() if str(file) == "-" else file.read_text()
            body = json.loads(text)
        except (OSError, ValueError) as error:
            raise CliFailure(f"{file} is not a readable JSON request: {error}", exit_code=ExitCode.USAGE) from error
        if not isinstance(body, dict):
            raise CliFailure(f"{file} does not hold one JSON object", exit_code=ExitCode.USAGE)
        return {str(name): value for name, value in body.items()}
    if task is BuiltTask.EMBEDDING:
        return {"task": task, "payload": {"input": prompt}}
    return {"task": task, "payload": {"messages": [{"role": "user", "content": prompt}]}}


def follow_text(gateway: Gateway, request_id: str, timeout_s: float) -> str:
    """Prints chunks as they come; returns the final status. An attempt that began anew is said on stderr."""
    told = False
    for frame in follow(gateway, request_id, timeout_s=timeout_s, submitted=True):
        match frame["type"]:
            case "chunk" | "snapshot":
                if told and frame["type"] == "snapshot":
                    typer.echo("\n[the text so far, again]", err=True)
                typer.echo(frame["text"], nl=False)
                told = True
            case "status" if frame.get("detail"):
                typer.echo(f"[{waiting_text(frame)}]", err=True)
            case "restarted":
                typer.echo("\n[the worker was lost; the answer begins again]", err=True)
            case "result":
                if not told and frame["status"] == "completed":
                    typer.echo(outcome_text(frame), nl=False)
                typer.echo()
                if frame.get("error"):
                    typer.echo(f"{frame['status']}: {frame['error']['message']}", err=True)
                return str(frame["status"])
            case _:
                pass
    raise AssertionError("a follow ends with its result")


@app.command("text")
def submit(
    prompt: Annotated[str | None, typer.Argument(help="The text; or use --file.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="A request in its JSON form; - for stdin.")] = None,
    task: Annotated[BuiltTask, typer.Option(help="What to do with the prompt.")] = BuiltTask.TEXT_GENERATION,
    model: Annotated[str | None, typer.Option(help="Default: the best for the task.")] = None,
    priority: Annotated[
        int | None, typer.Option(min=0, help="0 the most urgent; 0-3 high, 4-7 medium, 8 and up low.")
    ] = None,
    conversation: Annotated[str | None, typer.Option("--conversation", "-c", help="The conversation's id.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.")] = None,
    idempotency_key: Annotated[str | None, typer.Option(help="A repeat with this key is the same request.")] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print the text as it comes.")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the outcome.")] = True,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the outcome.")] = 300,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Submit one request.

    Examples:

      penstock submit "What is the capital of France?"

      penstock submit --stream -c trip "Plan a day in Paris"

      penstock submit --no-wait --priority 9 -f request.json
    """
    body = request_body(prompt, file, task)
    chosen = {"model": model, "priority": priority, "conversation_id": conversation, "stream": stream or None}
    body |= {name: value for name, value in chosen.items() if value is not None}
    if max_tokens is not None:
        body.setdefault("payload", {})["max_tokens"] = max_tokens
    with Gateway(url, key) as gateway:
        if idempotency_key:
            gateway.http.headers["idempotency-key"] = idempotency_key
        accepted = gateway.call("POST", "/v1/requests", body=body)
        request_id = accepted["request_id"]
        if not wait:
            print_json(accepted) if as_json else typer.echo(request_id)
            return
        if stream and not as_json:
            status = follow_text(gateway, request_id, timeout)
            raise typer.Exit(ExitCode.OK if status == "completed" else ExitCode.FAILED)
        found = wait_for(gateway, request_id, timeout, lambda line: typer.echo(line, err=True))
    if as_json:
        print_json(found)
    elif found["status"] == "completed":
        typer.echo(outcome_text(found))
    if found["status"] != "completed":
        raise CliFailure(
            f"{request_id} {found['status']}: {(found.get('error') or {}).get('message', '')}",
            exit_code=ExitCode.TIMED_OUT if found["status"] == "expired" else ExitCode.FAILED,
        )
