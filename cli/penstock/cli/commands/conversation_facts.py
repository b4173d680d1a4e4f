"""What `penstock conversations create` and `set` say of a conversation: title, metadata, policy of summaries."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

import typer

from penstock.cli.commands.submitting import given
from penstock.cli.failures import CliFailure, ExitCode


@dataclass(kw_only=True)
class Facts:
    """Options; what is not named stays as it is. The three of the policy are one thing, which is set as a whole."""

    title: Annotated[str | None, typer.Option(help='A name for people; "" takes it away.')] = None
    metadata: Annotated[
        list[str] | None,
        typer.Option(help='NAME=VALUE, in place of all that there was; "" for none. May stand several times.'),
    ] = None
    every_turns: Annotated[
        int | None, typer.Option(min=0, help="Sum up after so many turns; a policy in place of what there was.")
    ] = None
    every_tokens: Annotated[
        int | None, typer.Option(min=0, help="Sum up after so many tokens, about; with --every-turns what comes first.")
    ] = None
    summary_model: Annotated[str | None, typer.Option(help="Which model sums up. Default: the best for it.")] = None
    as_settings: Annotated[
        bool, typer.Option("--as-settings", help="Sum up as [summarizer] says, by no policy of its own.")
    ] = False

    def body(self) -> dict[str, Any]:
        """The fields that are to change. Raises CliFailure (usage)."""
        body: dict[str, Any] = {}
        if self.title is not None:
            body["title"] = self.title or None
        if self.metadata is not None:
            body["metadata"] = dict(_pair(one) for one in self.metadata if one)
        policy = given(
            {"every_turns": self.every_turns, "every_tokens": self.every_tokens, "model": self.summary_model}
        )
        if policy.keys() == {"model"}:
            raise CliFailure("--summary-model goes with --every-turns or --every-tokens", exit_code=ExitCode.USAGE)
        if policy and self.as_settings:
            raise CliFailure("--as-settings is in place of a policy of its own", exit_code=ExitCode.USAGE)
        if policy or self.as_settings:
            body["summarize"] = policy or None
        return body


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise CliFailure(f"--metadata {text!r} is not NAME=VALUE", exit_code=ExitCode.USAGE)
    return name, value


def facts_text(conversation: dict[str, Any]) -> str:
    """A conversation in words."""
    rows = {
        "title": conversation["title"],
        "created": when(conversation["created_at"]),
        "last active": when(conversation["last_active_at"]),
        "expires": when(conversation.get("expires_at")),
        "metadata": " ".join(f"{name}={value}" for name, value in conversation["metadata"].items()) or None,
        "summed up": _policy_text(conversation["summarize"]),
    }
    return "\n".join([conversation["id"], *(f"  {name}: {told}" for name, told in rows.items() if told is not None)])


def _policy_text(policy: dict[str, Any] | None) -> str:
    if policy is None:
        return "as the settings say"
    counts = [f"{policy[f'every_{unit}']} {unit}" for unit in ("turns", "tokens") if policy[f"every_{unit}"]]
    if not counts:
        return "not by itself"
    return f"every {' or '.join(counts)}" + (f" by {policy['model']}" if policy["model"] else "")


def when(seconds: int | None) -> str | None:
    """A time in seconds since the epoch, as it is here."""
    return None if seconds is None else datetime.fromtimestamp(seconds).astimezone().isoformat(" ")
