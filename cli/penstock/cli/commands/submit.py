"""`penstock submit`: one request of any task, waited for or left to run; images have commands of their own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from penstock.cli.commands import submit_image, submit_texts
from penstock.cli.commands.common import AsJson, BuiltTask, Gateway
from penstock.cli.commands.submit_words import DEFAULT, with_command
from penstock.cli.commands.submitting import MaxTokens, Sent, Timeout, Wait, given, run, text_of
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.option_groups import App


class SubmitGroup(TyperGroup):
    """`penstock submit PROMPT` means `penstock submit text PROMPT`."""

    default = DEFAULT

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_command(args, self.commands))


app = App(
    cls=SubmitGroup,
    no_args_is_help=True,
    help="""Submit one request and wait for its outcome. What names no command below is a prompt for `text`.

Ctrl-C ends the wait, not the request: accepted work has its outcome whatever becomes of a terminal. A line says how
to watch it, and how to cancel it.

Examples:

  penstock submit "What is the capital of France?"

  penstock submit - < question.txt

  penstock submit --stream -c trip "Plan a day in Paris"

  penstock submit --no-wait --priority 9 -f request.json

  penstock submit summarize - < report.txt

  penstock submit embed "a text" "another"

  penstock submit caption dam.png "How many turbines are there?"

  penstock submit image generate "a dam at dawn" --size 512x512 -o dam.png""",
)
app.add_typer(submit_image.app, name="image")
app.command()(submit_texts.summarize)
app.command()(submit_texts.embed)
app.command()(submit_image.caption)


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
    prompt = text_of(prompt or "")
    if task is BuiltTask.EMBEDDING:
        return {"task": task, "payload": {"input": prompt}}
    return {"task": task, "payload": {"messages": [{"role": "user", "content": prompt}]}}


@app.command("text")
def submit(
    gateway: Gateway,
    sent: Sent,
    prompt: Annotated[str | None, typer.Argument(help="The text; - reads it from stdin. Or use --file.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="A request in its JSON form; - for stdin.")] = None,
    task: Annotated[BuiltTask, typer.Option(help="What to do with the prompt.")] = BuiltTask.TEXT_GENERATION,
    conversation: Annotated[str | None, typer.Option("--conversation", "-c", help="The conversation's id.")] = None,
    max_tokens: MaxTokens = None,
    idempotency_key: Annotated[str | None, typer.Option(help="A repeat with this key is the same request.")] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print the text as it comes.")] = False,
    wait: Wait = True,
    timeout: Timeout = 300,
    as_json: AsJson = False,
) -> None:
    """Submit one request.

    Examples:

      penstock submit "What is the capital of France?"

      penstock submit --stream -c trip "Plan a day in Paris"

      git diff | penstock submit -

      penstock submit --no-wait --priority 9 -f request.json
    """
    body = request_body(prompt, file, task)
    body |= given({**sent.fields, "conversation_id": conversation, "stream": stream or None})
    if max_tokens is not None:
        body.setdefault("payload", {})["max_tokens"] = max_tokens
    if idempotency_key:
        gateway.send_always("idempotency-key", idempotency_key)
    run(gateway, body, timeout_s=timeout, wait=wait, stream=stream, as_json=as_json)
