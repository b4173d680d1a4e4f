"""What was published of a stream before its run ended without an outcome, so that the next run can go on from there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock.schemas.fixed import fixed
from penstock.schemas.published_logprobs import PublishedLogprobs


@fixed
class PublishedPrefix:
    """What earlier attempts have published of a stream, from the (epoch, attempt) `since` on: all of it is valid.

    `model` made it. `token_ids` are all that were made for it, also those whose text was held back; none are known of a
    remote model. `call_chars` has the characters of the arguments of each call of a tool, `logprobs` the log
    probabilities of the tokens, where they were asked for.
    """

    model: str
    text: str
    token_ids: tuple[int, ...]
    call_chars: tuple[int, ...]
    since: tuple[int, int]
    logprobs: PublishedLogprobs | None = None


def count_calls(chars: list[int], pieces: Iterable[dict[str, Any]]) -> None:
    """Add to the characters of each call's arguments those of more pieces, which come in order."""
    for piece in pieces:
        if piece["index"] == len(chars):
            chars.append(0)
        chars[piece["index"]] += len(piece["arguments"])
