"""`penstock submit summarize` and `penstock submit embed`: tasks that read texts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from penstock.cli.commands.common import DEFAULT_URL, AsJson, Gateway, Key, Url
from penstock.cli.commands.submitting import Model, Priority, Timeout, Wait, run, text_of
from penstock.cli.failures import CliFailure, ExitCode


def summarize(
    text: Annotated[str | None, typer.Argument(help="The text; - reads it from stdin. Or use --conversation.")] = None,
    conversation: Annotated[
        str | None, typer.Option("--conversation", "-c", help="Sum up this conversation. It is only read.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest summary.")] = None,
    model: Model = None,
    priority: Priority = None,
    wait: Wait = True,
    timeout: Timeout = 900,
    url: Url = DEFAULT_URL,
    key: Key = None,
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
    body = _body("summarization", {**of, "max_tokens": max_tokens}, model, priority)
    with Gateway(url, key) as gateway:
        run(gateway, body, timeout_s=timeout, wait=wait, as_json=as_json)


def embed(
    texts: Annotated[list[str], typer.Argument(help="The texts; - reads one from stdin.")],
    dimensions: Annotated[int | None, typer.Option(help="Shorter vectors, where the model has them.")] = None,
    model: Model = None,
    priority: Priority = None,
    wait: Wait = True,
    timeout: Timeout = 300,
    url: Url = DEFAULT_URL,
    key: Key = None,
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
    with Gateway(url, key) as gateway:
        body = _body("embedding", payload, model, priority)
        run(gateway, body, timeout_s=timeout, wait=wait, as_json=as_json, text=vectors)


def vectors(outcome: Mapping[str, Any]) -> str:
    """One JSON line for each text."""
    return "\n".join(json.dumps(vector) for vector in outcome["result"]["embeddings"])


def _body(task: str, payload: Mapping[str, Any], model: str | None, priority: int | None) -> dict[str, Any]:
    """Only what was given: the gateway fills in the rest."""
    fields = {"task": task, "model": model, "priority": priority}
    given = {name: value for name, value in fields.items() if value is not None}
    return {**given, "payload": {name: value for name, value in payload.items() if value is not None}}
