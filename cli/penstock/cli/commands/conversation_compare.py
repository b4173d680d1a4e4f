"""`penstock conversations compare`: two conversations beside each other, question by question."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer
from rich.table import Column, Table
from rich.text import Text

from penstock.cli.commands.common import AsJson, Gateway, console, print_json
from penstock.cli.commands.conversation_files import EVERY
from penstock.cli.commands.conversation_rerun import messages_in
from penstock.cli.comparisons import Exchange, Pair, RunTimes, compared, cost_of, pair_json, words_of
from penstock.cli.failures import CliFailure, ExitCode

NARROWEST = 80
"""Columns of a terminal on which answers stand beside each other."""


def compare(
    gateway: Gateway,
    conversation: Annotated[str, typer.Argument(help="A conversation's id.")],
    other: Annotated[str, typer.Argument(help="Another's, as a re-run or a fork of it.")],
    as_json: AsJson = False,
) -> None:
    """What two conversations answered to the same questions, in order, without what both inherit.

    Tokens and run time stand there as far as they are known; run times are kept for two days.

    Example: penstock conversations compare trip trip-chat --json
    """
    if conversation == other:
        raise CliFailure("name two conversations", exit_code=ExitCode.USAGE)
    names = (conversation, other)
    found = compared(*(messages_in(gateway, name) for name in names))
    run_ms = {request_id: time_ms for name in names for request_id, time_ms in _run_times(gateway, name).items()}
    for number, pair in enumerate(found.pairs, found.shared + 1):
        if as_json:
            print_json(pair_json(pair, names, run_ms))
        else:
            print_pair(number, pair, names, run_ms)
    if not as_json:
        counts = Counter(_judged(pair, names) for pair in found.pairs)
        told = ", ".join(f"{count} {judged}" for judged, count in counts.items())
        typer.echo(f"{found.shared} inherited by both" + (f", {told}" if told else ""))


def _run_times(gateway: Gateway, conversation: str) -> RunTimes:
    requests = gateway.pages("/v1/requests", EVERY, conversation_id=conversation)
    return {one["request_id"]: one["timings"]["run_ms"] for one in requests if one["timings"] is not None}


def _judged(pair: Pair, names: tuple[str, str]) -> str:
    if pair.is_equal is None:
        return f"only in {names[0] if pair.other is None else names[1]}"
    return "equal" if pair.is_equal else "different"


def print_pair(number: int, pair: Pair, names: tuple[str, str], run_ms: RunTimes) -> None:
    """The question, and the answers beside each other, or one after the other where there is no room for that."""
    console.print(Text(f"{number}. {_judged(pair, names)}", style="bold"))
    _print_words("\n".join(f"{line['role']}: {words_of([line])}" for line in pair.asked))
    answers = [(name, one) for name, one in zip(names, (pair.one, pair.other), strict=True) if one is not None]
    heads = [Text(_head(name, one, run_ms), style="cyan") for name, one in answers]
    words = [words_of(one.answered) for _, one in answers]
    if pair.is_equal:
        console.print(*heads, sep="\n", soft_wrap=True)
        _print_words(words[0])
    elif console.is_terminal and console.width >= NARROWEST and len(answers) > 1:
        table = Table(*(Column(head, ratio=1) for head in heads), expand=True, box=None, pad_edge=False)
        table.add_row(*map(Text, words))
        console.print(table)
    else:
        for head, told in zip(heads, words, strict=True):
            console.print(head, soft_wrap=True)
            _print_words(told)
    console.print()


def _print_words(words: str) -> None:
    """Wrapped on a terminal alone: other programs read what is piped."""
    console.print(Text(words), soft_wrap=not console.is_terminal)


def _head(name: str, exchange: Exchange, run_ms: RunTimes) -> str:
    cost = cost_of(exchange, run_ms)
    return f"{name} ({cost})" if cost else name
