"""`penstock submit`: one request of any task, waited for or left to run; images have commands of their own."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from penstock.cli.commands import submit_image
from penstock.cli.commands.common import AsJson, BuiltTask, Gateway
from penstock.cli.commands.submitting import MaxTokens, Sent, Timeout, Wait, given, run, text_of
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.option_groups import App

DEFAULT = "text"
LIKE = 0.8
"""How like a command's name a mistyped one is: `sumarize` is, `hello` and `summer` are not."""
OTHER_NAMES = {
    "summary": "summarize",
    "summarise": "summarize",
    "summarization": "summarize",
    "embedding": "embed",
    "embeddings": "embed",
    "image_to_text": "caption",
    "describe": "caption",
    "image_generation": "image generate",
    "image_editing": "image edit",
    "image_processing": "image process",
    "text_generation": DEFAULT,
    "help": "--help",
}


def with_command(arguments: Sequence[str], commands: Collection[str]) -> list[str]:
    """The arguments, with `text` before what is a prompt or an option of it.

    Raises CliFailure (usage) for a word that was meant as a command, and for a prompt without quotes.
    """
    if not arguments or arguments[0] in commands or arguments[0] in ("-h", "--help"):
        return list(arguments)
    first = arguments[0]
    if first.startswith("-") or any(map(str.isspace, first)):
        return [DEFAULT, *arguments]
    meant = _meant(first, commands)
    several = len(arguments) > 1 and not arguments[1].startswith("-")
    if meant is None and not several:
        return [DEFAULT, *arguments]
    prompt = next((n for n, word in enumerate(arguments) if word.startswith("-")), len(arguments))
    quoted = shlex.quote(" ".join(arguments[:prompt]))
    advice = f"did you mean `penstock submit {meant}`? " if meant else f"it has {', '.join(sorted(commands))}. "
    raise CliFailure(
        f"submit has no command {first}: {advice}A prompt goes in quotes: `penstock submit text {quoted}`",
        exit_code=ExitCode.USAGE,
    )


def _meant(word: str, commands: Collection[str]) -> str | None:
    """The command that the word nearly names; a near `text` is a prompt as well as any."""
    names = OTHER_NAMES | {name: name for name in commands if name != DEFAULT}
    known = names.get(word.lower().replace("-", "_"))
    near = get_close_matches(word.lower(), names, n=1, cutoff=LIKE)
    return known or (names[near[0]] if near else None)


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


@app.command()
def summarize(
    gateway: Gateway,
    sent: Sent,
    text: Annotated[str | None, typer.Argument(help="The text; - reads it from stdin. Or use --conversation.")] = None,
    conversation: Annotated[
        str | None, typer.Option("--conversation", "-c", help="Sum up this conversation. It is only read.")
    ] = None,
    max_tokens: MaxTokens = None,
    wait: Wait = True,
    timeout: Timeout = 900,
    as_json: AsJson = False,
) -> None:
    """Sum up a text, or a conversation. The text may be longer than the model's window.

    Examples:

      penstock submit summarize - < report.txt

      penstock submit summarize --conversation trip --max-tokens 100
    """
    if (text is None) == (conversation is None):
        raise CliFailure("give a text, - or --conversation, one of them", exit_code=ExitCode.USAGE)
    of: dict[str, Any] = {"conversation_id": conversation} if text is None else {"text": text_of(text)}
    body = sent.body("summarization", {**of, "max_tokens": max_tokens})
    run(gateway, body, timeout_s=timeout, wait=wait, as_json=as_json)


@app.command()
def embed(
    gateway: Gateway,
    sent: Sent,
    texts: Annotated[list[str], typer.Argument(help="The texts; - reads one from stdin.")],
    dimensions: Annotated[int | None, typer.Option(help="Shorter vectors, where the model has them.")] = None,
    wait: Wait = True,
    timeout: Timeout = 300,
    as_json: AsJson = False,
) -> None:
    """Make the vectors of texts: a JSON line for each, in their order.

    Examples:

      penstock submit embed "a text" "another"

      penstock submit embed - < page.txt | jq length
    """
    if texts.count("-") > 1:
        raise CliFailure("stdin is read once: give - once", exit_code=ExitCode.USAGE)
    payload = {"input": [text_of(text) for text in texts], "dimensions": dimensions}
    body = sent.body("embedding", payload)
    run(gateway, body, timeout_s=timeout, wait=wait, as_json=as_json, text=vectors)


def vectors(outcome: Mapping[str, Any]) -> str:
    """One JSON line for each text."""
    return "\n".join(json.dumps(vector) for vector in outcome["result"]["embeddings"])


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
