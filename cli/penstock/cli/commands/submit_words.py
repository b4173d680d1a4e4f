"""What follows `penstock submit`: a command, a prompt, or a mistake that would waste a run. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from difflib import get_close_matches

from penstock.cli.failures import CliFailure, ExitCode

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
