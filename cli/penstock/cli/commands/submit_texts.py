"""`penstock submit summarize` and `penstock submit embed`: tasks that read texts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from penstock.cli.commands.common import AsJson, Gateway
from penstock.cli.commands.submitting import MaxTokens, Sent, Timeout, Wait, run, text_of
from penstock.cli.failures import CliFailure, ExitCode


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
